"""Rows from torch's Dataset and DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from ..problem import Problem
from .checks import Number, encoded, features, pair_of, same_rows
from .rows import AbstractRows, Chunk, Pair, has_floating_targets, regrouped, rows_of

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
    is shuffled by the seed if the loader shuffles, and in order if it does not.
    """

    def __init__(
        self, loader: DataLoader[Any], problem: Problem, name: str, *, own: bool, index: Sequence[int] | None = None
    ) -> None:
        """`own` loaders are the user's; without one, a plain loader says how items are collated."""
        self.loader, self.problem, self.name, self.own = loader, problem, name, own
        self.whole = index is None
        self.index = range(_length(loader.dataset, name)) if index is None else index
        self.count = len(self.index)
        self.first = self.index[0] if isinstance(self.index, range) and self.count else 0
        self.like = torch.empty(0, problem.inputs, dtype=problem.dtype, device=problem.device)
        self.batch_size = loader.batch_size if own else None

    def chunks(self, size: int) -> Iterator[Chunk]:
        return regrouped(self._load(self.index, self.batch_size or FETCH_ROWS), size)

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[Pair]:
        if self.own and self.whole:
            return (self._ready(batch, f"{self.name}, batch {i}") for i, batch in enumerate(self.loader))
        shuffled = not self.own or self._shuffles()
        order = _order(self.count, seed * 1_000_003 + epoch) if shuffled else range(self.count)
        return self._load([self.index[i] for i in order], self.batch_size or size)

    def stretch(self, rows: slice) -> DatasetRows:
        return self._of(self.index[rows.start : rows.stop])

    def parted(self, held: int, seed: int) -> tuple[DatasetRows, DatasetRows]:
        order = _order(self.count, seed)
        kept, out = (self._of([self.index[i] for i in sorted(part)]) for part in (order[held:], order[:held]))
        return kept, out

    def _of(self, index: Sequence[int]) -> DatasetRows:
        return DatasetRows(self.loader, self.problem, self.name, own=self.own, index=index)

    def _shuffles(self) -> bool:
        sampler = type(self.loader.batch_sampler if self.loader.batch_size is None else self.loader.sampler)
        if sampler not in SHUFFLES:
            raise ValueError(
                f"{self.name} is a DataLoader with a {sampler.__name__}, which cannot be had for a part of the rows; "
                f"give the Dataset itself, or a loader that shuffles or does not"
            )
        return SHUFFLES[sampler]

    def _load(self, index: Sequence[int], size: int) -> Iterator[Pair]:
        """These items, `size` at a time."""
        done = 0
        settings = {name: getattr(self.loader, name) for name in SETTINGS}
        for batch in DataLoader(self.loader.dataset, batch_size=size, sampler=index, **settings):
            x, y = self._ready(batch, self.name, index[done : done + size].__getitem__)
            yield x, y
            done += len(x)

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


def _order(count: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed % 2**63)).tolist()
    return order


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
