"""The z step of a smooth activation h: read from a table and polished. `smooth.py` has the activations.

    minimise(a, m, beta, gamma) = argmin_z  gamma (a - h(z))^2 + beta (z - m)^2      (entry by entry)

With kappa = gamma / beta, z is stationary where F(z) = z - kappa (a - h(z)) h'(z) equals m: linear in a, m.
So the table runs over z, not over (a, m): nothing is interpolated, a and m may be of any size, 1025 nodes do.
It rests on three properties of the curve (z, h(z)):

* F'(z) < 0 exactly where a is beyond the centre of curvature A(z) = h + (1 + kappa h'^2) / (kappa h'').
  Where h'' keeps its sign A has one extreme, at a vertex v: F' < 0 on one interval around v, or nowhere.
* Which stretch matters is known beforehand: the convex one when h(m) < a, else the concave one on m's side of
  the lowest point of h. So at most two local minima compete, one on each side of v, however close they come.
* On each side of v, "left of the local minimum" is one monotone predicate of F and A: bisect it on the nodes.

Both minima are then polished by Newton steps held in their table cell, and the cheaper one is kept.

The bound, tested against brute force, f evaluated in float64:

    f(z) - min f <= BOUND[dtype] (gamma (a^2 + h(z)^2) + beta (m^2 + z^2))
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .activations import AbstractActivation

__all__ = ["BOUND", "AbstractSmooth"]

BOUND = {torch.float32: 1e-6, torch.float64: 1e-10}

_CELLS = 1024  # a power of two: ten halvings reach one cell
_POLISH = {torch.float32: (2, 2), torch.float64: (5, 4)}  # Newton steps for both minima, then for the cheaper
_CHUNK = {"cpu": 1 << 15}  # entries at a time: they fit the cache; on other devices launches cost more
_CACHED = 16


class _Range(NamedTuple):
    """Cells to search: first..split for the minimum left of the vertex, split..last for the other."""

    first: Tensor
    split: Tensor
    last: Tensor


class _Table(NamedTuple):
    """Nodes, once for h(m) < a (first half of each tensor) and once for h(m) >= a (second half)."""

    z: Tensor
    edge: Tensor  # z with open ends
    p: Tensor  # F(z) = p - a q
    q: Tensor
    centre: Tensor  # A(z), in the second half -A(z): F'(z) < 0 where a, or -a, exceeds it
    lowest: Tensor  # argmin h
    above: _Range  # h(m) < a
    left: _Range  # h(m) >= a, m left of the lowest point
    right: _Range  # h(m) >= a, m right of the lowest point


class _Entries(NamedTuple):
    a: Tensor
    m: Tensor
    kappa: float


@dataclass(frozen=True)
class AbstractSmooth(AbstractActivation):
    """An h, linear beyond +-`reach` up to rounding; h(z) = z beyond `top`. h'' changes sign at most twice."""

    exact: ClassVar[bool] = False
    _tables: dict[tuple[float, torch.dtype, torch.device], _Table] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    @abc.abstractmethod
    def reach(self) -> float: ...

    @property
    def top(self) -> float:
        return math.inf

    @abc.abstractmethod
    def derivatives(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(h'(z), h''(z)) for z <= top."""

    def value(self, z: Tensor) -> Tensor:
        """h(z) to full relative precision, where torch's own formula cancels."""
        return self(z)

    @torch.no_grad()
    def minimise(self, a: Tensor, m: Tensor, beta: float, gamma: float, out: Tensor | None = None) -> Tensor:
        kappa = gamma / beta
        table = self._table(kappa, m)
        flat_a, flat_m, pieces = a.expand_as(m).reshape(-1), m.reshape(-1), []
        chunk = _CHUNK.get(m.device.type, 1 << 24)
        for start in range(0, max(1, m.numel()), chunk):
            rows = (0, start, min(chunk, m.numel() - start))
            x = _Entries(flat_a.narrow(*rows), flat_m.narrow(*rows), kappa)
            pieces.append(self._solve(table, x))
        return torch.cat(pieces).view(m.shape)

    def _table(self, kappa: float, m: Tensor) -> _Table:
        # Tensor subclasses, such as fake tensors, belong to a mode that ends: nothing of theirs is kept.
        if type(m) not in (Tensor, nn.Parameter):
            return _build(self, kappa, m)
        key = (kappa, m.dtype, m.device)
        if key not in self._tables:
            while len(self._tables) >= _CACHED:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = _build(self, kappa, m)
        return self._tables[key]

    def _solve(self, table: _Table, x: _Entries) -> Tensor:
        both, cheaper = _POLISH[x.m.dtype]
        cells, signed = _cells(table, x, self(x.m))
        # Each starts at the end of its cell away from v: F has no turn between there and the minimum.
        low = _bisect(table, x, signed, cells, rising=True)
        low_bounds = _bounds(table, low)
        z_low = self._newton(table.z.index_select(0, low), x, low_bounds, both)
        high = _bisect(table, x, signed, cells, rising=False)
        high_bounds = _bounds(table, high)
        z_high = self._newton(table.z.index_select(0, high + 1), x, high_bounds, both)
        keep = self._cheaper(z_low, z_high, x)
        bounds = [torch.where(keep, y, w) for y, w in zip(low_bounds, high_bounds, strict=True)]
        z = self._newton(torch.where(keep, z_low, z_high), x, bounds, cheaper)
        if self.top < math.inf:
            line = ((x.a * x.kappa + x.m) / (x.kappa + 1)).clamp(min=_beside(self.top, z.dtype, 1))
            z = torch.where(self._cheaper(line, z, x), line, z)
        return z + (x.a * 0 + x.m * 0)  # an infinite a or m must not come back as a finite z

    def _newton(self, z: Tensor, x: _Entries, bounds: list[Tensor], steps: int) -> Tensor:
        for _ in range(steps):
            dh, d2h = self.derivatives(z)
            pull = (x.a - self.value(z)).mul_(x.kappa)
            convex = (dh * dh).mul_(x.kappa).add_(1)
            slope = torch.maximum(convex - pull * d2h, convex * 1e-4)
            z = torch.clamp(z - (z - x.m - pull * dh) / slope, *bounds)
        return z

    def _cheaper(self, z: Tensor, other: Tensor, x: _Entries) -> Tensor:
        """f(z) <= f(other), by differences: squares would round a small gain away."""
        h, h_other = self.value(z), self.value(other)
        fit = (h_other - h) * ((x.a - h) + (x.a - h_other))
        return fit.mul_(x.kappa) <= (other - z) * ((z - x.m) + (other - x.m))


