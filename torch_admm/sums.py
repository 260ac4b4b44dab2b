"""The sums that one weight step needs, and nothing else of the rows."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from . import steps
from .comm import AbstractComm, Pending
from .data import AbstractRows, take
from .data.shards import share
from .gram import Factor, Gram
from .maps import AbstractLinearMap

__all__ = ["Sums", "merged", "summed_at_once"]

FLOAT32_ROWS = 120_000  # from so many rows on, float32 products leave 1e-5; with fewer, float64 ones are affordable
SHARED = 1 << 24  # outputs times the square of inputs: from here on, a solve takes longer than what crosses to share it
SUM_ROWS = 0.6  # times the root of all rows: how many products are summed as they are made


@final
class Sums:
    """G = sum [a, 1]'[a, 1] and R = sum z'[a, 1] of one layer, added chunk by chunk, solved once, then empty again.

    A sum of k products has an error of about k^(1/2) roundings, and over the n / k such sums these average out: k /
    n^(1/2) roundings are left of the whole. For weights within 1e-5 (float32) or 1e-10 (float64) that must be below
    1, hence products of a few hundred rows at a time. With few rows there is little to average, and float32 weights
    take float64 products.

    A `factor` that is given stands in for G: the data never change, so theirs is taken once. Of all that is added on
    all ranks, one buffer crosses: R and the upper triangle of G.
    """

    def __init__(
        self,
        linear: AbstractLinearMap,
        W: Tensor,
        *,
        ridge: float | None,
        rows: AbstractRows,
        comm: AbstractComm,
        factor: Factor | None = None,
    ) -> None:
        """`W` gives shape, dtype and device; all `rows` are added before each solve."""
        self.linear, self.like, self.ridge, self.factor = linear, W, ridge, factor
        self.rows, self.comm = rows, comm
        self.pending: Pending[list[Tensor]] | None = None
        self.products = torch.float64 if rows.total < FLOAT32_ROWS else W.dtype
        spare = self.products != W.dtype  # float64 sums for float32 weights may be as long as they like
        self.at_once = None if spare else summed_at_once(rows.total)
        self._clear()

    def add(self, a: Tensor, z: Tensor, part: int = 0) -> None:
        """Add rows of the layer's inputs a and of its targets z; `part` is what `comm.portions` said."""
        a, z = a.to(self.products), z.to(self.products)
        self.R[part] += self.linear.cross(z, a, self.at_once)
        if self.factor is None:
            self.grams[part].accumulate(a)

    def send(self) -> None:
        """Start to add up what all ranks have; no rows are added after that."""
        if not self.comm.alone:
            parts = [[R, *self._packed(part)] for part, R in enumerate(self.R)]
            self.pending = self.comm.totals_later(parts, torch.float64)

    def solve(self) -> Tensor:
        """argmin_W sum ||z - W [a, 1]||^2 over the rows that all ranks have added and sent."""
        gram, R = self.total()
        factor = self.factor or gram.factor(self.ridge)
        W = self._shared(factor, R) if self._worth_sharing() else steps.weight_step(factor, R, self.like)
        self._clear()
        return W

    def _worth_sharing(self) -> bool:
        """Every output has a solve of its own. Those of some outputs alone may round otherwise."""
        return not (self.comm.size == 1 or self.comm.deterministic) and self.like.numel() * len(self.like.T) > SHARED

    def _shared(self, factor: Factor, R: Tensor) -> Tensor:
        """Each rank solves for some outputs, and adds them to zeros, which is exact."""
        mine = share(len(R), self.comm.rank, self.comm.size)
        W = torch.zeros_like(self.like)
        take(W, mine).copy_(steps.weight_step(factor, take(R, mine), self.like))
        return self.comm.sum_(W)

    def total(self) -> tuple[Gram, Tensor]:
        """G, unless a factor stands in for it, and R."""
        if self.comm.alone:
            return self.grams[0], self.R[0]
        assert self.pending is not None, "send comes first"
        R, *sums = self.pending.wait()
        if self.factor is None:
            self.grams[0].unpack(sums, self.rows.total)
        return self.grams[0], R

    def _packed(self, part: int) -> list[Tensor]:
        if self.factor is not None:
            return []
        return self.grams[part].packed(self.comm.starts(self.rows)[part], self.rows.total)

    def _clear(self) -> None:
        parts = self.comm.starts(self.rows)
        self.R = [torch.zeros(self.like.shape, dtype=torch.float64, device=self.like.device) for _ in parts]
        self.grams = [self.linear.gram(self.like, products=self.products, at_once=self.at_once) for _ in parts]
        self.pending = None


def merged(grams: list[Gram], rows: AbstractRows, comm: AbstractComm) -> Gram:
    """One Gram of all rows, from those of the pieces here."""
    if not comm.alone:
        parts = [gram.packed(first, rows.total) for gram, first in zip(grams, comm.starts(rows), strict=True)]
        grams[0].unpack(comm.totals_later(parts, torch.float64).wait(), rows.total)
    return grams[0]


def summed_at_once(rows: int) -> int:
    """How many products are summed as they are made; chunks of a multiple of it leave no odd rows."""
    return max(1, int(SUM_ROWS * math.sqrt(rows)))
