"""Little problems in double precision, as it costs next to nothing there.

How rows are grouped decides how their sums round, and training makes more of that from step to step, in float64 too. So
sums over all rows are made by shards, or by a few of them together, however few the rows are: any number of ranks
groups them alike.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NoReturn, final

import torch
from torch import Tensor

from .data import AbstractRows, Chunk
from .data.shards import Shards
from .problem import Problem, from_module

__all__ = ["LITTLE_SWEEP", "suited"]

LITTLE_SWEEP = 1 << 24  # rows times weights, up to which the other way to equal sums, shard by shard, costs more


def suited(problem: Problem, rows: AbstractRows, little: bool) -> tuple[Problem, AbstractRows]:
    """A problem and its rows as they are trained: `little` ones in double precision, on a copy of the model.

    What is trained fits into the user's model as it is.
    """
    if little and problem.dtype != torch.float64:
        return from_module(copy.deepcopy(problem.model).double(), problem.loss), _InDouble(rows)
    rows = copy.copy(rows)
    rows.cut = True
    return problem, rows


@final
class _InDouble(AbstractRows):
    """Rows of any kind, converted as they come."""

    cut = True

    def __init__(self, rows: AbstractRows) -> None:
        self.rows, self.count, self.first, self.split = rows, rows.count, rows.first, rows.split
        self.like, self.batch_size, self.merged = rows.like.double(), rows.batch_size, rows.merged
        self.resident = rows.resident  # type: ignore[misc]

    def chunks(self, size: int) -> Iterator[Chunk]:
        for rows, x, y in self.rows.chunks(size):
            yield Chunk(rows, _converted(x), _converted(y))

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.rows.batches(size, seed, epoch):
            yield _converted(x), _converted(y)

    def parted(self, held: int, seed: int) -> NoReturn:
        raise NotImplementedError("rows are parted before they are converted")

    def _some(self, rows: slice, split: Shards) -> AbstractRows:
        return _InDouble(self.rows._some(rows, split))


def _converted(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values
