"""What all gradient methods share: optimisers of torch as methods of `torch_admm.fit`, from the same start and data."""

from __future__ import annotations

import abc
import copy
from typing import Any

import torch

from torch_admm import AbstractMethod, Problem, from_module
from torch_admm.data import AbstractRows
from torch_admm.problem import Weights

__all__ = ["AbstractGradientMethod"]

# torch loads its compiler when the first optimiser is built, more than a second that belongs on nobody's clock
torch.optim.SGD([torch.zeros(1)], lr=1.0)

FUSED_ON = ("cpu", "cuda")


class AbstractGradientMethod(AbstractMethod):
    """Trains a private copy of the model with a torch optimiser; `fit` writes its weights into the user's."""

    optimiser: torch.optim.Optimizer

    def init(self, problem: Problem, rows: AbstractRows, *, batch_size: int | None, seed: int) -> None:
        """Start from the model's own weights."""
        self.model = copy.deepcopy(problem.model).requires_grad_(True)
        self.problem = from_module(self.model, problem.loss)
        self.rows, self.seed, self.epoch = rows, seed, 0
        self.batch_size = batch_size
        self.optimiser = self.build()

    @abc.abstractmethod
    def build(self) -> torch.optim.Optimizer:
        """The torch optimiser of `self.model`."""

    @property
    def can_fuse(self) -> bool:
        """Has torch its one-kernel step for these parameters? It is the fastest, and what a rival deserves."""
        return self.problem.device.type in FUSED_ON

    def weights(self) -> Weights:
        return self.problem.read()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "epoch": self.epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))  # torch would go on writing into `state`
        self.epoch = int(state["epoch"])
