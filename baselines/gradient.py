"""What all gradient methods share: optimisers of torch as methods of `torch_admm.fit`, from the same start and data."""

from __future__ import annotations

import abc
import copy
from typing import Any

import torch

from torch_admm import AbstractMethod, Problem, from_module, loss_of
from torch_admm.comm import pack, unpack
from torch_admm.data import AbstractRows
from torch_admm.problem import Weights

from .arguments import switch

__all__ = ["AbstractGradientMethod"]

# torch loads its compiler when the first optimiser is built, more than a second that belongs on nobody's clock
torch.optim.SGD([torch.zeros(1)], lr=1.0)

FUSED_ON = ("cpu", "cuda")
LONGEST_MEMORY = 0.99  # what the average keeps of itself at most: it then looks back over about a hundred updates


class AbstractGradientMethod(AbstractMethod):
    """Trains a private copy of the model with a torch optimiser; `fit` writes its weights into the user's.

    With `average`, `weights()` gives an exponential average of the parameters in place of the last ones. After the
    k-th update it keeps min(0.99, (1 + k) / (10 + k)) of itself: a short memory while the weights still move far.
    With several ranks each has its own rows of a batch, and gradients are summed: all take the same steps.
    """

    optimiser: torch.optim.Optimizer

    def __init__(self, loss: Any, *, average: bool) -> None:
        """`average` trains the same and gives averaged weights."""
        self.loss = loss_of(loss)
        self.average = switch("average", average)

    def init(self, problem: Problem, rows: AbstractRows, *, batch_size: int | None, seed: int) -> None:
        """Start from the model's own weights."""
        self.model = copy.deepcopy(problem.model).requires_grad_(True)
        self.problem = from_module(self.model, problem.loss)
        self.rows, self.seed, self.epoch, self.updates = rows, seed, 0, 0
        self.batch_size = batch_size
        self.optimiser = self.build()
        self.averaged = from_module(copy.deepcopy(self.model), self.loss) if self.average else self.problem

    @abc.abstractmethod
    def build(self) -> torch.optim.Optimizer:
        """The torch optimiser of `self.model`."""

    @property
    def can_fuse(self) -> bool:
        """Has torch its one-kernel step for these parameters? It is the fastest, and what a rival deserves."""
        return self.problem.device.type in FUSED_ON

    def add_up(self, number: float) -> float:
        """Sum the gradients over ranks, and a number with them: one message for all."""
        if self.comm.size == 1:
            return number
        parameters = list(self.model.parameters())
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        mine.append(torch.tensor([number], dtype=self.problem.dtype, device=self.problem.device))
        *gradients, total = unpack(self.comm.sum_(pack(mine, self.problem.dtype)), mine)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        return float(total)

    def updated(self) -> None:
        """To be called after each update of the parameters."""
        self.updates += 1
        if self.average:
            self._update_average()

    @torch.no_grad()
    def _update_average(self) -> None:
        """Not by torch's AveragedModel: it leaves out the start and waits for the device at every batch."""
        keep = min(LONGEST_MEMORY, (1 + self.updates) / (10 + self.updates))
        mean, last = self.averaged.model, self.model
        torch._foreach_lerp_(list(mean.parameters()), list(last.parameters()), 1 - keep)

    def weights(self) -> Weights:
        return self.averaged.read()

    def state_dict(self) -> dict[str, Any]:
        average = {"average": self.averaged.model.state_dict()} if self.average else {}
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "epoch": self.epoch,
            "updates": self.updates,
            **average,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.average and "average" not in state:
            raise ValueError(f"state has no 'average'; one of {type(self).__name__} with average=True is expected")
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))  # torch would go on writing into `state`
        self.epoch, self.updates = int(state["epoch"]), int(state["updates"])
        if self.average:
            self.averaged.model.load_state_dict(state["average"])
