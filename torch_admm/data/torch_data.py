"""Rows from torch's Dataset and DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from ..problem import Problem
from .checks import Number, encoded, features, pair_of, same_rows
from .rows import AbstractRows, Chunk, Pair, has_floating_targets, held_out, regrouped, rows_of
from .shards import Shards

__all__ = ["DatasetRows"]

FETCH_ROWS = 512  # items collated at a time in order, where no loader says otherwise
SHUFFLES = {RandomSampler: True, SequentialSampler: False}  # samplers that part of a data set can have too
# of a loader, what a second one over the same data set takes over
SETTINGS = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")


@final
class DatasetRows(AbstractRows):
    """Items (x, y) of a map-style data set, fetched as they are needed.

    In order they come through torch's default collation, or that of the user's loader, with its workers. Mini-batches
    are shuffled by the seed; those of a loader are one pass over it as it is: its batch size, sampler, generator and
    `drop_last` count, and neither `size` nor the seed does. A part of a loader's rows (for validation, or one rank's)
    is shuffled by the seed if the loader shuffles, and in order if it does not: ranks then work one after the other.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        problem: Problem,
        name: str,
        *,
        own: bool,
        index: Sequence[int] | None = None,
        first: int = 0,
        split: Shards | None = None,
    ) -> None:
        """`own` loaders are the user's; without one, a plain loader says how items are collated."""
        self.loader, self.problem, self.name, self.own = loader, problem, name, own
        self.as_it_is = own and index is None
        self.index = range(_length(loader.dataset, name)) if index is None else index
        self.count, self.first = len(self.index), first
        self.split = Shards(self.count) if split is None else split
        self.like = torch.empty(0, problem.inputs, dtype=problem.dtype, device=problem.device)
        self.batch_size = loader.batch_size if own else None

    def chunks(self, size: int) -> Iterator[Chunk]:
        fetched = self.batch_size or FETCH_ROWS
        rows = [self.index[i : i + fetched] for i in range(0, self.count, fetched)]
        return regrouped(self._load(rows), size)

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[Pair]:
        if self.as_it_is:
            return (self._ready(batch, f"{self.name}, batch {i}") for i, batch in enumerate(self.loader))
        return self._load(list(self._planned(self.batch_size or size, self._seed(seed), epoch)))

    def batch_counts(self, size: int, seed: int, epoch: int) -> Iterator[list[int]]:
        assert not self.as_it_is, "the batches of a loader are its own; those of part(0, 1) are cut into shards"
        return self.split.counts(self.batch_size or size, self._seed(seed), epoch)

    def _planned(self, size: int, seed: int | None, epoch: int) -> Iterator[list[int]]:
        for order, counts in self.split.batches(size, seed, epoch):
            rows = iter([self.index[i] for i in order.tolist()])
            yield from ([*islice(rows, count)] for count in counts)

    def _some(self, rows: slice, split: Shards) -> DatasetRows:
        return self._of(self.index[rows.start : rows.stop], self.first + rows.start, split)

    def parted(self, held: int, seed: int) -> tuple[DatasetRows, DatasetRows]:
        kept, out = (self._of([self.index[i] for i in rows.tolist()]) for rows in held_out(self.count, held, seed))
        return kept, out

    def _of(self, index: Sequence[int], first: int = 0, split: Shards | None = None) -> DatasetRows:
        kept: dict[str, Any] = {"own": self.own, "index": index, "first": first, "split": split}
        return DatasetRows(self.loader, self.problem, self.name, **kept)

    @property
    def drawn(self) -> str:
        return "in order" if self.own and not self._shuffles() else "at random"

    def _seed(self, seed: int) -> int | None:
        """None if the batches are in order."""
        return seed if not self.own or self._shuffles() else None

    def _shuffles(self) -> bool:
        sampler = type(self.loader.batch_sampler if self.loader.batch_size is None else self.loader.sampler)
        if sampler not in SHUFFLES:
            raise ValueError(
                f"{self.name} is a DataLoader with a {sampler.__name__}, which cannot be had for a part of the rows; "
                f"give the Dataset itself, or a loader that shuffles or does not"
            )
        return SHUFFLES[sampler]

    def _load(self, rows: Sequence[Sequence[int]]) -> Iterator[Pair]:
        """These items, some at a time."""
        settings = {name: getattr(self.loader, name) for name in SETTINGS}
        loaded = iter(DataLoader(self.loader.dataset, batch_sampler=[[*some] for some in rows if some], **settings))
        for some in rows:
            yield self._ready(next(loaded), self.name, some.__getitem__) if some else self._nothing

    @cached_property
    def _nothing(self) -> Pair:
        """No rows, as the problem takes them."""
        collate: Any = self.loader.collate_fn
        x, y = self._ready(collate([self.loader.dataset[0]]), self.name)
        return x.narrow(0, 0, 0), y.narrow(0, 0, 0)

    def _ready(self, batch: Any, name: str, number: Number = int) -> Pair:
        """A collated batch as the problem takes it."""
        x, y = (value.to(self.problem.device) for value in pair_of(batch, f"{name}: a batch"))
        x = features(x, self.problem, name, number)
        same_rows(x, y, name)
        return x, encoded(y, x, self.problem, name, number)


def _length(dataset: Any, name: str) -> int:
    """Of a map-style data set; others have neither order nor end."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__len__"):
        raise ValueError(
            f"{name}: {kind} gives items one after the other but has no length and no order; give a map-style Dataset, "
            f"(X, y), or write the rows to an HDF5 file with torch_admm.data.hdf5.Writer"
        )
    if len(dataset) == 0:
        raise ValueError(f"{name}: {kind} is empty; at least one item is expected")
    return len(dataset)


@rows_of.register(Dataset)
def _(data: Any, problem: Problem, name: str = "data") -> AbstractRows:
    if isinstance(data, TensorDataset):
        return rows_of(data.tensors, problem, name)
    _length(data, name)
    return DatasetRows(DataLoader(data), problem, name, own=False)


@rows_of.register(DataLoader)
def _(data: DataLoader[Any], problem: Problem, name: str = "data") -> AbstractRows:
    _length(data.dataset, name)
    if data.batch_sampler is None:
        raise ValueError(f"{name} is a DataLoader with batch_size=None; one that makes batches of items is expected")
    return DatasetRows(data, problem, name, own=True)


@has_floating_targets.register(Dataset)
def _(data: Any, name: str = "data") -> bool:
    _length(data, name)
    return has_floating_targets(DataLoader(data), name)


@has_floating_targets.register(DataLoader)
def _(data: DataLoader[Any], name: str = "data") -> bool:
    _length(data.dataset, name)
    collate: Any = data.collate_fn
    return has_floating_targets(collate([data.dataset[0]]), f"{name}: a batch")
