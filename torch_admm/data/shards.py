"""Which rows make up which mini-batch, whatever the number of ranks.

All rows, of all ranks, are cut into the same few contiguous shards, and a rank has a run of whole ones. Each shard is
shuffled by itself, and a batch takes the next rows of every shard: as many of each, and where they do not divide
evenly, one more of some that are drawn, spread evenly over the shards so that ranks have as many. Nothing of that
depends on ranks: one process and 24 train on the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, final

import numpy as np
import numpy.random  # numpy loads it when it is first used, which would be while a clock runs
import numpy.typing as npt

__all__ = ["SHARDS", "Shards", "dealt", "generator", "merged", "share"]

SHARDS = 24  # divided evenly by 1, 2, 3, 4, 6, 8, 12 and 24 ranks; where there are more, they are a multiple of it
AT_ONCE = 1 << 16  # rows whose batches are planned together
ORDERS = 64  # that are drawn together

Array = npt.NDArray[Any]


def share(count: int, rank: int, ranks: int) -> slice:
    """One of `ranks` contiguous parts that differ by one at most."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def dealt(number: int, ranks: int, together: int = 1) -> list[range]:
    """Which of so many shards each rank has; as many as go `together` neighbours stay on one."""
    shares = (share(number // together, rank, ranks) for rank in range(ranks))
    return [range(mine.start * together, mine.stop * together) for mine in shares]


def generator(seed: int, *key: int) -> np.random.Generator:
    """Random numbers of their own for every key: a shard in an epoch, a window of it, or some orders of shards."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


@final
@dataclass(frozen=True)
class Shards:
    """The shards of a data set of `total` rows that one rank has: all of them, if there is only one."""

    total: int
    number: int = SHARDS  # of all ranks
    here: range = field(default=range(SHARDS))
    together: int = 1  # so many neighbours are on one rank

    def part(self, rank: int, ranks: int, together: int = 1, shards: int = SHARDS) -> Shards:
        """A run of whole shards, of so many; with more ranks than that there are as many shards as ranks.

        Neighbours that go `together` are not torn apart, even if some ranks then have none.
        """
        assert len(self.here) == self.number, "rows are shared out once"
        number = max(shards, ranks)
        assert number % together == 0, "shards go together in groups of one size"
        return Shards(self.total, number, dealt(number, ranks, together)[rank], together)

    @property
    def rows(self) -> slice:
        """The rows here, among those of all ranks."""
        borders = self._borders().tolist()
        return slice(borders[self.here.start], borders[self.here.stop])

    def local(self) -> list[slice]:
        """The rows of each shard here, among the rows here."""
        borders = self._borders()[self.here.start : self.here.stop + 1]
        return [slice(*pair) for pair in pairwise((borders - borders[0]).tolist())]

    def batches(self, size: int, seed: int | None, epoch: int) -> Iterator[tuple[Array, list[int]]]:
        """For data that can be had in any order: the rows here of some batches, and how many each of these has."""
        rows = self.local()
        orders = [np.arange(shard.start, shard.stop) for shard in rows]
        if seed is not None:
            orders = [generator(seed, epoch, i).permutation(order) for i, order in zip(self.here, orders, strict=True)]
        order, origin = np.concatenate([*orders, np.arange(0)]), np.array([shard.start for shard in rows], np.int64)
        for cuts in self.cuts(size, seed, epoch):
            yield order[merged(cuts, origin)], np.diff(cuts, axis=0).sum(1).tolist()

    def counts(self, size: int, seed: int | None, epoch: int) -> Iterator[list[int]]:
        """Of each batch, how many rows it has of each shard, whoever has it."""
        for cuts in replace(self, here=range(self.number)).cuts(size, seed, epoch):
            yield from np.diff(cuts, axis=0).tolist()

    def cuts(self, size: int, seed: int | None, epoch: int, at_once: int = AT_ONCE) -> Iterator[Array]:
        """Up to which row of each shard here each batch goes, `size` being its rows of all ranks.

        Comes in blocks of some `at_once` rows, of shape (batches + 1, shards), the first line being the last of the
        block before. Without a seed batches are in order: of one shard after the other.
        """
        most, batches = max(1, at_once // size), -(-self.total // size)
        line = np.zeros((1, len(self.here)), np.int64)
        for start in range(0, batches, most):
            ends = np.minimum(np.arange(start + 1, min(start + most, batches) + 1) * size, self.total)
            drawn = self._in_order(ends) if seed is None else self._drawn(ends, size, seed, epoch)
            yield np.concatenate([line, drawn])
            line = drawn[-1:]

    def _in_order(self, ends: Array) -> Array:
        """How many rows of each shard here are among the first so many of all."""
        borders = self._borders()[self.here.start : self.here.stop + 1]
        cuts: Array = np.clip(ends[:, None] - borders[:-1], 0, np.diff(borders))
        return cuts

    def _drawn(self, ends: Array, size: int, seed: int, epoch: int) -> Array:
        """The same with a row of every shard in turn, a round, in an order that is kept while batches end within one.

        So every batch has as many rows of each shard, or one more. Smaller ones do not have rows of all: there orders
        are drawn freely, or too few sets of shards would ever come together.
        """
        last, period = self.total - 1, math.lcm(size, self.number)
        rounds, extra = np.divmod(ends - 1, self.number)
        different, which = np.unique((ends - 1) // period, return_inverse=True)
        halved = size >= self.number and self.number % SHARDS == 0
        radices = (2, 2, 2, self.number // 8) if halved else ()
        place = _orders(different, self.number, radices, seed, epoch)
        if different[-1] == last // period:  # shards that have no row in the last round come after those that have
            short = np.diff(self._borders()) == last // self.number
            place[-1] = (place[-1] + self.number * short).argsort().argsort()
        chosen = place[which, self.here.start : self.here.stop] <= extra[:, None]
        cuts: Array = rounds[:, None] + chosen
        return cuts

    def _borders(self) -> Array:
        borders: Array = self.total * np.arange(self.number + 1) // self.number
        return borders


def _orders(numbers: Array, shards: int, radices: tuple[int, ...], seed: int, epoch: int) -> Array:
    """The places of shards in orders of these numbers."""
    blocks, which = np.unique(numbers // ORDERS, return_inverse=True)
    table = np.stack([_block(block, shards, radices, seed, epoch) for block in blocks.tolist()])
    places: Array = table[which, numbers % ORDERS]
    return places


@lru_cache(maxsize=4)
def _block(block: int, shards: int, radices: tuple[int, ...], seed: int, epoch: int) -> Array:
    """Some orders. Shards that follow each other in one are as far apart in the tree of `radices` as can be:

    of 24, any two in turn are of different halves, four of different quarters, eight of different eighths.
    """
    random, index = generator(seed, epoch, shards + block), np.arange(shards)
    place, weight, size = np.zeros((ORDERS, shards), np.int64), 1, shards
    for radix in radices or (shards,):
        nodes, size = shards // size, size // radix
        order = random.random((ORDERS, nodes, radix)).argsort(2)
        place += weight * order[:, index // (size * radix), index // size % radix]
        weight *= radix
    return place


def merged(cuts: Array, origin: Array) -> Array:
    """Where the rows of batch after batch are, if those of each shard lie together and its first one at `origin`."""
    counts = np.diff(cuts, axis=0).ravel()
    before = counts.cumsum() - counts
    places: Array = np.repeat((origin + cuts[:-1]).ravel() - before, counts) + np.arange(counts.sum())
    return places
