"""The sums that one weight step needs, and nothing else of the rows."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from . import steps
from .gram import Factor
from .maps import AbstractLinearMap

__all__ = ["Sums", "summed_at_once"]

FLOAT32_ROWS = 120_000  # from so many rows on, float32 products leave 1e-5; with fewer, float64 ones are affordable
SUM_ROWS = 0.6  # times the root of all rows: how many products are summed as they are made


@final
class Sums:
    """G = sum [a, 1]'[a, 1] and R = sum z'[a, 1] of one layer, added chunk by chunk, solved once, then empty again.

    A sum of k products has an error of about k^(1/2) roundings, and over the n / k such sums these average out: k /
    n^(1/2) roundings are left of the whole. For weights within 1e-5 (float32) or 1e-10 (float64) that must be below
    1, hence products of a few hundred rows at a time. With few rows there is little to average, and float32 weights
    take float64 products.

    A `factor` that is given stands in for G: the data never change, so theirs is taken once.
    """

    def __init__(
        self, linear: AbstractLinearMap, W: Tensor, *, ridge: float | None, rows: int, factor: Factor | None = None
    ) -> None:
        """`W` gives shape, dtype and device; `rows` is how many will be added before each solve."""
        self.linear, self.like, self.ridge, self.factor = linear, W, ridge, factor
        self.products = torch.float64 if rows < FLOAT32_ROWS else W.dtype
        spare = self.products != W.dtype  # float64 sums for float32 weights may be as long as they like
        self.at_once = None if spare else summed_at_once(rows)
        self._clear()

    def add(self, a: Tensor, z: Tensor) -> None:
        """Add rows of the layer's inputs a and of its targets z."""
        a, z = a.to(self.products), z.to(self.products)
        self.R += self.linear.cross(z, a, self.at_once)
        if self.factor is None:
            self.gram.accumulate(a)

    def solve(self) -> Tensor:
        """argmin_W sum ||z - W [a, 1]||^2 over the rows added since the last call."""
        W = steps.weight_step(self.factor or self.gram.factor(self.ridge), self.R, self.like)
        self._clear()
        return W

    def _clear(self) -> None:
        self.R = torch.zeros(self.like.shape, dtype=torch.float64, device=self.like.device)
        self.gram = self.linear.gram(self.like, products=self.products, at_once=self.at_once)


def summed_at_once(rows: int) -> int:
    """How many products are summed as they are made; chunks of a multiple of it leave no odd rows."""
    return max(1, int(SUM_ROWS * math.sqrt(rows)))
