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

        Its derivative vanishes where, with the logistic function sigma,

            k (z - b) + sigma(z) = 0,      k = 2 beta / s,      b = v + q / (2 beta)
        """
        if self.pos_weight is not None:
            w = like_z(self.pos_weight, v)
            k, b = 2 * beta / ((w - 1) * y + 1), torch.add(v, w * y, alpha=1 / (2 * beta))
            return _newton(_from_outside(b, k), b, k, newton_steps(max(1.0, *self.pos_weight) / (2 * beta), v.dtype))
        b = torch.add(v, y, alpha=1 / (2 * beta))
        if beta >= 1:
            return _by_repeating(v, b, 2 * beta)
        k = v.new_full((), 2 * beta)
        return _newton(_from_outside(b, k), b, k, newton_steps(1 / (2 * beta), v.dtype))

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


def _newton(z: Tensor, b: Tensor, k: Tensor, steps: int) -> Tensor:
    """After so many Newton steps on k (z - b) + sigma(z) = 0."""
    for _ in range(steps):
        p = torch.sigmoid(z)
        z = torch.addcdiv(z, torch.addcmul(p, z - b, k), torch.addcmul(p, p, p, value=-1).add_(k), value=-1)
    return z


def _from_outside(b: Tensor, k: Tensor) -> Tensor:
    """A start from which Newton's method needs no safeguard.

    With c = b - 1 / (2 k), the equation is z + (sigma(z) - 1/2) / k = c. Its left side is odd, increasing and concave
    for z > 0, and |z| >= |c| - 1 / (2 k). From there (or from 0, if that is further out) Newton's method moves away
    from 0 and never passes the root.
    """
    reach = 0.5 / k
    c = b - reach
    return c - torch.minimum(torch.maximum(c, -reach), reach)


def _by_repeating(v: Tensor, b: Tensor, k: float) -> Tensor:
    """For k >= 2, in few operations: z <- b - sigma(z) / k, twice from z = v, then Newton's method.

    The first leaves an error of at most max p (1 - p)^2 / k^2 < 0.0371, since v is (1 - p) / k away for p = sigma of
    the answer, the second an eighth of that. A Newton step takes an error e to at most e^2 / 41: below 6e-7 after one,
    which is little more than float32 resolves, 1e-14 after two, which rounding hides in float64. Where z came from a
    repetition, k (z - b) is minus the sigma that it was made of.
    """
    before = torch.add(b, torch.sigmoid(v), alpha=-1 / k).sigmoid_()
    z = torch.add(b, before, alpha=-1 / k)
    p = torch.sigmoid(z)
    z.addcdiv_(p - before, torch.addcmul(p, p, p, value=-1).add_(k), value=-1)
    return _newton(z, b, v.new_full((), k), 1) if v.dtype == torch.float64 else z
