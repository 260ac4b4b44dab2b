"""Entrywise activations h and their z step

    minimise(a, m, beta, gamma) = argmin_z  gamma (a - h(z))^2 + beta (z - m)^2      (entry by entry)

A piecewise-linear h is a table of pieces, and its minimiser is exact: on each piece the cost is a parabola whose
vertex is clamped into the piece, and the cheapest of the candidates is the global minimum. Smooth activations
live in `smooth.py`. `activation_of` is open: `activation_of.register(MyModule, lambda module: MyActivation())`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor, nn

from .errors import ConversionError

__all__ = [
    "GOLDEN",
    "AbstractActivation",
    "Piece",
    "PiecewiseLinear",
    "Pull",
    "ReLU",
    "activation_of",
    "h_sig",
    "hardtanh",
    "leaky_relu",
]


GOLDEN = (1 + math.sqrt(5)) / 2  # gamma / beta at which the two thresholds of ReLU's step are one
HUGE = 1e30  # below the largest float32 by as much as entries may be large


class Pull(Protocol):
    """The way d from an activation to its target, worked out where it is needed."""

    def __call__(self) -> Tensor:
        """d, the caller's to use up."""

    def onto(self, m: Tensor, k: float) -> Tensor:
        """m + k d, in place of m: a pass over memory less."""


class AbstractActivation(abc.ABC):
    """An entrywise function h with a global minimiser for the z step."""

    exact: ClassVar[bool]  # a closed form, or a table with a tested bound?

    @abc.abstractmethod
    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        """h(z). `out` offers memory for the answer; an implementation is free to ignore it."""

    @abc.abstractmethod
    def minimise(self, a: Tensor, m: Tensor, beta: float, gamma: float, out: Tensor | None = None) -> Tensor:
        """The global argmin over z, in the shape, dtype and device of m.

        `out` as in `__call__`; who gives it gives m away too, as working memory.
        """

    def residual(self, pull: Pull, m: Tensor, h_m: Tensor, beta: float, gamma: float, room: Tensor) -> Tensor:
        """`minimise(a, m, beta, gamma) - m` for a = h(m) + d, d given by `pull`. m and `room` may be used up."""
        return self.minimise(pull().add_(h_m), m, beta, gamma).sub_(m)


@dataclass(frozen=True)
class Piece:
    """h(z) = slope z + offset on lo <= z <= hi."""

    slope: float
    offset: float
    lo: float = -math.inf
    hi: float = math.inf


@final
class PiecewiseLinear(AbstractActivation):
    """A continuous piecewise-linear h, given by its pieces from left to right."""

    exact = True

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Drop empty pieces and check that the rest cover the line without a jump."""
        self.pieces = tuple(p for p in pieces if p.lo < p.hi)
        ends = [-math.inf, *(p.hi for p in self.pieces)]
        if [p.lo for p in self.pieces] != ends[:-1] or ends[-1] != math.inf:
            raise ValueError(f"pieces must cover the line from left to right without gaps, got {list(pieces)}")
        for left, right in zip(self.pieces, self.pieces[1:], strict=False):
            values = [p.slope * left.hi + p.offset for p in (left, right)]
            if not math.isclose(*values, rel_tol=1e-9, abs_tol=1e-12):
                raise ValueError(f"pieces must meet: h jumps at z = {left.hi:g} from {values[0]:g} to {values[1]:g}")

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        first, *rest = self.pieces
        h = first.slope * z + first.offset
        for p in rest:
            h = torch.where(z > p.lo, p.slope * z + p.offset, h)
        return h

    def minimise(self, a: Tensor, m: Tensor, beta: float, gamma: float, out: Tensor | None = None) -> Tensor:
        """argmin_z gamma (a - h(z))^2 + beta (z - m)^2: the cheapest of the pieces' clamped vertices."""
        first, *rest = self.pieces
        z = _vertex(first, a, m, beta, gamma)
        cost = _cost(first, z, a, m, beta, gamma)
        for p in rest:
            z_p = _vertex(p, a, m, beta, gamma)
            cost_p = _cost(p, z_p, a, m, beta, gamma)
            better = cost_p < cost
            z, cost = torch.where(better, z_p, z), torch.where(better, cost_p, cost)
        return z

    def __repr__(self) -> str:
        return f"PiecewiseLinear({list(self.pieces)})"


def _vertex(p: Piece, a: Tensor, m: Tensor, beta: float, gamma: float) -> Tensor:
    if p.slope == 0:
        return m.clamp(p.lo, p.hi)
    curvature = gamma * p.slope**2 + beta
    pull = gamma * p.slope / curvature
    z = torch.add(m * (beta / curvature) - p.offset * pull, a, alpha=pull)
    return z.clamp_(p.lo, p.hi)


def _cost(p: Piece, z: Tensor, a: Tensor, m: Tensor, beta: float, gamma: float) -> Tensor:
    slack = (a - p.offset).sub_(z, alpha=p.slope)
    return slack.square_().mul_(gamma / beta).add_((z - m).square_())


