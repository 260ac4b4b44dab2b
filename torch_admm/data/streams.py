"""Batches from rows that come shard by shard, a piece at a time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from .rows import Pair, take
from .shards import merged

__all__ = ["Streams"]


@final
class Streams:
    """Pieces of shards, in about the order in which batches need them; what comes too early waits."""

    def __init__(self, pieces: Iterator[tuple[int, Pair]], nothing: Pair) -> None:
        """Pieces carry the place of their shard among those here; `nothing` has no rows, but is like them."""
        self._pieces, self._nothing = pieces, nothing
        self._waiting: defaultdict[int, deque[Pair]] = defaultdict(deque)

    def batches(self, cuts: npt.NDArray[Any]) -> Iterator[Pair]:
        """Some batches, from their cut points; they are put together at once, as many small copies take longer."""
        counts = cuts[-1] - cuts[0]
        parts = [pair for shard, count in enumerate(counts.tolist()) for pair in self._next(shard, count)]
        order = torch.from_numpy(merged(cuts, counts.cumsum() - counts - cuts[0])).to(self._nothing[0].device)
        columns = zip(self._nothing, *parts, strict=True)
        x, y = (torch.cat(column).index_select(0, order) for column in columns)
        sizes = np.diff(cuts, axis=0).sum(1).tolist()
        return zip(x.split(sizes), y.split(sizes), strict=True)

    def _next(self, shard: int, count: int) -> Iterator[Pair]:
        """The next rows of a shard."""
        while count:
            x, y = self._piece(shard)
            if len(x) > count:
                rest = slice(count, len(x))
                self._waiting[shard].appendleft((take(x, rest), take(y, rest)))
                x, y = take(x, slice(0, count)), take(y, slice(0, count))
            count -= len(x)
            yield x, y

    def _piece(self, shard: int) -> Pair:
        while not self._waiting[shard]:
            other, pair = next(self._pieces)
            self._waiting[other].append(pair)
        return self._waiting[shard].popleft()
