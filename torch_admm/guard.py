"""When steps must be taken back, and to which weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, final

from torch import Tensor

from .problem import Weights

__all__ = ["Guard"]

EXPLODED = 2.0  # a loss above so many times that of the first weights is taken back
PATIENCE = 5  # so is one that is above it, by less, at so many looks more than it is not
RISE = 0.1  # of that of the first weights: as bad is a loss of all rows, in which is no chance, so far above the lowest


@final
class Guard:
    """Judges the loss at every look by that of the first weights, and keeps the last weights that were fine."""

    counters: ClassVar[tuple[str, ...]] = ("highest", "lowest", "alive", "above", "fresh")
    kept_W: Weights
    kept_mean: Weights
    fresh: bool

    def __init__(self, W: Weights, mean: Weights) -> None:
        """Start from these weights and their average; copies are kept."""
        self.highest = 0.0  # loss of the first weights, on the hardest rows so far that mattered
        self.lowest = math.inf  # loss of all rows
        self.alive = False  # has a residual ever reached the first layer?
        self.above = 0  # looks at which the loss was higher than that, less those at which it was not
        self.first_W = _copies(W)
        self._keep(W, mean)

    @property
    def parts(self) -> dict[str, Weights]:
        """The weights that are part of a state."""
        return {"first_W": self.first_W, "kept_W": self.kept_W, "kept_mean": self.kept_mean}

    def died(self, first: Tensor, last: Tensor) -> bool:
        """Does nothing of the output's residual reach the first layer any more? No step would ever change that.

        The arguments are the sums R of the first and the last layer.
        """
        if first.any():
            self.alive = True
            return False
        return self.alive and bool(last.any())

    def exploded(
        self, now: float, of_first: Callable[[], float], W: Weights, mean: Weights, *, of_all: bool = False
    ) -> bool:
        """Is this loss, of a few rows or `of_all`, too high? If it is fine, W and mean are kept.

        `of_first` gives the loss of the first weights on the same rows, since one mini-batch may be harder than
        another; it is asked only if the highest so far would not do.
        """
        if not now <= self.highest:
            self.highest = max(self.highest, of_first())
        if of_all:
            self.lowest = min(self.lowest, now)
        if now <= min(self.highest, self.lowest + RISE * self.highest):
            self.above = max(0, self.above - 1)
            self._keep(W, mean)
            return False
        self.above += 1
        return self.above >= PATIENCE or not now <= EXPLODED * self.highest

    def back(self) -> tuple[Weights, Weights]:
        """The weights to go back to, and their average: the first ones if nothing went well from those kept either."""
        fresh, self.fresh, self.above = self.fresh, False, 0
        self.lowest = self.lowest if fresh else math.inf
        return (self.kept_W, self.kept_mean) if fresh else (self.first_W, self.first_W)

    def _keep(self, W: Weights, mean: Weights) -> None:
        self.fresh = True
        self.kept_W, self.kept_mean = _copies(W), _copies(mean)


def _copies(weights: Weights) -> Weights:
    return {l: W.clone() for l, W in weights.items()}
