"""The sums of a mini-batch step, made so that any number of ranks gets the same bits.

A batch consists of a few leaves: the rows of some neighbouring shards, which are always on one rank. What is done row
by row comes out the same whatever rows are around, as long as they lie right (`Spans`); a product over the rows of one
leaf knows nothing of the others; and what the leaves give is added up by a fixed tree (`comm.Order`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from .block import Block
from .comm import AbstractComm, AbstractStanding
from .data.shards import Shards
from .maps import AbstractLinearMap
from .problem import Problem, Weights
from .spans import START, Looked, Spans, looked_at

__all__ = ["Leaves", "together"]

LEAVES = {2048: 8, 512: 4, 64: 2}  # from so many rows on: products over few rows each cost more than they are worth
LARGE = 512  # rows of a shard, from which on each is a leaf, if all have as many: to lay out others costs too much
KEPT = 64  # layouts of batches that are remembered: almost all are alike


def together(rows: int, shards: int) -> int:
    """How many neighbouring shards of so many make one leaf, in batches of so many rows."""
    if rows >= shards * LARGE and rows % (shards * START) == 0:
        return 1
    return shards // next((leaves for least, leaves in LEAVES.items() if rows >= least), 1)


@final
class Leaves:
    """R_l = sum r_l' [a_{l-1}, 1] of all layers, over the leaves of all ranks.

    `begin` a batch, `cross` its layers, `start` the sum over ranks, `wait` for it.
    """

    spans: Spans  # the rows of each leaf here, in the batch under way

    def __init__(self, problem: Problem, W: Weights, comm: AbstractComm, split: Shards | None) -> None:
        """`W` gives shapes, dtype and device. Without a split, what comes on a rank is one leaf, in an open order."""
        self.order = comm.open_order() if split is None else comm.batch_order(split)
        self._together = 0 if split is None or self.order.is_open else split.together
        self._shards = None if split is None else split.here
        self._firsts = split.here[:: self._together] if split is not None and self._together else ()
        first, last = self.order.held[comm.rank]
        self._own = [(start - first, stop - start) for start, stop in self.order.owned[comm.rank]]
        self._known: dict[tuple[int, ...], Spans] = {}
        self._comm, self._others = comm, dict[int, AbstractStanding]()
        self._block = Block(list(W.values()))
        self._lines = W[1].new_zeros(last - first, self._block.size)  # R_l of all layers, a line each leaf
        layers = zip(problem.layers.values(), self._block.cut_lines(self._lines), strict=True)
        self._layers = [_Layer(layer.map, R) for layer, R in layers]
        self._sums = [_Sum(self._lines.narrow(0, *own)) for own in self._own]
        self._standing = self._standing_for(self._lines)
        self._R: tuple[Tensor, list[Tensor]] | None = None

    def begin(self, x: Tensor, y: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The rows here of a batch that has so many of each shard, of all ranks, as they should lie."""
        size = self._together
        own = tuple([sum(counts[i : i + size]) for i in self._firsts]) if size else (len(x),)
        if own not in self._known:
            if len(self._known) == KEPT:
                self._known.clear()
            self._known[own] = Spans(own, aligned=True)
        self.spans = spans = self._known[own]
        return self._comm.aligned(spans.laid_out(x)), spans.laid_out(y)

    def looked_at(self, counts: Sequence[int], rows: int, device: torch.device) -> Looked:
        """Which of these rows are looked at, in batches of about `rows`."""
        here = counts if self._shards is None else [counts[i] for i in self._shards]
        return looked_at(here, self.spans, rows, device)

    def cross(self, l: int, r: Tensor, a: Tensor) -> None:
        """R_l of every leaf here, of rows r_l and a_{l-1} or [a_{l-1}, 1]."""
        self._layers[l - 1].cross(r, a, self.spans)

    def nothing(self) -> None:
        """What a batch gives that has no rows here."""
        self._lines.zero_()

    def totals(self, seen: Sequence[Tensor]) -> list[Tensor]:
        """Of other sums, one for each leaf here, those over the leaves of all ranks, in float64."""
        sizes = [math.prod(t.shape[1:]) for t in seen]
        sums = torch.cat([t.reshape(len(t), size) for t, size in zip(seen, sizes, strict=True)], 1)
        size = sum(sizes)
        if size not in self._others:
            self._others[size] = self._standing_for(sums)
        standing = self._others[size]
        for own, (place,) in zip(self._own, standing.places(), strict=True):
            _Sum(sums.narrow(0, *own)).into(place)
        standing.start()
        (total,) = standing.wait()
        return [part.view(t.shape[1:]) for part, t in zip(total.split(sizes), seen, strict=True)]

    def start(self) -> None:
        """Start to add up the leaves of all ranks."""
        for branch, (place,) in zip(self._sums, self._standing.places(), strict=True):
            branch.into(place)
        self._standing.start()

    def wait(self) -> Sequence[Tensor]:
        """R_l of the batch, the caller's to use up; they last until the next ones are made."""
        (total,) = self._standing.wait()
        if self._R is None or self._R[0] is not total:  # views are made once
            self._R = total, self._block.cut(total)
        return self._R[1]

    def _standing_for(self, lines: Tensor) -> AbstractStanding:
        return self._comm.standing([lines.new_empty(lines.shape[1])], lines.dtype, self.order)


@final
class _Layer:
    """R_l of the leaves here."""

    def __init__(self, linear: AbstractLinearMap, R: Tensor) -> None:
        self._map, self._R, self._leaves = linear, R, R.unbind()
        self._columns, self._size = R.shape[2], R.shape[1] * R.shape[2]

    def cross(self, r: Tensor, a: Tensor, spans: Spans) -> None:
        has_ones = a.shape[1] == self._columns  # or there is no bias
        if has_ones and spans.is_stacked(self._size):
            self._map.cross_stacked(spans.stacked(r), spans.stacked(a), self._R)
            return
        for R_i, r_i, a_i in zip(self._leaves, spans.parts(r), spans.parts(a), strict=True):
            self._map.cross_into(r_i, a_i, R_i)


@final
class _Sum:
    """The sum of leaves that make up a branch of the tree; views are made once."""

    def __init__(self, leaves: Tensor) -> None:
        self._first = leaves.select(0, 0)
        pairs = _additions(leaves)
        self._pairs, self._last = pairs[:-1], pairs[-1:]

    def into(self, place: Tensor) -> None:
        """Uses up the leaves."""
        for to, what in self._pairs:
            to.add_(what)
        if not self._last:
            place.copy_(self._first)
        for first, second in self._last:
            torch.add(first, second, out=place)


def _additions(leaves: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What is added to what, in the order of the tree, and ends in the first; many at once where halves are even."""
    count, middle = len(leaves), len(leaves) // 2
    if count == 1:
        return []
    if count == 2 or count & (count - 1):
        left, right = leaves.narrow(0, 0, middle), leaves.narrow(0, middle, count - middle)
        return [*_additions(left), *_additions(right), (left.select(0, 0), right.select(0, 0))]
    pairs = leaves.unflatten(0, (middle, 2))
    return [(pairs.select(1, 0), pairs.select(1, 1)), *_additions(pairs.select(1, 0))]
