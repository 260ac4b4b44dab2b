"""The running second moment of rows, and the damping that the weight steps take from it.

    right(D) = rho s D (G + rho s I)^-1,    G = running mean of v v' over rows v,    s = mean diagonal of G
    left(D) = rho s (G + rho s I)^-1 D

Directions in which the rows are large are shortened, all others stay as they are. Up to a scale, which the relative
step removes, this is the ridge solution of a least-squares problem whose normal matrix is G.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from .spans import Spans

__all__ = [
    "AbstractMoment",
    "FullMoment",
    "LeadingMoment",
    "NoMoment",
    "moment",
    "row_major",
]

FULL = 64  # up to so many columns G itself is kept
RIDGE_FULL, RIDGE_LEADING = 0.5, 4.0  # rho unless given: where all directions are known, more can be made of them
LEADING = 16  # of more, so many eigenvectors: with a ridge of rho s the others are hardly damped
SHORT = 1e-3  # of its length, is all that is left of a row that adds no direction
SLOWEST = 0.1  # weight of the newest rows once the mean over all refreshes has become as slow


class AbstractMoment(abc.ABC):
    """`look` at rows, any number of times; `take` the sums over them; `refresh` the mean; `right` and `left` apply it.

    Between `take` and `refresh` the sums may be added to those of other ranks. They come by leaves (see `Leaves`): one
    sum for each, with one more dimension in front.
    """

    kept: ClassVar[tuple[str, ...]]  # the tensors that make up its state
    sums: ClassVar[int]  # how many `take` gives

    def __init__(self, columns: int, rho: float, like: Tensor) -> None:
        """Know nothing yet; `like` gives dtype and device."""
        self.columns, self.rho, self.like = columns, rho, like
        self.refreshes = 0
        self._seen: list[Tensor] | None = None

    def look(self, v: Tensor, spans: Spans) -> None:
        """Take rows v, shape (rows, columns), into the next refresh."""
        seen = self._sums(v, spans)
        self._seen = seen if self._seen is None else [a + b for a, b in zip(self._seen, seen, strict=True)]

    def take(self, leaves: int = 1) -> list[Tensor]:
        """The sums over all rows of each leaf looked at since the last time, in float64."""
        seen, self._seen = self._seen, None
        return [t.expand(leaves, *t.shape) for t in self._nothing()] if seen is None else seen

    def refresh(self, seen: Sequence[Tensor], rows: float) -> None:
        """Take sums over so many rows into the running mean; the first count alike, so none biases what follows."""
        self.refreshes += 1
        self._refresh(seen, max(1.0, rows), max(SLOWEST, 1 / self.refreshes))
        self._prepare()

    def state_dict(self) -> dict[str, Any]:
        """The running mean and its factor; what was looked at since the last refresh is not part of it."""
        return {"refreshes": self.refreshes, **{name: getattr(self, name) for name in self.kept}}

    def check(self, state: Any, what: str) -> None:
        """Is it the state of a moment of the same size?"""
        if not isinstance(state, Mapping) or type(state.get("refreshes")) is not int:
            raise ValueError(f"state: {what} is not that of a moment")
        for name in self.kept:
            mine, theirs = getattr(self, name).shape, getattr(state.get(name), "shape", None)
            if theirs != mine:
                came = "nothing" if theirs is None else tuple(theirs)
                raise ValueError(f"state: {what}.{name} is {came}; {tuple(mine)} is expected")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that was checked."""
        self.refreshes = int(state["refreshes"])
        for name in self.kept:
            mine: Tensor = getattr(self, name)
            setattr(self, name, state[name].to(mine.device, mine.dtype, copy=True))
        self._prepare()

    @abc.abstractmethod
    def right(self, D: Tensor) -> Tensor:
        """rho s D (G + rho s I)^-1, for D of shape (any, columns), which is used up."""

    @abc.abstractmethod
    def left(self, D: Tensor) -> Tensor:
        """rho s (G + rho s I)^-1 D, for D of shape (columns, any), which is used up."""

    @abc.abstractmethod
    def _sums(self, v: Tensor, spans: Spans) -> list[Tensor]: ...

    @abc.abstractmethod
    def _nothing(self) -> list[Tensor]:
        """The sums over no rows, of one leaf."""

    @abc.abstractmethod
    def _refresh(self, seen: Sequence[Tensor], rows: float, weight: float) -> None: ...

    def _prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """For `right` and `left`, whenever the mean has changed."""


@final
class NoMoment(AbstractMoment):
    """Of one column: it has no direction to damp, and a factor would not change a relative step."""

    kept, sums = (), 0

    def right(self, D: Tensor) -> Tensor:
        return D

    def left(self, D: Tensor) -> Tensor:
        return D

    def _sums(self, v: Tensor, spans: Spans) -> list[Tensor]:
        return []

    def _nothing(self) -> list[Tensor]:
        return []

    def _refresh(self, seen: Sequence[Tensor], rows: float, weight: float) -> None:
        pass


