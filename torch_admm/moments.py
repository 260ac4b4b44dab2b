"""The running second moment of rows, and the damping that the weight steps take from it.

    right(D) = rho s D (G + rho s I)^-1,    G = running mean of v v' over rows v,    s = mean diagonal of G
    left(D) = rho s (G + rho s I)^-1 D

Directions in which the rows are large are shortened, all others stay as they are. Up to a scale, which the relative
step removes, this is the ridge solution of a least-squares problem whose normal matrix is G.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from .random import gaussian

__all__ = ["LOOK_ROWS", "AbstractMoment", "FullMoment", "LeadingMoment", "looked_at", "moment", "row_major", "some_of"]

FULL = 64  # up to so many columns G itself is kept
LEADING = 24  # of more, so many eigenvectors: with a ridge of rho s and rho around 1 the others are hardly damped
LOOK_ROWS = 128  # of a mini-batch that are looked at for moments and loss, or a quarter of its rows
SLOWEST = 0.1  # weight of the newest rows once the mean over all refreshes has become as slow


class AbstractMoment(abc.ABC):
    """`look` at rows, any number of times; `refresh` takes them into the running mean; `right`, `left` apply."""

    _sum: Tensor

    def __init__(self, columns: int, rho: float, like: Tensor) -> None:
        """Know nothing yet; `like` gives dtype and device."""
        self.columns, self.rho, self.like = columns, rho, like
        self.refreshes = 0
        self.square = torch.zeros((), dtype=torch.float64, device=like.device)  # s
        self._count, self._square = torch.zeros_like(self.square), torch.zeros_like(self.square)

    def look(self, v: Tensor) -> None:
        """Take rows v, shape (rows, columns), into the next refresh."""
        self._count = self._count + len(v)
        self._square = self._square + v.square().sum()
        self._look(v)

    def refresh(self) -> None:
        """Fold in what was looked at; the first refreshes are a plain mean, so that nothing is biased to the start."""
        self.refreshes += 1
        weight = max(SLOWEST, 1 / self.refreshes)
        rows = self._count.clamp_min(1)
        self.square = torch.lerp(self.square, self._square / (rows * self.columns), weight)
        self._refresh(rows, weight)
        self.seen = [torch.zeros_like(t) for t in self.seen]

    @property
    def seen(self) -> list[Tensor]:
        """The sums over what was looked at since the last refresh: they can be added to those of other ranks."""
        return [self._count, self._square, self._sum]

    @seen.setter
    def seen(self, sums: Sequence[Tensor]) -> None:
        self._count, self._square, self._sum = sums

    def state_dict(self) -> dict[str, Any]:
        """The running mean and its factor; what was looked at since the last refresh is not part of it."""
        return {"refreshes": self.refreshes, "square": self.square, **self._state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of a moment of the same size."""
        self.refreshes = int(state["refreshes"])
        for name in ("square", *self._state()):
            mine: Tensor = getattr(self, name)
            setattr(self, name, state[name].to(mine.device, mine.dtype, copy=True))

    @abc.abstractmethod
    def right(self, D: Tensor) -> Tensor:
        """rho s D (G + rho s I)^-1, for D of shape (any, columns), which is used up."""

    @abc.abstractmethod
    def left(self, D: Tensor) -> Tensor:
        """rho s (G + rho s I)^-1 D, for D of shape (columns, any), which is used up."""

    @abc.abstractmethod
    def _look(self, v: Tensor) -> None: ...

    @abc.abstractmethod
    def _refresh(self, rows: Tensor, weight: float) -> None: ...

    @abc.abstractmethod
    def _state(self) -> dict[str, Tensor]: ...


