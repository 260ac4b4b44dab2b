"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any, final

import torch

from torch_admm.arguments import fraction, non_negative, positive

from .arguments import switch
from .minibatch import AbstractMiniBatchMethod

__all__ = ["SGD"]


@final
class SGD(AbstractMiniBatchMethod):
    """torch.optim.SGD with momentum on shuffled mini-batches; a sweep is an epoch."""

    def __init__(
        self,
        loss: Any,
        *,
        lr: float = 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        batch_size: int = 128,
        average: bool = False,
    ) -> None:
        """`batch_size` is used unless `fit` is given one; `average` trains the same and gives averaged weights."""
        super().__init__(loss, batch_size=batch_size, average=average)
        self.lr, self.momentum = positive("lr", lr), fraction("momentum", momentum)
        self.nesterov, self.weight_decay = switch("nesterov", nesterov), non_negative("weight_decay", weight_decay)
        if self.nesterov and not self.momentum:
            raise ValueError(f"momentum is {momentum!r}; a number above 0 is expected with nesterov=True")

    def build(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.model.parameters(),
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=self.can_fuse,
        )
