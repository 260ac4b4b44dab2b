"""Logistic loss of labels 0 and 1 (or probabilities between), one output or several labels at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from .base import AbstractLoss
from .targets import accuracy, class_weights, like_z, newton_steps, unit_interval

__all__ = ["Logistic"]


@final
@dataclass(frozen=True, init=False)
class Logistic(AbstractLoss):
    """softplus(z) - y z, with `pos_weight` w: (1 + (w - 1) y) softplus(z) - w y z; summed over outputs.

    The value of nn.BCEWithLogitsLoss. Accuracy is per entry; soft labels count as 1 above 1/2.
    """

    pos_weight: tuple[float, ...] | None

    name: ClassVar[str] = "logistic"
    exact: ClassVar[bool] = False
    metric: ClassVar[str] = "accuracy"

    def __init__(self, pos_weight: Tensor | Sequence[float] | float | None = None) -> None:
        object.__setattr__(self, "pos_weight", class_weights(pos_weight, "pos_weight"))

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        weight = None if self.pos_weight is None else like_z(self.pos_weight, z)
        return functional.binary_cross_entropy_with_logits(z, y, pos_weight=weight, reduction="none").sum(1)

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """argmin_z s softplus(z) - q z + beta (z - v)^2, entry by entry, with s = 1 + (w - 1) y and q = w y.

        Since sigmoid(z) = (1 + tanh(z/2)) / 2, its derivative vanishes where

            g(z) = z + h tanh(z/2) = b,      h = s / (4 beta),      b = v + (2 q - s) / (4 beta)

        g is odd, increasing and concave for z > 0, and |z| >= |b| - h. Newton's method from there (or from 0,
        if that is further out) moves away from 0 and never passes the root: no further safeguard is needed.
        """
        w: Tensor | float = 1.0 if self.pos_weight is None else like_z(self.pos_weight, v)
        h = ((w - 1) * y + 1) / (4 * beta)
        b = v + ((w + 1) * y - 1) / (4 * beta)
        z = b - torch.minimum(torch.maximum(b, -h), h)
        largest = max(1.0, *(self.pos_weight or (1.0,))) / (2 * beta)
        for _ in range(newton_steps(largest, v.dtype)):
            t = torch.tanh(z / 2)
            z = z + (b - z - h * t) / (1 + h / 2 * (1 - t * t))
        return z

    def encode(self, y: Tensor, outputs: int, like: Tensor) -> Tensor:
        if self.pos_weight is not None and len(self.pos_weight) not in (1, outputs):
            raise ValueError(f"pos_weight has {len(self.pos_weight)} entries but the net has {outputs} outputs")
        return unit_interval(y, outputs, like)

    def predict(self, z: Tensor) -> Tensor:
        """0 or 1: shape (rows,) for one output, (rows, outputs) for several labels."""
        ones = (z > 0).long()
        return ones.select(1, 0) if z.shape[1] == 1 else ones

    def score(self, z: Tensor, y: Tensor) -> float:
        return accuracy(z > 0, y > 0.5)
