"""HDF5 files of rows, read from the disk as they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..problem import Problem
from .checks import Number, encoded
from .layout import Array, Description, Layout, describe, layout_of
from .reader import AHEAD, Pool, ahead
from .rows import AbstractRows, Chunk, Pair, has_floating_targets, regrouped, rows_of
from .shards import Shards, generator
from .streams import Streams
from .writer import Writer

__all__ = ["Description", "HDF5Rows", "Writer", "describe", "read"]

BLOCK_BYTES = 4 << 20  # read as one piece of work: less and threads wait for each other, more and caches overflow
WINDOW_BYTES = 1 << 20  # of each shard, chunks from all over it whose rows are shuffled together
MERGED_BYTES = 4 << 20  # rows of several shards that are put together into batches at a time

Path = str | os.PathLike[str]


class File(NamedTuple):
    """One that is open, and the memory that its chunks go to."""

    descriptor: int
    pool: Pool


class Window(NamedTuple):
    """Chunks that are shuffled together: before which row of the shuffled shard, and which shard of those here."""

    start: int
    shard: int
    chunks: list[int]


@final
@dataclass(frozen=True)
class Held:
    """Some rows of every chunk, `held` of `count` in all, drawn by the seed: those, or with `out` False all others."""

    held: int
    count: int
    seed: int
    out: bool

    def before(self, row: Array) -> Array:
        """How many of the rows before `row`, a border between chunks, are selected."""
        held = row * self.held // self.count
        return held if self.out else row - held

    def within(self, chunk: int, start: int, stop: int) -> Array:
        """Which rows of a chunk are selected, counted from its start."""
        order = np.random.default_rng((self.seed, chunk)).permutation(stop - start)
        held = stop * self.held // self.count - start * self.held // self.count
        return np.sort(order[:held] if self.out else order[held:])


@final
class HDF5Rows(AbstractRows):
    """Rows of a file, a few chunks of it in memory at a time, read ahead by a thread.

    The file is open while somebody iterates, so rows may go to other processes. Batches come from windows of each
    shard: its chunks in random order, the rows of a MB or so of them shuffled together, every row once an epoch.
    """

    def __init__(
        self,
        layout: Layout,
        problem: Problem,
        *,
        selected: Held | None = None,
        rows: slice | None = None,
        split: Shards | None = None,
    ) -> None:
        """`rows` counts the selected ones only."""
        self.layout, self.problem, self.selected = layout, problem, selected
        borders = np.minimum(np.arange(layout.chunks + 1) * layout.chunk_rows, layout.description.rows)
        self._borders = borders if selected is None else selected.before(borders)  # of chunks, in selected rows
        self.rows = slice(0, int(self._borders[-1])) if rows is None else rows
        self.count, self.first = self.rows.stop - self.rows.start, self.rows.start
        self.split = Shards(self.count) if split is None else split
        self.like = torch.empty(0, layout.description.features, dtype=problem.dtype, device=problem.device)
        self._target, self._codes = _target_type(layout.description), self._coded()

    @property
    def drawn(self) -> str:
        return "at random, from a window of a file"

    def chunks(self, size: int) -> Iterator[Chunk]:
        rows = max(size, self._rows_in(BLOCK_BYTES) // size * size)  # chunks within a block are not copied
        blocks = _groups(self._touched(), max(1, rows // self.layout.chunk_rows))
        with opened(self.layout) as file:
            yield from regrouped(ahead(partial(self._block, file), blocks, helping=True), size)

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[Pair]:
        shards = [self._some(rows, Shards(rows.stop - rows.start)) for rows in self.split.local()]
        random = [partial(generator, seed, epoch, i) for i in self.split.here]
        windows = sorted(w for place, shard in enumerate(shards) for w in shard._windows(place, random[place]()))

        def work(window: Window) -> tuple[int, Pair]:
            return window.shard, shards[window.shard]._shuffled(file, window.chunks, random[window.shard](window.start))

        with opened(self.layout) as file:
            streams = Streams(ahead(work, windows, most=len(shards) + AHEAD, helping=True), self._nothing())
            for cuts in self.split.cuts(size, seed, epoch, self._rows_in(MERGED_BYTES)):
                yield from streams.batches(cuts)

    def _some(self, rows: slice, split: Shards) -> HDF5Rows:
        absolute = slice(self.rows.start + rows.start, self.rows.start + rows.stop)
        return HDF5Rows(self.layout, self.problem, selected=self.selected, rows=absolute, split=split)

    def parted(self, held: int, seed: int) -> tuple[HDF5Rows, HDF5Rows]:
        assert self.selected is None, "rows are parted once"
        assert self.count == self.layout.description.rows, "rows are parted before they are shared out"
        kept = Held(held, self.count, seed, out=False)
        return (
            HDF5Rows(self.layout, self.problem, selected=kept),
            HDF5Rows(self.layout, self.problem, selected=replace(kept, out=True)),
        )

    def _rows_in(self, size: int) -> int:
        return size // (self.layout.description.features * self.layout.x.dtype.itemsize)

    def _touched(self) -> Array:
        """The chunks that hold any of these rows."""
        start, stop = self.rows.start, self.rows.stop
        return np.flatnonzero((self._borders[1:] > start) & (self._borders[:-1] < stop) & (np.diff(self._borders) > 0))

    def _block(self, file: File, chunks: Sequence[int]) -> Pair:
        """The rows of consecutive chunks."""
        x, y = self._read(file, chunks)
        if self.selected is not None:
            return self._gathered(x, y, self._index(chunks), chunks)
        origin = int(self._borders[chunks[0]])
        rows = slice(max(0, self.rows.start - origin), min(self.rows.stop, int(self._borders[chunks[-1] + 1])) - origin)
        return self._ready(torch.from_numpy(x[rows]), y[rows], lambda i: origin + rows.start + i)

    def _windows(self, shard: int, random: np.random.Generator) -> Iterator[Window]:
        """All rows of a shard, in chunks of a random order."""
        start = 0
        chunks = random.permutation(self._touched())
        for some in _groups(chunks, max(1, self._rows_in(WINDOW_BYTES) // self.layout.chunk_rows)):
            yield Window(start, shard, some.tolist())
            ends = np.minimum(self._borders[some + 1], self.rows.stop)
            start += int((ends - np.maximum(self._borders[some], self.rows.start)).sum())

    def _shuffled(self, file: File, chunks: Sequence[int], random: np.random.Generator) -> Pair:
        """The rows of some chunks."""
        x, y = self._read(file, chunks)
        return self._gathered(x, y, random.permutation(self._index(chunks)), chunks)

    def _nothing(self) -> Pair:
        return self._ready(torch.empty(0, self.layout.description.features), np.empty(0, self.layout.y.dtype), int)

    def _read(self, file: File, chunks: Sequence[int]) -> tuple[Array, Array]:
        x, y = self.layout.room(len(chunks), file.pool)
        self.layout.read(file.descriptor, chunks, x, y)
        return x.astype(x.dtype.newbyteorder("="), copy=False), y

    def _index(self, chunks: Sequence[int]) -> Array:
        """Where in the chunks, read one after the other, the rows are."""
        return np.concatenate([self._within(int(chunk)) + i * self.layout.chunk_rows for i, chunk in enumerate(chunks)])

    def _within(self, chunk: int) -> Array:
        start = chunk * self.layout.chunk_rows
        stop = min(start + self.layout.chunk_rows, self.layout.description.rows)
        index = np.arange(stop - start) if self.selected is None else self.selected.within(chunk, start, stop)
        border = int(self._borders[chunk])
        return index[max(0, self.rows.start - border) : max(0, self.rows.stop - border)]

    def _gathered(self, x: Array, y: Array, index: Array, chunks: Sequence[int]) -> Pair:
        size = self.layout.chunk_rows
        some = torch.from_numpy(x).index_select(0, torch.from_numpy(index))
        return self._ready(some, y[index], lambda i: int(chunks[index[i] // size]) * size + int(index[i] % size))

    def _ready(self, x: Tensor, y: Array, number: Number) -> Pair:
        """As the problem takes them."""
        x = x.to(self.problem.device, self.problem.dtype)
        if self._codes is not None:
            return x, torch.from_numpy(y).to(self._codes).view(-1, *self._codes.shape[1:])
        targets = torch.from_numpy(y.astype(self._target, copy=False))
        try:
            return x, encoded(targets, x, self.problem, str(self.layout.description.path), number)
        except ValueError as error:
            raise DataError(str(error)) from None

    def _coded(self) -> Tensor | None:
        """The encoded classes, if each is its own number: checking every label again would take as long as reading."""
        numbers = torch.arange(len(self.layout.description.classes or ()), device=self.like.device)
        with suppress(ValueError):
            codes = encoded(numbers, self.like, self.problem, "")
            if len(codes) and codes.numel() == len(numbers) and bool((codes.view(-1) == numbers).all()):
                return codes
        return None


@rows_of.register(str)
@rows_of.register(os.PathLike)
def _(data: Any, problem: Problem, name: str = "data") -> HDF5Rows:
    layout = layout_of(data)
    if layout.description.features != problem.inputs:
        came = f"{layout.description.path} has {layout.description.features} features"
        raise DataError(f"{name}: {came}; {problem.inputs} are expected, the inputs of the first layer")
    return HDF5Rows(layout, problem)


@has_floating_targets.register(str)
@has_floating_targets.register(os.PathLike)
def _(data: Any, name: str = "data") -> bool:
    return describe(data).classes is None


def read(path: Path) -> tuple[Array, Array]:
    """All rows in memory and checked: x as float32; y as int64 class numbers, or float32."""
    layout = layout_of(path)
    x, y = layout.room(layout.chunks)
    with opened(layout) as file:

        def fetch(chunk: int) -> None:
            rows = slice(chunk * layout.chunk_rows, (chunk + 1) * layout.chunk_rows)
            layout.read(file.descriptor, [chunk], x[rows], y[rows])

        for _ in ahead(fetch, range(layout.chunks), helping=True):
            pass
    rows, target = slice(0, layout.description.rows), _target_type(layout.description)
    return x[rows].astype(np.float32, copy=False), y[rows].astype(target, copy=False)


@contextmanager
def opened(layout: Layout) -> Iterator[File]:
    """For as long as reading goes on."""
    descriptor = os.open(layout.description.path, os.O_RDONLY)
    try:
        yield File(descriptor, Pool())
    finally:
        os.close(descriptor)


def _groups(chunks: Array, size: int) -> Iterator[Array]:
    return (chunks[i : i + size] for i in range(0, len(chunks), size))


def _target_type(description: Description) -> np.dtype[Any]:
    return np.dtype(np.float32 if description.classes is None else np.int64)