@final
class FullMoment(AbstractMoment):
    """G itself, inverted in float64. `right` and `left` answer in memory that the next call uses again."""

    kept, sums = ("G", "P"), 1

    def __init__(self, columns: int, rho: float, like: Tensor) -> None:
        super().__init__(columns, rho, like)
        self.G = torch.zeros(columns, columns, dtype=torch.float64, device=like.device)
        self.P = torch.eye(columns, dtype=like.dtype, device=like.device)
        self._room: Tensor | None = None

    def right(self, D: Tensor) -> Tensor:
        return torch.mm(D, self.P, out=self._like(D))

    def left(self, D: Tensor) -> Tensor:
        return torch.mm(self.P, D, out=self._like(D))

    def _like(self, D: Tensor) -> Tensor:
        """Memory laid out as D, since products answer as their room is laid out, and weights are laid out as D."""
        if self._room is None or self._room.shape != D.shape or self._room.stride() != D.stride():
            self._room = torch.empty_like(D)
        return self._room

    def _sums(self, v: Tensor, spans: Spans) -> list[Tensor]:
        return [spans.products(v, v).double()]

    def _nothing(self) -> list[Tensor]:
        return [torch.zeros_like(self.G)]

    def _refresh(self, seen: Sequence[Tensor], rows: float, weight: float) -> None:
        self.G = torch.lerp(self.G, seen[0] / rows, weight)
        M = self.G / (self.rho * _unit(self.G.diagonal().mean()))
        M.diagonal().add_(1)
        self.P = row_major(torch.linalg.inv_ex(M).inverse, self.like.dtype)


@final
class LeadingMoment(AbstractMoment):
    """The leading eigenvectors of G, as rows of U, and its size e along them: one subspace iteration a refresh."""

    kept, sums = ("U", "e", "cU", "square"), 2

    def __init__(self, columns: int, rho: float, like: Tensor) -> None:
        super().__init__(columns, rho, like)
        self.U = _waves(columns, like)
        self._first = self.U.double()  # in place of directions that the rows leave open
        self.e = torch.zeros(LEADING, dtype=torch.float64, device=like.device)
        self.cU = torch.zeros_like(self.U)  # diag(e / (e + rho s)) U
        self.square = torch.zeros((), dtype=torch.float64, device=like.device)  # s
        self._UD: Tensor | None = None
        self._prepare()

    def right(self, D: Tensor) -> Tensor:
        return D.addmm_(torch.mm(D, self._turned[0]), self.cU, alpha=-1)

    def left(self, D: Tensor) -> Tensor:
        return D.addmm_(self._turned[1], torch.mm(self.U, D, out=self._room(D.shape[1])), alpha=-1)

    def _prepare(self) -> None:
        self._turned = self.U.T, self.cU.T  # a view takes as long as a small product

    def _room(self, columns: int) -> Tensor:
        """Columns of U D lie together: that is the faster product."""
        if self._UD is None or self._UD.shape[1] != columns:
            self._UD = self.U.new_empty(columns, LEADING).T
        return self._UD

    def _sums(self, v: Tensor, spans: Spans) -> list[Tensor]:
        return [spans.products(v @ self.U.T, v).double(), spans.lengths(v).double().square()]

    def _nothing(self) -> list[Tensor]:
        return [torch.zeros_like(self.U, dtype=torch.float64), torch.zeros_like(self.square)]

    def _refresh(self, seen: Sequence[Tensor], rows: float, weight: float) -> None:
        self.square = torch.lerp(self.square, seen[1] / (rows * self.columns), weight)
        H = seen[0] * (weight / rows)
        if weight < 1:
            H.addcmul_(self.U, self.e.unsqueeze(1), value=1 - weight)
        U, e, is_new = _orthonormal(H)
        self.e = torch.where(is_new, e, 0.0)
        found = torch.where(is_new.unsqueeze(1), U, 0.0)
        given = self._first - (self._first @ found.T) @ found  # what is left of them beside those that were found
        self.U = row_major(torch.where(is_new.unsqueeze(1), U, given), self.like.dtype)
        self.cU = self.U * (self.e / (self.e + self.rho * _unit(self.square))).unsqueeze(1).to(self.U.dtype)


def _waves(columns: int, like: Tensor) -> Tensor:
    """Directions to start from: rows of the cosine transform, which are orthonormal, all over its frequencies.

    Like random ones they lean on no column in particular, for two operations. The first is the mean's, along which
    whatever is never negative is largest.
    """
    wave, at = (torch.arange(count, dtype=torch.float64, device=like.device) for count in (LEADING, columns))
    U = torch.outer(wave.mul_(columns // LEADING * math.pi / columns), at.add_(0.5)).cos_().mul_(math.sqrt(2 / columns))
    U.select(0, 0).mul_(math.sqrt(0.5))
    return U.to(like.dtype)


def _unit(square: Tensor) -> Tensor:
    """The unit of the ridge: one where all rows were zero."""
    return torch.where(square > 0, square, 1.0)


def row_major(M: Tensor, dtype: torch.dtype) -> Tensor:
    """As a state that was stored comes back: products of a matrix laid out otherwise may round otherwise."""
    return M.to(dtype, memory_format=torch.contiguous_format, copy=True)


def moment(columns: int, rho: float | None, like: Tensor) -> AbstractMoment:
    """The kind that suits this many columns, with the ridge that suits the kind unless rho is given."""
    if columns > FULL:
        return LeadingMoment(columns, rho or RIDGE_LEADING, like)
    return (FullMoment if columns > 1 else NoMoment)(columns, rho or RIDGE_FULL, like)


def _orthonormal(H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An orthonormal basis of the rows of H, how long each is beyond those before it, and whether that is anything.

    By Cholesky of H H', which is faster than a QR and good enough for directions that the next refresh corrects. What
    is left of a row that adds nothing, as of few rows there are few directions, is rounding: each rank has its own.
    """
    S = H @ H.T
    scale = S.diagonal().sqrt().clamp_min(torch.finfo(H.dtype).tiny)
    S = S / scale / scale.unsqueeze(1)
    S.diagonal().add_(1e-10)
    L = torch.linalg.cholesky_ex(S).L
    is_new = L.diagonal() >= SHORT
    L = L * scale.unsqueeze(1)
    return torch.linalg.solve_triangular(L, H, upper=False), L.diagonal(), is_new