@final
class ReLU(AbstractActivation):
    """max(z, 0), with its two candidates compared by one threshold instead of by their costs.

    For m < 0 the vertex p = (gamma a + beta m) / (gamma + beta) of the right piece costs
    gamma beta / (gamma + beta) (a - m)^2 and z = m costs gamma a^2, so p wins exactly when a > 0 and
    (a - m) r < a with r = sqrt(beta / (beta + gamma)), that is m > -k a with k = (1 - r) / r. For m >= 0 the
    answer is max(p, 0). So with t = m + k max(a, 0), z = max(p, min(m, 0)) where t > 0 (where m < 0 too, p is
    positive), else z = m <= 0. Adding a huge multiple of min(t, 0) to p makes that one formula, several times faster on
    a CPU than torch.where: only where t is 0 to 30 digits, and the two costs are equal, may the choice differ.
    """

    exact = True

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.clamp_min(z, 0, out=out)

    def minimise(self, a: Tensor, m: Tensor, beta: float, gamma: float, out: Tensor | None = None) -> Tensor:
        """argmin_z gamma (a - max(z, 0))^2 + beta (z - m)^2."""
        r = math.sqrt(beta / (beta + gamma))
        p = gamma / (gamma + beta)
        z = torch.clamp_min(a, 0, out=out)
        z = torch.add(m, z, alpha=(1 - r) / r, out=z).clamp_max_(0).mul_(HUGE)
        z = z.add_(m, alpha=1 - p).add_(a, alpha=p)
        return torch.maximum(z, torch.clamp_max(m, 0, out=None if out is None else m), out=z)

    def residual(self, pull: Pull, m: Tensor, h_m: Tensor, beta: float, gamma: float, room: Tensor) -> Tensor:
        """As above in terms of d = a - h(m), with n = min(m, 0) = m - h(m):

            z - n = max(p (d - n) + h(m), 0) where m + k d > 0, else 0

        For m < 0 that is what stands above. For m >= 0, m + k d <= 0 means p d + m <= 0 as long as k <= p, that is for
        gamma up to GOLDEN beta. There k = p, so that m + k d tells the sign of the other one too: fewer passes.
        """
        p, k = gamma / (gamma + beta), math.sqrt(1 + gamma / beta) - 1
        if k > p * (1 + 1e-6):
            return super().residual(pull, m, h_m, beta, gamma, room)
        n = torch.clamp_max(m, 0, out=room)
        if k < p * (1 - 1e-6):
            d = pull()
            step = torch.add(h_m, d - n, alpha=p).clamp_min_(0)
            t = torch.add(m, d, alpha=k, out=d)
        else:
            t = pull.onto(m, k)
            step = torch.add(t, n, alpha=-(1 + k), out=n)
        return _where_positive(step, t).sub_(h_m)

    def __repr__(self) -> str:
        return "ReLU()"


def _where_positive(values: Tensor, t: Tensor) -> Tensor:
    """values where t > 0, else 0, in place: on a CPU several times faster than torch.where."""
    return torch.ops.aten.threshold_backward.grad_input(values, t, 0, grad_input=values)  # type: ignore[no-any-return]


def leaky_relu(slope: float) -> PiecewiseLinear:
    return PiecewiseLinear([Piece(slope, 0.0, hi=0.0), Piece(1.0, 0.0, lo=0.0)])


def hardtanh(lo: float, hi: float) -> PiecewiseLinear:
    return PiecewiseLinear([Piece(0.0, lo, hi=lo), Piece(1.0, 0.0, lo, hi), Piece(0.0, hi, lo=hi)])


def h_sig() -> PiecewiseLinear:
    """The paper's non-differentiable sigmoid: z clamped to [0, 1], which is `nn.Hardtanh(0.0, 1.0)`."""
    return hardtanh(0.0, 1.0)


@singledispatch
def activation_of(module: nn.Module) -> AbstractActivation | None:
    """The activation that `module` computes, or None if none is registered for its class."""
    return None


@activation_of.register
def _(module: nn.ReLU) -> AbstractActivation:
    return ReLU()


@activation_of.register
def _(module: nn.LeakyReLU) -> AbstractActivation:
    return leaky_relu(module.negative_slope)


@activation_of.register
def _(module: nn.Hardtanh) -> AbstractActivation:  # nn.ReLU6 is one
    return hardtanh(float(module.min_val), float(module.max_val))


@activation_of.register
def _(module: nn.Hardsigmoid) -> AbstractActivation:
    return PiecewiseLinear([Piece(0.0, 0.0, hi=-3.0), Piece(1 / 6, 0.5, -3.0, 3.0), Piece(0.0, 1.0, lo=3.0)])


@activation_of.register
def _(module: nn.Threshold) -> AbstractActivation:
    if module.threshold != module.value:
        raise ConversionError(
            f"{module} jumps at {module.threshold:g} from {module.value:g} to {module.threshold:g}, and a jump has "
            f"no minimiser on its open side; use a value equal to the threshold"
        )
    kink = float(module.threshold)
    return PiecewiseLinear([Piece(0.0, kink, hi=kink), Piece(1.0, 0.0, lo=kink)])
