"""The paper's hinge: max(1 - z, 0) for label 1 and max(z, 0) for label 0, for one output and one-vs-rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from .base import AbstractLoss
from .targets import accuracy, binary_labels, class_labels, one_hot

__all__ = ["Hinge", "OneVsRestHinge"]


def hinge(z: Tensor, y: Tensor) -> Tensor:
    """max(1 - z, 0) where y = 1, max(z, 0) where y = 0; entry by entry."""
    return torch.addcmul(y, 1 - 2 * y, z).clamp_min_(0)


def hinge_prox(v: Tensor, y: Tensor, beta: float) -> Tensor:
    """argmin_z hinge(z, y) + beta (z - v)^2, entry by entry.

    The hinge pulls z towards its kink, which lies at y, by at most k = 1/(2 beta) and never past it:
    the median of (v, y, v + k) for label 1 and of (v - k, y, v) for label 0. So v beyond the kink and
    the kink itself come back exactly, bit for bit.
    """
    k = 1 / (2 * beta)
    high = torch.add(v, y, alpha=k)
    low = torch.add(v, y - 1, alpha=k)
    return torch.minimum(torch.maximum(low, y), high)


@final
@dataclass(frozen=True)
class Hinge(AbstractLoss):
    """Binary hinge of the paper (section on implementation), labels 0 and 1; one output, threshold 1/2."""

    name: ClassVar[str] = "hinge"
    exact: ClassVar[bool] = True
    metric: ClassVar[str] = "accuracy"

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return hinge(z, y).sum(1)

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """argmin_z hinge(z, y) + beta (z - v)^2, entry by entry; exact."""
        return hinge_prox(v, y, beta)

    def encode(self, y: Tensor, outputs: int, like: Tensor) -> Tensor:
        if outputs != 1:
            raise ValueError(
                f"the loss 'hinge' takes one output but the net has {outputs}: "
                "for class labels y use the loss 'one_vs_rest_hinge'"
            )
        return binary_labels(y, outputs, like)

    def predict(self, z: Tensor) -> Tensor:
        return (z.select(1, 0) > 0.5).long()

    def score(self, z: Tensor, y: Tensor) -> float:
        return accuracy(self.predict(z), y.select(1, 0))


@final
@dataclass(frozen=True)
class OneVsRestHinge(AbstractLoss):
    """One binary hinge per class on one-hot labels; y holds class indices, the largest output wins."""

    name: ClassVar[str] = "one_vs_rest_hinge"
    exact: ClassVar[bool] = True
    metric: ClassVar[str] = "accuracy"

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return hinge(z, one_hot(y, z)).sum(1)

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """argmin_z sum_k hinge(z_k, [y = k]) + beta ||z - v||^2; exact."""
        return hinge_prox(v, one_hot(y, v), beta)

    def encode(self, y: Tensor, outputs: int, like: Tensor) -> Tensor:
        return class_labels(y, outputs, like)

    def predict(self, z: Tensor) -> Tensor:
        return z.argmax(1)

    def score(self, z: Tensor, y: Tensor) -> float:
        return accuracy(self.predict(z), y)
