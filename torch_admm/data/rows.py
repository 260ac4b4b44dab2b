"""Rows of samples and targets, wherever they are: in chunks (in order) or in batches (in a random order)."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from functools import singledispatch
from itertools import islice
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from ..problem import Problem
from .shards import SHARDS, Shards

__all__ = ["AbstractRows", "Ahead", "Chunk", "has_floating_targets", "held_out", "regrouped", "rows_of", "take"]

Pair = tuple[Tensor, Tensor]
T = TypeVar("T")


class Chunk(NamedTuple):
    """Some rows: which they are, their features and their encoded targets."""

    rows: slice
    x: Tensor
    y: Tensor


def take(values: Tensor, rows: slice) -> Tensor:
    """A view of some rows."""
    return values.narrow(0, rows.start, rows.stop - rows.start)


class AbstractRows(abc.ABC):
    """Rows for one problem: x of shape (rows, inputs) in the model's dtype and on its device, y as the loss encoded it.

    A chunk or batch is the consumer's to keep, but not to write to: it may be a view of the user's own data.
    """

    resident: ClassVar[bool] = False  # are they all in memory, so that a few more numbers a row do not matter?
    cut: bool | None = None  # are sums over them made shard by shard? None: if the shards are large enough for that
    merged: int = 1  # neighbouring shards that are one there: of few rows, each by itself would cost too much
    count: int  # rows here
    first: int = 0  # number of the first one among the rows of all ranks: what is drawn for a row depends on that
    split: Shards  # of the rows of all ranks, those that are here
    like: Tensor  # without rows, but with their width, dtype and device
    batch_size: int | None = None  # where the data bring batches of their own: the rows of one

    @abc.abstractmethod
    def chunks(self, size: int) -> Iterator[Chunk]:
        """All rows in order, `size` at a time, numbered from 0; the last chunk may be shorter."""

    @abc.abstractmethod
    def batches(self, size: int, seed: int, epoch: int) -> Iterator[Pair]:
        """All rows once, in an order given by seed and epoch; the last batch may be shorter.

        `size` counts the rows of all ranks. Each has its own rows of every batch, in the order of the shards and maybe
        none: put together rank by rank, the batches are those of one process.
        """

    @abc.abstractmethod
    def parted(self, held: int, seed: int) -> tuple[AbstractRows, AbstractRows]:
        """All but `held` rows, and those, drawn by the seed; both in order. Comes before `part`."""

    @abc.abstractmethod
    def _some(self, rows: slice, split: Shards) -> AbstractRows:
        """These rows only, from start to stop."""

    @property
    def drawn(self) -> str:
        """How rows come to be in a batch, in words: those of ranks must come alike to belong together."""
        return "at random"

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return self.split.total

    def stretch(self, rows: slice) -> AbstractRows:
        """These rows only, from start to stop, as data of their own."""
        return self._some(rows, Shards(rows.stop - rows.start))

    def part(self, rank: int, ranks: int, together: int = 1, shards: int = SHARDS) -> AbstractRows:
        """The rows of one of several ranks: contiguous, as even as whole shards can be; none where rows are too few.

        See `Shards.part` for `together` and `shards`.
        """
        split = self.split.part(rank, ranks, together, shards)
        return self._some(split.rows, split)

    def batch_counts(self, size: int, seed: int, epoch: int) -> Iterator[list[int]]:
        """For each of `batches`, how many rows it has of each shard, of all ranks."""
        return self.split.counts(size, seed, epoch)


@final
class Ahead(Generic[T]):
    """The same items, the next of which can be fetched before it is asked for, when there is time."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items, self._held = items, list[T]()

    def __iter__(self) -> Iterator[T]:
        while True:
            self.fetch()
            if not self._held:
                return
            yield self._held.pop()

    def fetch(self) -> None:
        """Have the next item here, if there is one."""
        if not self._held:
            self._held.extend(islice(self._items, 1))


def held_out(count: int, held: int, seed: int) -> Pair:
    """Numbers of the rows that are kept and of `held` others, drawn by the seed; both in order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order.narrow(0, held, count - held).sort().values, order.narrow(0, 0, held).sort().values


def regrouped(blocks: Iterable[Pair], size: int) -> Iterator[Chunk]:
    """Blocks of any number of rows as chunks of `size`; what lies within one block is not copied."""
    start, waiting, held = 0, list[Pair](), 0
    for block in blocks:
        for x, y in _pieces(*block, size - held, size):
            waiting.append((x, y))
            held += x.shape[0]
            if held == size:
                yield _joined(waiting, start, size)
                start, waiting, held = start + size, [], 0
    if held:
        yield _joined(waiting, start, held)


def _pieces(x: Tensor, y: Tensor, first: int, size: int) -> Iterator[Pair]:
    """The first so many rows, then `size` at a time."""
    if first < min(size, len(x)):
        rest = slice(first, len(x))
        yield take(x, slice(0, first)), take(y, slice(0, first))
        x, y = take(x, rest), take(y, rest)
    yield from zip(x.split(size), y.split(size), strict=True)


def _joined(parts: list[Pair], start: int, count: int) -> Chunk:
    x, y = parts[0] if len(parts) == 1 else (torch.cat(column) for column in zip(*parts, strict=True))
    return Chunk(slice(start, start + count), x, y)


@singledispatch
def rows_of(data: Any, problem: Problem, name: str = "data") -> AbstractRows:
    """Data of any kind as rows for the problem; a ValueError names the argument, what came and what is expected.

    A registry by type: `rows_of.register(MyData, function)` adds one, and `has_floating_targets` has its like.
    """
    raise _unknown(data, name)


@singledispatch
def has_floating_targets(data: Any, name: str = "data") -> bool:
    """Are the targets floating numbers, or classes? Decides the loss where none is given."""
    raise _unknown(data, name)


def _unknown(data: Any, name: str) -> ValueError:
    return ValueError(
        f"{name} must be a pair (X, y) of tensors or numpy arrays, got {type(data).__name__}; the path of an HDF5 "
        f"file, a torch Dataset or a DataLoader will do too"
    )


@rows_of.register
def _(data: AbstractRows, problem: Problem, name: str = "data") -> AbstractRows:
    wanted = problem.inputs, problem.dtype, problem.device
    if (came := (data.like.shape[1], data.like.dtype, data.like.device)) != wanted:
        raise ValueError(f"{name} has (features, dtype, device) {came}; those of the model are {wanted}")
    return data


@has_floating_targets.register
def _(data: AbstractRows, name: str = "data") -> bool:
    raise ValueError(f"{name} is {type(data).__name__}, whose targets are encoded for a loss: name the method too")
