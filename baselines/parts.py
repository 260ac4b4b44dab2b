"""A method in slices of time: an epoch is too long a step where a target may be reached within one."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any, final

from torch import Tensor

from torch_admm import AbstractMethod, Problem
from torch_admm.problem import Weights

__all__ = ["RARER", "InParts"]

EVERY, RARER = 0.01, 0.05  # a slice takes so many seconds, later such a share of the time so far


@final
class InParts(AbstractMethod):
    """Another method, whose step ends as soon as its slice of time is over and goes on there at the next call.

    What is learnt is the same, to the bit; only `fit` gets to look more often. Mini-batch methods are cut between two
    batches, full-batch methods between two sweeps. `measures` gives the epochs so far, sweeps for full-batch methods.
    """

    def __init__(self, method: AbstractMethod, rows: Any, rarer: float = RARER) -> None:
        """Train on `rows`, whatever rows `fit` has: its own may then be a sample, cheap to evaluate so often."""
        self.method, self.loss, self.rows, self.rarer = method, method.loss, _RowsInParts(rows), rarer
        self.seconds, self.sweeps = 0.0, 0

    def init(self, problem: Problem, rows: Any, *, batch_size: int | None, seed: int) -> None:
        in_parts: Any = self.rows
        self.method.init(problem, in_parts, batch_size=batch_size, seed=seed)

    def step(self) -> None:
        begin = perf_counter()
        self.rows.end = begin + max(EVERY, self.rarer * self.seconds)
        self._sweep()
        while perf_counter() < self.rows.end:
            self._sweep()
        self.seconds += perf_counter() - begin

    def _sweep(self) -> None:
        self.method.step()
        self.sweeps += 1

    def weights(self) -> Weights:
        return self.method.weights()

    def measures(self) -> dict[str, float]:
        epochs = self.rows.handed_out / self.rows.count  # by batches; full-batch methods take chunks
        return {**self.method.measures(), "epochs": epochs or float(self.sweeps)}

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("a method in slices of time cannot be saved: where it stops depends on the machine")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("a method in slices of time cannot be loaded: where it stops depends on the machine")


@final
class _RowsInParts:
    """Rows of any kind, whose mini-batches run on from epoch to epoch, and pause where time is up."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self.count: int = rows.count
        self.handed_out = 0
        self.end = 0.0
        self._running: Iterator[tuple[Tensor, Tensor]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`epoch` is left aside: the method counts slices there."""
        if self._running is None:
            self._running = self._endless(size, seed)
        for batch in self._running:
            self.handed_out += len(batch[0])
            yield batch
            if perf_counter() >= self.end:
                return

    def _endless(self, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            yield from self._rows.batches(size, seed, epoch)
            epoch += 1
