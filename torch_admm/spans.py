"""How the rows of several leaves lie one after the other, and which of them are looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .block import Block

__all__ = ["START", "Looked", "Spans", "looked_at"]

# What is done row by row comes out the same whatever rows are around, if rows that belong to nobody take the place of
# those left over: products take four rows at a time, functions 32 entries.
START, ROWS = 4, 32
STACKED = 400  # products of a leaf: fewer are summed by torch itself if it has those of several leaves
LOOK_ROWS = 128  # of a mini-batch that are looked at, or a quarter of its rows


@final
class Spans:
    """Leaves of so many rows each; aligned ones start at multiples of START, and have a multiple of ROWS in all."""

    def __init__(self, counts: Sequence[int], *, aligned: bool = False) -> None:
        """`counts` may be of no leaves at all."""
        self.counts, self.aligned = list(counts), aligned
        self.sizes = [-(-count // START) * START for count in counts] if aligned else self.counts
        self.rows = sum(self.sizes)
        self.rows += -self.rows % ROWS if aligned else 0
        self.whole = self.rows == sum(counts)
        self.alike = len(set(counts)) == 1 and counts[0] > 0
        self._split = [*self.sizes, self.rows - sum(self.sizes)]
        self._index: Tensor | None = None

    def parts(self, rows: Tensor) -> Sequence[Tensor]:
        """The rows of each leaf."""
        found: Sequence[Tensor] = rows.split(self._split)
        if self.whole:
            return found[:-1]
        return [t.narrow(0, 0, n) for t, n in zip(found, self.counts, strict=False)]

    def stacked(self, rows: Tensor) -> Tensor:
        """The same with a dimension of leaves in front, where they are alike."""
        leaves, count, size = len(self.counts), self.counts[0], self.sizes[0]
        if self.whole:
            return rows.view(leaves, count, -1)
        return rows.narrow(0, 0, leaves * size).view(leaves, size, -1).narrow(1, 0, count)

    def sums(self, rows: Tensor) -> Tensor:
        """Over the rows of each leaf."""
        return self.stacked(rows).sum(1) if self.alike else torch.stack([part.sum(0) for part in self.parts(rows)])

    def lengths(self, rows: Tensor) -> Tensor:
        """Of all rows of each leaf as one vector."""
        if self.alike:
            lengths: Tensor = vector_norm(self.stacked(rows), dim=(1, 2))
            return lengths
        return torch.stack([vector_norm(part) for part in self.parts(rows)])

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """left'right over the rows of each leaf."""
        block = Block([left.new_empty(left.shape[1], right.shape[1])])
        (found,) = block.cut_lines(left.new_empty(len(self.counts), block.size))
        if self.is_stacked(left.shape[1] * right.shape[1]):
            return torch.bmm(self.stacked(left).mT, self.stacked(right), out=found)
        for a, b, out in zip(self.parts(left), self.parts(right), found, strict=True):
            torch.mm(a.T, b, out=out)
        return found

    def is_stacked(self, size: int) -> bool:
        """Are products of so many entries made for all leaves by one call, which then rounds as one call each would?"""
        return self.alike and len(self.counts) > 1 and self.counts[0] * size >= STACKED

    def laid_out(self, rows: Tensor) -> Tensor:
        """Rows that follow each other closely, as they should lie; where there are none, the first one stands again."""
        if self.whole or not len(rows):
            return rows
        if self._index is None or self._index.device != rows.device:
            self._index = torch.tensor(self._places(), device=rows.device)
        return rows.index_select(0, self._index)

    def _places(self) -> list[int]:
        index, first = list[int](), 0
        for count, size in zip(self.counts, self.sizes, strict=True):
            index += [*range(first, first + count), *[0] * (size - count)]
            first += count
        return index + [0] * (self.rows - len(index))


class Looked(NamedTuple):
    """Some of the rows at hand, or all of them, and how they lie."""

    which: Tensor | None
    spans: Spans

    def of(self, rows: Tensor) -> Tensor:
        """The rows in question."""
        return rows if self.which is None else rows.index_select(0, self.which)


def looked_at(counts: Sequence[int], spans: Spans, rows: int, device: torch.device) -> Looked:
    """Of the rows of some leaves, of as many shards each and so many rows a shard, those that are looked at.

    It is the same share of every shard, in batches of `rows` in all.
    """
    share, together = min(1.0, max(LOOK_ROWS / rows, 0.25)), len(counts) // max(1, len(spans.counts))
    some = [math.ceil(share * count) for count in counts]
    looked = Spans([sum(some[i : i + together]) for i in range(0, len(some), together or 1)], aligned=spans.aligned)
    index = list[int]()
    ends = [*_starts(looked.sizes)[1:], looked.rows][: len(looked.sizes)]
    for leaf, (start, end) in enumerate(zip(_starts(spans.sizes), ends, strict=True)):
        begins = accumulate(counts[leaf * together : (leaf + 1) * together], initial=start)
        for begin, taken in zip(begins, some[leaf * together : (leaf + 1) * together], strict=False):
            index += range(begin, begin + taken)
        index += [0] * (end - len(index))
    return Looked(torch.tensor(index, dtype=torch.int64, device=device), looked)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][: len(sizes)]
