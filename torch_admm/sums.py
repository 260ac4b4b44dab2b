"""The sums that one weight step needs, and nothing else of the rows."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from . import steps
from .comm import AbstractComm, Growing, Pending
from .data import AbstractRows, take
from .data.shards import share
from .gram import Factor, Gram
from .maps import AbstractLinearMap

__all__ = ["Sums", "gram_of", "summed_at_once"]

FLOAT32_ROWS = 120_000  # from so many rows on, float32 products leave 1e-5; with fewer, float64 ones are affordable
SHARED = 1 << 24  # outputs times the square of inputs: from here on, a solve takes longer than what crosses to share it
SHARE = 48  # outputs that one rank solves for at a time; fewer would cost more than they save
SUM_ROWS = 0.6  # times the root of all rows: how many products are summed as they are made


@final
class Sums:
    """G = sum [a, 1]'[a, 1] and R = sum z'[a, 1] of one layer, added chunk by chunk, solved once, then empty again.

    A sum of k products has an error of about k^(1/2) roundings, and over the n / k such sums these average out: k /
    n^(1/2) roundings are left of the whole. For weights within 1e-5 (float32) or 1e-10 (float64) that must be below
    1, hence products of a few hundred rows at a time. With few rows there is little to average, and float32 weights
    take float64 products.

    A `factor` that is given stands in for G: the data never change, so theirs is taken once. Each piece of the rows is
    summed by itself, and added to the others when the next one begins. Of all that is added on all ranks, one buffer
    crosses: R and the upper triangle of G.
    """

    R: Tensor | None  # of the current piece
    gram: Gram
    growing: Growing
    pending: Pending[list[Tensor]] | None

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
        self.rows, self.comm, self.starts, self.alone = rows, comm, comm.starts(rows), comm.alone(rows)
        self.products = torch.float64 if rows.total < FLOAT32_ROWS else W.dtype
        spare = self.products != W.dtype  # float64 sums for float32 weights may be as long as they like
        self.at_once = None if spare else summed_at_once(rows.total)
        self._clear()

    def add(self, a: Tensor, z: Tensor, part: int = 0) -> None:
        """Add rows of the layer's inputs a and of its targets z; `part` is what `comm.portions` said."""
        self._end_parts(part)
        a, z = a.to(self.products), z.to(self.products)
        R = self.linear.cross(z, a, self.at_once)
        self.R = R.double() if self.R is None else self.R.add_(R)
        if self.factor is None:
            self.gram.accumulate(a)

    def send(self) -> None:
        """Start to add up what all ranks have; no rows are added after that."""
        if not self.alone:
            self._end_parts(len(self.starts))
            self.pending = self.comm.send(self.growing)

    def solve(self) -> Tensor:
        """argmin_W sum ||z - W [a, 1]||^2 over the rows that all ranks have added and sent."""
        gram, R = self.total()
        factor = self.factor or gram.factor(self.ridge)
        shared = self.like.numel() * len(self.like.T) > SHARED
        W = self._shared(factor, R) if shared else steps.weight_step(factor, R, self.like)
        self._clear()
        return W

    def _shared(self, factor: Factor, R: Tensor) -> Tensor:
        """Every output has a solve of its own: each rank solves for some, and adds them to zeros, which is exact.

        Those of some outputs alone may round otherwise, so they are the same ones on any number of ranks.
        """
        W, shares = torch.zeros_like(self.like), max(1, len(R) // SHARE)
        for number in range(shares)[share(shares, self.comm.rank, self.comm.size)]:
            some = share(len(R), number, shares)
            take(W, some).copy_(steps.weight_step(factor, take(R, some), self.like))
        return self.comm.sum_(W)

    def total(self) -> tuple[Gram, Tensor]:
        """G, unless a factor stands in for it, and R."""
        if self.alone:
            return self.gram, self._summed()
        assert self.pending is not None, "send comes first"
        R, *sums = self.pending.wait()
        if self.factor is None:
            self.gram.unpack(sums, self.rows.total)
        return self.gram, R

    def _end_parts(self, before: int) -> None:
        """All parts before this one have their rows; there may be none."""
        while self.growing.count < before:
            self.growing.add(self._leaf(self.starts[self.growing.count]))
            self._begin_part()

    def _leaf(self, first: int) -> list[Tensor]:
        """What crosses of a piece that begins with this row of all."""
        return [self._summed(), *([] if self.factor else self.gram.packed(first, self.rows.total))]

    def _summed(self) -> Tensor:
        return torch.zeros_like(self.like, dtype=torch.float64) if self.R is None else self.R

    def _begin_part(self) -> None:
        self.R = None
        self.gram = self.linear.gram(self.like, products=self.products, at_once=self.at_once)

    def _clear(self) -> None:
        self._begin_part()
        like = () if self.starts else self._leaf(0)
        self.growing = self.comm.growing(self.comm.order(self.rows), torch.float64, like)
        self.pending = None


def gram_of(linear: AbstractLinearMap, W: Tensor, rows: AbstractRows, size: int, comm: AbstractComm) -> Gram:
    """The Gram of the rows of all ranks themselves, in float64, from chunks of `size`."""
    if comm.alone(rows):
        return _gram_of(linear, W, rows, size, comm)
    grams = (_gram_of(linear, W, piece, size, comm) for piece in comm.pieces(rows))
    parts = (gram.packed(first, rows.total) for gram, first in zip(grams, comm.starts(rows), strict=True))
    like = () if comm.starts(rows) else linear.gram(W, torch.float64).packed(0, rows.total)
    found = linear.gram(W, torch.float64)
    found.unpack(comm.totals_later(parts, torch.float64, comm.order(rows), like).wait(), rows.total)
    return found


def _gram_of(linear: AbstractLinearMap, W: Tensor, piece: AbstractRows, size: int, comm: AbstractComm) -> Gram:
    gram = linear.gram(W, torch.float64)
    for _, x, _ in piece.chunks(size):
        gram.accumulate(comm.aligned(x))
    return gram


def summed_at_once(rows: int) -> int:
    """How many products are summed as they are made; chunks of a multiple of it leave no odd rows."""
    return max(1, int(SUM_ROWS * math.sqrt(rows)))
