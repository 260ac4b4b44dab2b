"""How the rows of several leaves lie one after the other, and which of them are looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, final

import torch
from torch import Tensor

__all__ = ["LOOK_ROWS", "Looked", "Spans", "looked_at"]

# What is done row by row comes out the same whatever rows are around, if rows that belong to nobody take the place of
# those left over: products take four rows at a time, functions 32 entries.
START, ROWS = 4, 32
LOOK_ROWS = 128  # of a mini-batch that are looked at, or a quarter of its rows


@final
class Spans:
    """Leaves of so many rows each; aligned ones start at multiples of START, and all together end at one of ROWS."""

    def __init__(self, counts: Sequence[int], *, aligned: bool = False) -> None:
        """`counts` may be of no leaves at all."""
        self.counts, self.aligned = list(counts), aligned
        self.sizes = [-(-count // START) * START for count in counts] if aligned else self.counts
        if aligned and self.sizes:
            self.sizes[-1] += -sum(self.sizes) % ROWS
        self.whole = self.sizes == self.counts

    def parts(self, rows: Tensor) -> Sequence[Tensor]:
        """The rows of each leaf."""
        found: Sequence[Tensor] = rows.split(self.sizes)
        return found if self.whole else [t.narrow(0, 0, n) for t, n in zip(found, self.counts, strict=True)]

    def sums(self, rows: Tensor) -> Tensor:
        """Over the rows of each leaf."""
        return torch.stack([part.sum(0) for part in self.parts(rows)])

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """left'right over the rows of each leaf."""
        return torch.stack([a.T @ b for a, b in zip(self.parts(left), self.parts(right), strict=True)])

    def laid_out(self, rows: Tensor) -> Tensor:
        """Rows that follow each other closely, as they should lie; where there are none, the first one stands again."""
        if self.whole or not len(rows):
            return rows
        pairs = zip(rows.split(self.counts), self.sizes, strict=True)
        first = rows.narrow(0, 0, 1)
        lines = ([part, first.expand(size - len(part), *rows.shape[1:])] for part, size in pairs)
        return torch.cat([t for line in lines for t in line])


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
    index: list[int] = []
    for leaf, (at, end) in enumerate(zip(_starts(spans.sizes), accumulate(looked.sizes), strict=True)):
        for shard in range(leaf * together, (leaf + 1) * together):
            begin = at + sum(counts[leaf * together : shard])
            index += range(begin, begin + some[shard])
        index += [0] * (end - len(index))
    return Looked(torch.tensor(index, dtype=torch.int64, device=device), looked)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][: len(sizes)]
