"""What the full-batch methods share: loss and gradient over all rows, as a closure for an optimiser with a search."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_admm import Problem
from torch_admm.data import AbstractRows

from .gradient import AbstractGradientMethod

__all__ = ["AbstractFullBatchMethod"]

CHUNK_ROWS = 16_384  # rows of one forward and backward pass in a full-batch gradient: bounds the memory


class AbstractFullBatchMethod(AbstractGradientMethod):
    """One iteration of an optimiser, with its line search over all rows, a sweep."""

    def init(self, problem: Problem, rows: AbstractRows, *, batch_size: int | None, seed: int) -> None:
        if batch_size is not None:
            name = type(self).__name__
            raise ValueError(f"batch_size is {batch_size}, but {name} works on all rows at once; leave it None")
        self._last: tuple[Tensor, float, list[Tensor | None]] | None = None
        super().init(problem, rows, batch_size=batch_size, seed=seed)

    def step(self) -> None:
        self.optimiser.step(self._closure)
        self.epoch += 1

    def _closure(self) -> float:
        """The mean loss, with its gradient left in the parameters.

        An optimiser evaluates once more where its last step ended; that evaluation is remembered, not repeated.
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
        total = torch.zeros((), dtype=torch.float64, device=self.rows.like.device)
        for _, x, y in self.rows.chunks(CHUNK_ROWS):
            part: Tensor = self.loss(self.model(x), y).sum() / self.rows.count
            part.backward()
            total += part.detach()
        return float(total)
