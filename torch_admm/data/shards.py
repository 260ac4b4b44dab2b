"""Which rows make up which mini-batch, whatever the number of ranks.

All rows, of all ranks, are cut into the same few contiguous shards, and a rank has a run of whole ones. Each shard is
shuffled by itself, and a batch takes the next rows of every shard: as many of each, and where they do not divide
evenly, one more of some that are drawn. Nothing of that depends on ranks: one process and 24 train on the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = ["SHARDS", "Shards", "generator", "merged", "share"]

SHARDS = 24  # divided evenly by 1, 2, 3, 4, 6, 8, 12 and 24 ranks
AT_ONCE = 1 << 16  # rows whose batches are planned together

Array = npt.NDArray[Any]


def share(count: int, rank: int, ranks: int) -> slice:
    """One of `ranks` contiguous parts that differ by one at most."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


def generator(seed: int, *key: int) -> np.random.Generator:
    """Random numbers of their own for every key: an epoch, or a shard in an epoch, or a window of it."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


@final
@dataclass(frozen=True)
class Shards:
    """The shards of a data set of `total` rows that one rank has: all of them, if there is only one."""

    total: int
    number: int = SHARDS  # of all ranks
    here: range = field(default=range(SHARDS))

    def part(self, rank: int, ranks: int) -> Shards:
        """A run of whole shards; with more ranks than shards there are as many shards as ranks."""
        assert len(self.here) == self.number, "rows are shared out once"
        number = max(self.number, ranks)
        return Shards(self.total, number, range(number)[share(number, rank, ranks)])

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
        """Of each batch, how many rows it has of each shard here."""
        for cuts in self.cuts(size, seed, epoch):
            yield from np.diff(cuts, axis=0).tolist()

    def cuts(self, size: int, seed: int | None, epoch: int, at_once: int = AT_ONCE) -> Iterator[Array]:
        """Up to which row of each shard here each batch goes, `size` being its rows of all ranks.

        Comes in blocks of some `at_once` rows, of shape (batches + 1, shards), the first line being the last of the
        block before. Without a seed batches are in order: of one shard after the other.
        """
        most = max(1, at_once // size)
        if size < self.number:  # several batches share a round, so a block has to end with one
            most = -(-most // self.number) * self.number
        random, batches = None if seed is None else generator(seed, epoch), -(-self.total // size)
        line = np.zeros((1, len(self.here)), np.int64)
        for start in range(0, batches, most):
            ends = np.minimum(np.arange(start + 1, min(start + most, batches) + 1) * size, self.total)
            block = np.concatenate([line, self._in_order(ends) if random is None else self._drawn(ends, random)])
            line = block[-1:]
            yield block

    def _in_order(self, ends: Array) -> Array:
        """How many rows of each shard here are among the first so many of all."""
        borders = self._borders()[self.here.start : self.here.stop + 1]
        cuts: Array = np.clip(ends[:, None] - borders[:-1], 0, np.diff(borders))
        return cuts

    def _drawn(self, ends: Array, random: np.random.Generator) -> Array:
        """The same with a row of every shard in turn, a round; within one, batches end after shards that are drawn."""
        rounds, extra = np.divmod(ends - 1, self.number)
        different, which = np.unique(rounds, return_inverse=True)
        place = random.random((len(different), self.number))
        last = self.total // self.number  # in this round, shards that have no row come after those that have
        place[different == last] += np.diff(self._borders()) == last
        chosen = place.argsort(1, kind="stable").argsort(1, kind="stable")[which] <= extra[:, None]
        cuts: Array = rounds[:, None] + chosen[:, self.here.start : self.here.stop]
        return cuts

    def _borders(self) -> Array:
        borders: Array = self.total * np.arange(self.number + 1) // self.number
        return borders


def merged(cuts: Array, origin: Array) -> Array:
    """Where the rows of batch after batch are, if those of each shard lie together and its first one at `origin`."""
    counts = np.diff(cuts, axis=0).ravel()
    before = counts.cumsum() - counts
    places: Array = np.repeat((origin + cuts[:-1]).ravel() - before, counts) + np.arange(counts.sum())
    return places
