"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, final

import torch

from torch_admm.arguments import non_negative, positive

from .arguments import fractions, switch
from .minibatch import AbstractMiniBatchMethod

__all__ = ["Adam"]


@final
class Adam(AbstractMiniBatchMethod):
    """torch.optim.Adam on shuffled mini-batches, or AdamW with `decoupled`; a sweep is an epoch."""

    def __init__(
        self,
        loss: Any,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        decoupled: bool = False,
        batch_size: int = 128,
        average: bool = False,
    ) -> None:
        """`decoupled` shrinks the weights by lr * weight_decay a batch, instead of adding the decay to the gradient.

        `batch_size` is used unless `fit` is given one; `average` trains the same and gives averaged weights.
        """
        super().__init__(loss, batch_size=batch_size, average=average)
        self.lr, self.betas = positive("lr", lr), fractions("betas", betas)
        self.weight_decay, self.decoupled = non_negative("weight_decay", weight_decay), switch("decoupled", decoupled)

    def build(self) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        options = {"lr": self.lr, "betas": self.betas, "weight_decay": self.weight_decay, "fused": self.can_fuse}
        return kind(self.model.parameters(), **options)  # type: ignore[arg-type]
