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

        Since sigmoid(z) = (1 + tanh(z/2)) / 2, its derivative vanishes where, with u = z / 2,

            g(u) = u + c tanh(u) = b,      c = s / (8 beta),      b = v / 2 + (2 q - s) / (8 beta)
        """
        if self.pos_weight is not None:
            w = like_z(self.pos_weight, v)
            c, b = ((w - 1) * y + 1) / (8 * beta), v / 2 + ((w + 1) * y - 1) / (8 * beta)
            return self._newton(
                _from_outside(b, c), b, c, newton_steps(max(1.0, *self.pos_weight) / (2 * beta), v.dtype)
            )
        b = torch.add(v / 2, y - 0.5, alpha=1 / (4 * beta))
        c = b.new_full((), 1 / (8 * beta))
        if beta < 1:
            return self._newton(_from_outside(b, c), b, c, newton_steps(1 / (2 * beta), v.dtype))
        return self._newton(_by_repeating(b, 1 / (8 * beta)), b, c, 2 if v.dtype == torch.float64 else 1)

    @staticmethod
    def _newton(u: Tensor, b: Tensor, c: Tensor, steps: int) -> Tensor:
        """z = 2 u after so many Newton steps on u + c tanh(u) = b."""
        top = c + 1
        for _ in range(steps):
            t = torch.tanh(u)
            ct = c * t
            u = torch.addcdiv(u, (u - b).add_(ct), torch.addcmul(top, ct, t, value=-1), value=-1)
        return u.add_(u)

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


def _from_outside(b: Tensor, c: Tensor) -> Tensor:
    """A start from which Newton's method needs no safeguard.

    g is odd, increasing and concave for u > 0, and |u| >= |b| - c. From there (or from 0, if that is further out)
    Newton's method moves away from 0 and never passes the root.
    """
    return b - torch.minimum(torch.maximum(b, -c), c)


def _by_repeating(b: Tensor, c: float) -> Tensor:
    """A start for c <= 1/8: u <- b - c tanh(u), three times from u = b, leaves an error of at most c^4 < 2.5e-4.

    A Newton step takes an error e to c max|tanh''| / 2 e^2 < e^2 / 20 at most: below 4e-9 after one, 1e-18 after two.
    """
    u = b
    for _ in range(3):
        u = torch.add(b, torch.tanh(u), alpha=-c)
    return u