@final
class FullMoment(AbstractMoment):
    """G itself, inverted in float64."""

    def __init__(self, columns: int, rho: float, like: Tensor) -> None:
        super().__init__(columns, rho, like)
        self.G = torch.zeros(columns, columns, dtype=torch.float64, device=like.device)
        self.P = torch.eye(columns, dtype=like.dtype, device=like.device)
        self._sum = torch.zeros_like(self.G)

    def right(self, D: Tensor) -> Tensor:
        return D @ self.P

    def left(self, D: Tensor) -> Tensor:
        return self.P @ D if self.columns > 1 else D  # one column has no direction to damp

    def _look(self, v: Tensor) -> None:
        self._sum = self._sum + v.T @ v

    def _refresh(self, rows: Tensor, weight: float) -> None:
        self.G = torch.lerp(self.G, self._sum / rows, weight)
        unit = torch.where(self.square > 0, self.square, 1.0)
        eye = torch.eye(self.columns, dtype=torch.float64, device=self.G.device)
        L = torch.linalg.cholesky_ex(self.G / (unit * self.rho) + eye).L
        self.P = row_major(torch.cholesky_inverse(L).to(self.like.dtype))

    def _state(self) -> dict[str, Tensor]:
        return {"G": self.G, "P": self.P}


@final
class LeadingMoment(AbstractMoment):
    """The leading eigenvectors U of G and its size e along them, kept warm by one subspace iteration a refresh."""

    def __init__(self, columns: int, rho: float, like: Tensor) -> None:
        super().__init__(columns, rho, like)
        start = gaussian(slice(0, columns), LEADING, 0, 0, like.new_empty(0, dtype=torch.float64))
        self.U = row_major(_orthonormal(start)[0].to(like.dtype))
        self.e = torch.zeros(LEADING, dtype=torch.float64, device=like.device)
        self.Uc = torch.zeros_like(self.U)  # U diag(e / (e + rho s))
        self._sum = torch.zeros(columns, LEADING, dtype=torch.float64, device=like.device)

    def right(self, D: Tensor) -> Tensor:
        return D.addmm_(D @ self.U, self.Uc.T, alpha=-1)

    def left(self, D: Tensor) -> Tensor:
        return D.addmm_(self.Uc, self.U.T @ D, alpha=-1)

    def _look(self, v: Tensor) -> None:
        self._sum = self._sum + v.T @ (v @ self.U)

    def _refresh(self, rows: Tensor, weight: float) -> None:
        U = self.U.double()
        U, self.e = _orthonormal(torch.lerp(U * self.e, self._sum / rows, weight))
        unit = torch.where(self.square > 0, self.square, 1.0)
        damped = U * (self.e / (self.e + self.rho * unit))
        self.U, self.Uc = (row_major(M.to(self.like.dtype)) for M in (U, damped))

    def _state(self) -> dict[str, Tensor]:
        return {"U": self.U, "e": self.e, "Uc": self.Uc}


def row_major(M: Tensor) -> Tensor:
    """As a state that was stored comes back: products of a matrix laid out otherwise may round otherwise."""
    return M.clone(memory_format=torch.contiguous_format)


def moment(columns: int, rho: float, like: Tensor) -> AbstractMoment:
    """The kind that suits this many columns."""
    return (FullMoment if columns <= FULL else LeadingMoment)(columns, rho, like)


def _orthonormal(H: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of the columns of H, and how long each is beyond those before it.

    By Cholesky of H'H, which is faster than a QR and good enough for directions that the next refresh corrects; columns
    that add nothing come out short.
    """
    scale = torch.linalg.vector_norm(H, dim=0).clamp_min(torch.finfo(H.dtype).tiny)
    H = H / scale
    S = H.T @ H
    S.diagonal().add_(1e-10)
    L = torch.linalg.cholesky_ex(S).L
    return torch.linalg.solve_triangular(L, H.T, upper=False).T, scale * L.diagonal()


def looked_at(counts: Sequence[int] | None, rows: int, device: torch.device) -> Tensor | None:
    """Which rows of a mini-batch are looked at: of each shard, whoever has it, the same share; None for all."""
    if counts is None:
        return None
    share, first, index = min(1.0, max(LOOK_ROWS / rows, 0.25)), 0, list[int]()
    for count in counts:
        index += range(first, first + math.ceil(share * count))
        first += count
    return torch.tensor(index, dtype=torch.int64, device=device)


def some_of(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)
