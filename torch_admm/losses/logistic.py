"""Logistic loss of labels 0 and 1 (or probabilities between), one output or several labels at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from .base import AbstractLoss, Prox
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
        if beta >= 1:
            return self.prepared(beta, v)(v, y)
        k, b = v.new_full((), 2 * beta), torch.add(v, y, alpha=1 / (2 * beta))
        return _newton(_from_outside(b, k), b, k, newton_steps(1 / (2 * beta), v.dtype))

    def prepared(self, beta: float, like: Tensor) -> Prox:
        return _FromNear(2 * beta, like) if self.pos_weight is None and beta >= 1 else super().prepared(beta, like)

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


@final
class _FromNear:
    """The prox for k >= 2, in few operations: a start that is close, then Newton's method.

    With c = b - 1 / (2 k) as above, z / c goes from B = 1 / (1 + 1 / (4 k)) at 0 to 1 where sigma is flat, so that
    z = b - sigma(B c) / k is within 3.4e-3 of the answer. A Newton step takes an error e to at most e^2 / 41: below
    3e-7 after one, which float32 hardly resolves, 3e-15 after two. In the first, k (z - b) is minus that sigma.
    """

    def __init__(self, k: float, like: Tensor) -> None:
        self.per_k, self.B = 1 / k, 1 / (1 + 1 / (4 * k))
        self.shift, self.k = like.new_full((), -0.5 * self.B / k), like.new_full((), k)  # adding a number takes longer

    def __call__(self, v: Tensor, y: Tensor) -> Tensor:
        b = torch.add(v, y, alpha=self.per_k)
        before = torch.add(self.shift, b, alpha=self.B).sigmoid_()
        z = torch.add(b, before, alpha=-self.per_k)
        p = torch.sigmoid(z)
        slope = torch.addcmul(p, p, p, value=-1).add_(self.k)
        z.addcdiv_(p.sub_(before), slope, value=-1)
        return _newton(z, b, self.k, 1) if z.dtype == torch.float64 else z
