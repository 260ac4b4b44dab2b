"""What the mini-batch methods share: the loop over shuffled batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_admm.arguments import positive_int

from .gradient import AbstractGradientMethod

__all__ = ["AbstractMiniBatchMethod"]


class AbstractMiniBatchMethod(AbstractGradientMethod):
    """One optimiser step a shuffled mini-batch; a sweep is an epoch."""

    def __init__(self, loss: Any, *, batch_size: int, average: bool) -> None:
        """`batch_size` is used unless `fit` is given one."""
        super().__init__(loss, average=average)
        self.default_batch = positive_int("batch_size", batch_size)

    def step(self) -> None:
        size = self.batch_size or self.default_batch
        for x, y in self.rows.batches(size, self.seed, self.epoch):
            self.optimiser.zero_grad()
            losses = self.loss(self.model(x), y)
            if self.comm.size == 1:
                losses.mean().backward()
            else:
                self._mean_gradient(losses)
            self.optimiser.step()
            self.updated()
        self.epoch += 1

    def _mean_gradient(self, losses: Tensor) -> None:
        """Over the batch of all ranks, of which there may be no row here."""
        losses.sum().backward()
        count = self.add_up(len(losses))
        torch._foreach_div_([p.grad for p in self.model.parameters() if p.grad is not None], count)
