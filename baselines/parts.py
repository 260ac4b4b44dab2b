"""A method in slices of time: an epoch is too long a step where a target may be reached within one."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from torch_admm import AbstractMethod, Problem
from torch_admm.comm import AbstractComm
from torch_admm.precision import suited
from torch_admm.problem import Weights

__all__ = ["RARER", "InParts"]

T = TypeVar("T")

EVERY, RARER = 0.005, 0.05  # a slice takes so many seconds, later such a share of the time so far


@final
class InParts(AbstractMethod):
    """Another method, whose step ends as soon as its slice of time is over and goes on there at the next call.

    What is learnt is the same, to the bit; only `fit` gets to look more often. Mini-batch methods are cut between two
    batches, full-batch methods between two sweeps. `measures` gives the epochs so far, sweeps for full-batch methods.
    """

    def __init__(self, method: AbstractMethod, rows: Any, rarer: float = RARER) -> None:
        """Train on `rows`, whatever rows `fit` has: its own may then be a sample, cheap to evaluate so often."""
        self.method, self.loss, self.all_rows, self.rarer = method, method.loss, rows, rarer
        self.seconds, self.sweeps = 0.0, 0

    def init(self, problem: Problem, rows: Any, *, batch_size: int | None, seed: int) -> None:
        self.slice: AbstractSlice = SliceOfTime() if self.comm.size == 1 else SliceTogether(self.comm)
        self.method.comm = self.comm
        mine = self.method.part(problem, self.all_rows, batch_size)
        problem, mine = suited(problem, mine, self.method.is_little(problem, mine, batch_size))  # as `fit` does
        self.rows = _RowsInParts(mine, self.slice)
        in_parts: Any = self.rows
        self.method.init(problem, in_parts, batch_size=batch_size, seed=seed)

    def step(self) -> None:
        begin = perf_counter()
        self.slice.begin(max(EVERY, self.rarer * self.seconds))
        while True:
            handed_out = self.rows.batches_out
            self.method.step()
            self.sweeps += 1
            if self.rows.batches_out > handed_out or self.slice.over():  # batches end where the slice does
                break
        self.seconds += perf_counter() - begin

    def weights(self) -> Weights:
        return self.method.weights()

    def measures(self) -> dict[str, float]:
        epochs = self.rows.handed_out / max(1, self.rows.count)  # by batches; full-batch methods take chunks
        return {**self.method.measures(), "epochs": epochs or float(self.sweeps)}

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("a method in slices of time cannot be saved: where it stops depends on the machine")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("a method in slices of time cannot be loaded: where it stops depends on the machine")


class AbstractSlice(abc.ABC):
    """Says when a slice of time is over. It is asked after each batch, or sweep over all rows."""

    @abc.abstractmethod
    def begin(self, seconds: float) -> None:
        """One of about so many seconds begins."""

    @abc.abstractmethod
    def over(self) -> bool:
        """Another batch has been worked on."""


@final
class SliceOfTime(AbstractSlice):
    """By the clock."""

    end = 0.0

    def begin(self, seconds: float) -> None:
        self.end = perf_counter() + seconds

    def over(self) -> bool:
        return perf_counter() >= self.end


@final
class SliceTogether(AbstractSlice):
    """By a number of batches, so that no rank waits for a batch of one that has gone to evaluate: rank 0 says which."""

    def __init__(self, comm: AbstractComm) -> None:
        self.comm, self.taken, self.left = comm, 0, 0
        self.since, self.spent = 0.0, 0.0

    def begin(self, seconds: float) -> None:
        count = max(1, round(seconds * self.taken / self.spent)) if self.spent else 1
        self.left = int(self.comm.from_first_(torch.tensor([count])))
        self.since = perf_counter()

    def over(self) -> bool:
        self.taken, self.left = self.taken + 1, self.left - 1
        if not self.left:
            self.spent += perf_counter() - self.since
        return not self.left


@final
class _RowsInParts:
    """Rows of any kind, whose mini-batches run on from epoch to epoch, and pause where time is up."""

    def __init__(self, rows: Any, slice_: AbstractSlice) -> None:
        self._rows, self._slice = rows, slice_
        self.count: int = rows.count
        self.handed_out, self.batches_out, self.counts_out = 0, 0, 0
        self._running: Iterator[tuple[Tensor, Tensor]] | None = None
        self._counting: Iterator[list[int]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`epoch` is left aside: the method counts slices there."""
        if self._running is None:
            self._running = _endless(self._rows.batches, size, seed)
        for batch in self._running:
            self.handed_out += len(batch[0])
            self.batches_out += 1
            yield batch
            if self._slice.over():
                return

    def batch_counts(self, size: int, seed: int, epoch: int) -> Iterator[list[int]]:
        """Of the batches handed out, each time up to the last of them."""
        if self._counting is None:
            self._counting = _endless(self._rows.batch_counts, size, seed)
        while self.counts_out < self.batches_out:
            self.counts_out += 1
            yield next(self._counting)


def _endless(parts: Callable[[int, int, int], Iterator[T]], size: int, seed: int) -> Iterator[T]:
    """Epoch after epoch."""
    for epoch in itertools.count():
        yield from parts(size, seed, epoch)
