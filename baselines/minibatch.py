"""What the mini-batch methods share: the loop over shuffled batches, and the average of the weights."""

from __future__ import annotations

import copy
from typing import Any

import torch

from torch_admm import Problem, from_module, loss_of
from torch_admm.arguments import positive_int
from torch_admm.data import AbstractRows
from torch_admm.problem import Weights

from .arguments import switch
from .gradient import AbstractGradientMethod

__all__ = ["AbstractMiniBatchMethod"]

LONGEST_MEMORY = 0.99  # what the average keeps of itself at most: it then looks back over about a hundred batches


class AbstractMiniBatchMethod(AbstractGradientMethod):
    """One optimiser step a shuffled mini-batch; a sweep is an epoch.

    With `average`, `weights()` gives an exponential average of the parameters in place of the last ones. After the
    k-th batch it keeps min(0.99, (1 + k) / (10 + k)) of itself: a short memory while the weights still move far.
    """

    def __init__(self, loss: Any, *, batch_size: int, average: bool) -> None:
        """`batch_size` is used unless `fit` is given one."""
        self.loss = loss_of(loss)
        self.default_batch = positive_int("batch_size", batch_size)
        self.average = switch("average", average)

    def init(self, problem: Problem, rows: AbstractRows, *, batch_size: int | None, seed: int) -> None:
        super().init(problem, rows, batch_size=batch_size, seed=seed)
        self.batches = 0
        self.averaged = from_module(copy.deepcopy(self.model), self.loss) if self.average else self.problem

    def step(self) -> None:
        size = self.batch_size or self.default_batch
        for x, y in self.rows.batches(size, self.seed, self.epoch):
            self.optimiser.zero_grad()
            loss = self.loss(self.model(x), y).mean()
            loss.backward()
            self.optimiser.step()
            self.batches += 1
            if self.average:
                self._update_average()
        self.epoch += 1

    @torch.no_grad()
    def _update_average(self) -> None:
        """Not by torch's AveragedModel: it leaves out the start and waits for the device at every batch."""
        keep = min(LONGEST_MEMORY, (1 + self.batches) / (10 + self.batches))
        mean, last = self.averaged.model, self.model
        torch._foreach_lerp_(list(mean.parameters()), list(last.parameters()), 1 - keep)

    def weights(self) -> Weights:
        return self.averaged.read()

    def state_dict(self) -> dict[str, Any]:
        average = {"average": self.averaged.model.state_dict()} if self.average else {}
        return {**super().state_dict(), **average, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.average and "average" not in state:
            raise ValueError(f"state has no 'average'; one of {type(self).__name__} with average=True is expected")
        super().load_state_dict(state)
        if self.average:
            self.averaged.model.load_state_dict(state["average"])
        self.batches = int(state["batches"])
