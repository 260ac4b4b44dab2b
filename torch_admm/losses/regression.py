"""Squared, absolute and Huber error, summed over outputs. The score is r2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from .base import AbstractLoss
from .targets import columns, r2

__all__ = ["L1", "AbstractRegression", "Huber", "Squared"]


class AbstractRegression(AbstractLoss):
    """Real targets y of shape (rows, outputs), or (rows,) for one output; predictions are the outputs."""

    metric: ClassVar[str] = "r2"

    def encode(self, y: Tensor, outputs: int, like: Tensor) -> Tensor:
        return columns(y, outputs, like)

    def predict(self, z: Tensor) -> Tensor:
        return z

    def score(self, z: Tensor, y: Tensor) -> float:
        return r2(z, y)


@final
@dataclass(frozen=True)
class Squared(AbstractRegression):
    """||z - y||^2 for each row, without 1/2."""

    name: ClassVar[str] = "squared"
    exact: ClassVar[bool] = True

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).square_().sum(1)

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """argmin_z ||z - y||^2 + beta ||z - v||^2 = (y + beta v) / (1 + beta)."""
        return torch.add(y, v, alpha=beta).div_(1 + beta)


@final
@dataclass(frozen=True)
class L1(AbstractRegression):
    """||z - y||_1 for each row."""

    name: ClassVar[str] = "l1"
    exact: ClassVar[bool] = True

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).abs_().sum(1)

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """argmin_z |z - y| + beta (z - v)^2, entry by entry: from v towards y, by 1/(2 beta) at most."""
        k = 1 / (2 * beta)
        return torch.minimum(torch.maximum(v - k, y), v + k)


@final
@dataclass(frozen=True)
class Huber(AbstractRegression):
    """d^2 / 2 for |d| = |z - y| <= delta, then delta (|d| - delta / 2): nn.HuberLoss, summed over outputs."""

    delta: float = 1.0

    name: ClassVar[str] = "huber"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.delta < math.inf:
            raise ValueError(f"delta is {self.delta}, expected a finite number > 0")

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return functional.huber_loss(z, y, reduction="none", delta=self.delta).sum(1)

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """argmin_z huber(z - y) + beta (z - v)^2, entry by entry.

        Both pieces in one: the pull (v - y) / (1 + 2 beta) of the square, cut where the slope reaches delta.
        """
        cut = self.delta / (2 * beta)
        return v - ((v - y) / (1 + 2 * beta)).clamp_(-cut, cut)