def _beside(top: float, dtype: torch.dtype, side: int) -> float:
    """Two roundings away from top, where h may jump."""
    return top * (1 + side * 2 * torch.finfo(dtype).eps)


def _cells(table: _Table, x: _Entries, h: Tensor) -> tuple[_Range, Tensor]:
    above, left = h < x.a, x.m <= table.lowest
    cells = (
        torch.where(above, y, torch.where(left, w, v))
        for y, w, v in zip(table.above, table.left, table.right, strict=True)
    )
    return _Range(*cells), torch.where(above, x.a, -x.a)


def _bounds(table: _Table, node: Tensor) -> list[Tensor]:
    return [table.edge.index_select(0, node), table.edge.index_select(0, node + 1)]


def _bisect(table: _Table, x: _Entries, signed: Tensor, cells: _Range, *, rising: bool) -> Tensor:
    """The last node left of the minimum before the vertex (F rises up to it), or of the one after."""
    first, split, last = cells
    node, end = (first, torch.maximum(split - 1, first)) if rising else (torch.minimum(split, last), last)
    step = _CELLS // 2
    while step:  # positions and truth values as floats: several times faster than torch.where on a CPU
        probe = torch.minimum(node + step, end)
        at = probe.int()
        below = torch.addcmul(table.p.index_select(0, at), x.a, table.q.index_select(0, at), value=-1).le_(x.m)
        falls = table.centre.index_select(0, at).lt_(signed)
        go = below.gt_(falls) if rising else torch.maximum(below, falls)
        node = torch.addcmul(node, probe.sub_(node), go)
        step //= 2
    return node.int()


def _build(h: AbstractSmooth, kappa: float, like: Tensor) -> _Table:
    """In float64 whatever the dtype of the entries: centres of curvature span many orders of magnitude."""
    top = _beside(h.top, like.dtype, -1)
    t = torch.linspace(-1, 1, _CELLS - 3, dtype=torch.float64, device=like.device)
    z = (h.reach / 4 * (t + 3 * t**3)).clamp(max=top)  # densest where h bends
    lowest = _zoom(z, h)
    vertices = (
        _zoom(z, lambda z: _centre(h, z, kappa, 1)),
        _zoom(z, lambda z: _centre(h, z, kappa, -1).where(z < lowest, math.inf)),
        _zoom(z, lambda z: _centre(h, z, kappa, -1).where(z > lowest, math.inf)),
    )
    z = torch.cat((z, lowest, *vertices)).sort().values
    dh, _ = h.derivatives(z)
    ends = torch.full_like(lowest, -math.inf), torch.full_like(lowest, top)
    edge = torch.cat((ends[0], z.narrow(0, 1, _CELLS - 1), ends[1]))
    columns = (z, edge, z + kappa * h(z) * dh, kappa * dh)
    centre = torch.cat([_centre(h, z, kappa, side) for side in (1, -1)]).to(like.dtype)
    nodes = torch.searchsorted(z, torch.cat((lowest, *vertices))).to(like.dtype)
    z, edge, p, q = (torch.cat((column, column)).to(like.dtype) for column in columns)
    return _Table(z, edge, p, q, centre, lowest.to(like.dtype), *_ranges(nodes))


def _ranges(nodes: Tensor) -> tuple[_Range, _Range, _Range]:
    lowest, above, left, right = nodes.clamp(max=_CELLS - 1).unbind()
    zero, end = torch.zeros_like(lowest), torch.full_like(lowest, _CELLS - 1)
    half = _CELLS + 1  # where the nodes for h(m) >= a begin
    return (
        _Range(zero, above, end),
        _Range(zero + half, left + half, (lowest - 1).clamp(min=0) + half),
        _Range(lowest + half, right + half, end + half),
    )


def _centre(h: AbstractSmooth, z: Tensor, kappa: float, side: int) -> Tensor:
    """The centre of curvature where the curve bends to that side; elsewhere no a is beyond it."""
    dh, d2h = h.derivatives(z)
    centre = h(z) + (1 + kappa * dh * dh) / (kappa * d2h)
    return (side * centre).where(side * d2h > 0, math.inf)


def _zoom(z: Tensor, g: Callable[[Tensor], Tensor]) -> Tensor:
    """The argmin of g, of one valley, within the range of z."""
    first, last = z.aminmax()
    best, width = z.index_select(0, g(z).argmin().view(1)), (last - first) / 128
    window = torch.linspace(-1, 1, 33, dtype=z.dtype, device=z.device)
    for _ in range(8):
        near = (best + width * window).clamp(first, last)
        best = near.index_select(0, g(near).argmin().view(1))
        width = width / 8
    return best
