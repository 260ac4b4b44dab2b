"""SGD and L-BFGS of torch.optim as methods of `torch_admm.fit`: same loss, data, starting weights and evaluation."""

from __future__ import annotations

import abc
import copy
from typing import Any, final

import torch
from torch import Tensor

from torch_admm import AbstractMethod, Problem, from_module, loss_of
from torch_admm.arguments import positive, positive_int
from torch_admm.data import Rows
from torch_admm.problem import Weights

__all__ = ["LBFGS", "SGD", "AbstractGradientMethod"]

# torch loads its compiler when the first optimiser is built, more than a second that belongs on nobody's clock
torch.optim.SGD([torch.zeros(1)], lr=1.0)

CHUNK_ROWS = 16_384  # rows of one forward and backward pass in a full-batch gradient: bounds the memory


class AbstractGradientMethod(AbstractMethod):
    """Trains a private copy of the model with a torch optimiser; `fit` writes its weights into the user's."""

    optimiser: torch.optim.Optimizer

    def init(self, problem: Problem, rows: Rows, *, batch_size: int | None, seed: int) -> None:
        """Start from the model's own weights."""
        self.model = copy.deepcopy(problem.model).requires_grad_(True)
        self.problem = from_module(self.model, problem.loss)
        self.rows, self.seed, self.epoch = rows, seed, 0
        self.batch_size = batch_size
        self.optimiser = self.build()

    @abc.abstractmethod
    def build(self) -> torch.optim.Optimizer:
        """The torch optimiser of `self.model`."""

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
        self.optimiser.load_state_dict(state["optimiser"])
        self.epoch = int(state["epoch"])


@final
class SGD(AbstractGradientMethod):
    """torch.optim.SGD with momentum on shuffled mini-batches; a sweep is an epoch."""

    def __init__(self, loss: Any, *, lr: float = 0.1, momentum: float = 0.9, batch_size: int = 128) -> None:
        """`batch_size` is used unless `fit` is given one."""
        self.loss = loss_of(loss)
        self.lr, self.momentum = positive("lr", lr), momentum
        self.default_batch = positive_int("batch_size", batch_size)

    def build(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=self.momentum)

    def step(self) -> None:
        size = self.batch_size or self.default_batch
        for x, y in self.rows.batches(size, self.seed, self.epoch):
            self.optimiser.zero_grad()
            loss = self.loss(self.model(x), y).mean()
            loss.backward()
            self.optimiser.step()
        self.epoch += 1


@final
class LBFGS(AbstractGradientMethod):
    """torch.optim.LBFGS with a strong Wolfe search on all rows; a sweep is one iteration with its line search."""

    def __init__(self, loss: Any, *, history_size: int = 20) -> None:
        """`history_size` curvature pairs are kept."""
        self.loss = loss_of(loss)
        self.history_size = positive_int("history_size", history_size)

    def build(self) -> torch.optim.Optimizer:
        if self.batch_size is not None:
            raise ValueError(f"batch_size is {self.batch_size}, but LBFGS works on all rows at once; leave it None")
        self._last: tuple[Tensor, float, list[Tensor | None]] | None = None
        return torch.optim.LBFGS(
            self.model.parameters(),
            max_iter=1,
            max_eval=26,  # torch takes the evaluations of the line search from here; its default leaves none
            history_size=self.history_size,
            line_search_fn="strong_wolfe",
        )

    def step(self) -> None:
        self.optimiser.step(self._closure)
        self.epoch += 1

    def _closure(self) -> float:
        """The mean loss, with its gradient left in the parameters.

        torch evaluates once more where its last step ended; that evaluation is remembered, not repeated.
        """
        at = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
        if self._last is None or not torch.equal(self._last[0], at):
            self._last = at.clone(), self._evaluate(), [p.grad for p in self.model.parameters()]
        for p, gradient in zip(self.model.parameters(), self._last[2], strict=True):
            p.grad = gradient
        return self._last[1]

    def _evaluate(self) -> float:
        """Loss and gradient over all rows, chunk by chunk."""
        self.optimiser.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.rows.x.device)
        for _, x, y in self.rows.chunks(CHUNK_ROWS):
            part: Tensor = self.loss(self.model(x), y).sum() / self.rows.count
            part.backward()
            total += part.detach()
        return float(total)
