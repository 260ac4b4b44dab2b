"""What the mini-batch methods share: the loop over shuffled batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_admm.arguments import positive_int

from .gradient import AbstractGradientMethod

__all__ = ["AbstractMiniBatchMethod"]


class AbstractMiniBatchMethod(AbstractGradientMethod):
    """One optimiser step a shuffled mini-batch; a sweep is an epoch."""

    def __init__(self, loss: Any, *, batch_size: int, average: bool) -> None:
        """`batch_size` is used unless `fit` is given one."""
        super().__init__(loss, average=average)
        self._batch_size = positive_int("batch_size", batch_size)

    def step(self) -> None:
        for pieces in self.batches(self.batch_size or self._batch_size):
            if self.comm.size == 1 and not self.comm.deterministic:
                self._backward(*pieces[0])
            else:
                self.mean_gradient([[piece] for piece in pieces], self.problem.dtype)
            self.optimiser.step()
            self.updated()
        self.epoch += 1

    def _backward(self, x: Tensor, y: Tensor) -> None:
        """As everybody writes it."""
        self.optimiser.zero_grad()
        self.loss(self.model(x), y).mean().backward()
