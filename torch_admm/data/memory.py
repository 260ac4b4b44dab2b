"""Rows in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import Tensor

from ..problem import Problem
from .checks import encoded, features, pair_of, same_device, same_rows
from .rows import AbstractRows, Chunk, Pair, has_floating_targets, held_out, rows_of, take
from .shards import Shards

__all__ = ["Rows"]


@final
class Rows(AbstractRows):
    """All rows in memory: x of shape (count, inputs), y as the loss encoded it."""

    resident: ClassVar[bool] = True

    def __init__(self, x: Tensor, y: Tensor, first: int = 0, split: Shards | None = None) -> None:
        """Take checked tensors; `rows_of` does the checking."""
        self.x, self.y, self.first = x, y, first
        self.count = len(x)
        self.split = Shards(self.count) if split is None else split
        self.like = x.narrow(0, 0, 0)

    def chunks(self, size: int) -> Iterator[Chunk]:
        for start in range(0, self.count, size):
            rows = slice(start, min(start + size, self.count))
            yield Chunk(rows, take(self.x, rows), take(self.y, rows))

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[Pair]:
        for order, counts in self.split.batches(size, seed, epoch):
            places = torch.from_numpy(order).to(self.x.device)
            ys = self.y.index_select(0, places).split(counts)  # of many batches at once: they are few numbers
            for index, y in zip(places.split(counts), ys, strict=True):
                yield self.x.index_select(0, index), y

    def _some(self, rows: slice, split: Shards) -> Rows:
        return Rows(take(self.x, rows), take(self.y, rows), self.first + rows.start, split)

    def parted(self, held: int, seed: int) -> tuple[Rows, Rows]:
        kept, out = (index.to(self.x.device) for index in held_out(self.count, held, seed))
        return self._chosen(kept), self._chosen(out)

    def _chosen(self, index: Tensor) -> Rows:
        return Rows(self.x.index_select(0, index), self.y.index_select(0, index))


@rows_of.register(tuple)
@rows_of.register(list)
def _(data: Any, problem: Problem, name: str = "data") -> Rows:
    x, y = pair_of(data, name)
    x = features(x, problem, name, array=isinstance(data[0], np.ndarray))
    same_rows(x, y, name)
    same_device(y, problem, f"{name}: y")
    return Rows(x, encoded(y, x, problem, name))


@has_floating_targets.register(tuple)
@has_floating_targets.register(list)
def _(data: Any, name: str = "data") -> bool:
    return pair_of(data, name)[1].is_floating_point()
