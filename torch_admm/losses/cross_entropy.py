"""Softmax cross-entropy of class labels or class probabilities, with torch's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional

from .base import AbstractLoss
from .targets import (
    accuracy,
    class_labels,
    class_weights,
    like_z,
    newton_steps,
    one_hot,
    require_classes,
    unit_interval,
)

__all__ = ["CrossEntropy"]


@final
@dataclass(frozen=True, init=False)
class CrossEntropy(AbstractLoss):
    """s logsumexp(z) - <q, z> for each row: the value of nn.CrossEntropyLoss.

    q = weight * ((1 - label_smoothing) p + label_smoothing / classes) and s = sum(q), where p is the row of
    class probabilities, one-hot for a label.
    """

    label_smoothing: float
    weight: tuple[float, ...] | None

    name: ClassVar[str] = "cross_entropy"
    exact: ClassVar[bool] = False
    metric: ClassVar[str] = "accuracy"

    def __init__(self, label_smoothing: float = 0.0, weight: Tensor | Sequence[float] | float | None = None) -> None:
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing is {label_smoothing}, expected a number between 0 and 1")
        object.__setattr__(self, "label_smoothing", float(label_smoothing))
        object.__setattr__(self, "weight", class_weights(weight, "weight"))

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        weight = None if self.weight is None else like_z(self.weight, z)
        return functional.cross_entropy(z, y, weight, reduction="none", label_smoothing=self.label_smoothing)

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """argmin_z s logsumexp(z) - <q, z> + beta ||z - v||^2, row by row.

        The gradient vanishes where z + c softmax(z) = u, with c = s / (2 beta) and u = v + q / (2 beta).
        """
        q = self._mass(y, v)
        u = torch.add(v, q, alpha=1 / (2 * beta))
        c = q.sum(1, keepdim=True) / (2 * beta)
        # rows of probabilities need not sum to 1 (torch does not ask for it), but each entry is at most 1
        largest = max(self.weight or (1.0,)) * (1 if y.ndim == 1 else v.shape[1]) / (2 * beta)
        if largest <= 0.5:
            return _undamped(u, c)
        steps = newton_steps(largest, v.dtype)
        z = u - c * (torch.softmax(u, 1) if largest <= 2 else _filled(u, c, steps))
        for _ in range(steps):
            d = _direction(z, u, c)
            # not aminmax, which is many times slower than the two reductions on a CPU
            r = (d.amax(1, keepdim=True) - d.amin(1, keepdim=True)).clamp_min_(torch.finfo(d.dtype).tiny)
            z = torch.addcmul(z, d, torch.log1p(r) / r, value=-1)
        return z

    def _mass(self, y: Tensor, z: Tensor) -> Tensor:
        """q, the target weight of each class: (rows, classes) for the rows at hand only."""
        q = one_hot(y, z) if y.ndim == 1 else y
        if self.label_smoothing:
            q = (1 - self.label_smoothing) * q + self.label_smoothing / z.shape[1]
        return q if self.weight is None else q * like_z(self.weight, z)

    def encode(self, y: Tensor, outputs: int, like: Tensor) -> Tensor:
        require_classes(outputs)
        if self.weight is not None and len(self.weight) != outputs:
            raise ValueError(f"weight has {len(self.weight)} entries but the net has {outputs} outputs")
        probabilities = y.is_floating_point() and y.ndim == 2
        return (unit_interval if probabilities else class_labels)(y, outputs, like)

    def predict(self, z: Tensor) -> Tensor:
        return z.argmax(1)

    def score(self, z: Tensor, y: Tensor) -> float:
        return accuracy(self.predict(z), y if y.ndim == 1 else y.argmax(1))


def _direction(z: Tensor, u: Tensor, c: Tensor) -> Tensor:
    """The Newton step on  c logsumexp(z) + ||z - u||^2 / 2,  O(classes) a row; the new z is z minus (a part of) it.

    The Hessian is diag(D) - c p p' with p = softmax(z) and D = 1 + c p. By Sherman-Morrison its inverse needs
    1 - c sum(p^2 / D), which equals sum(p / D) because sum(p) = 1: a sum of positive terms, nothing cancels.
    The part log(1 + r) / r, r the range of the direction d, makes Newton's method descend from anywhere on
    functions whose third derivative along d is at most r times the second, as logsumexp's is
    (Sun and Tran-Dinh, Generalized self-concordant functions, 2019). It tends to 1 with r: a quadratic end.
    """
    p = torch.softmax(z, 1)
    cp = c * p
    D = cp + 1
    residual = (z - u).add_(cp)
    g = p.div_(D)
    t = (g * residual).sum(1, keepdim=True).div_(g.sum(1, keepdim=True))
    return residual.addcmul_(cp, t).div_(D)


def _undamped(u: Tensor, c: Tensor) -> Tensor:
    """The minimiser for c <= 1/2, where z <- u - c softmax(z) contracts and whole Newton steps are safe.

    softmax has slope 1/2 at most, so two repetitions from z = u leave an error of at most c (c / 2)^2 = 1/32. Newton
    takes an error e to c / sqrt(8) e^2 < 0.18 e^2 at most: 2e-4, 6e-9 after two, 6e-18 after three.
    """
    z = u
    for _ in range(2):
        z = torch.addcmul(u, c, torch.softmax(z, 1), value=-1)
    for _ in range(3 if u.dtype == torch.float64 else 2):
        z = z - _direction(z, u, c)
    return z


def _filled(u: Tensor, c: Tensor, steps: int) -> Tensor:
    """A start for p where the loss outweighs the penalty and damped steps from softmax(u) would be many.

    With tau = logsumexp(z) each c p_k is a function of u_k - tau that grows like exp below 0 and linearly
    above, much like softplus. So fill to the level tau where sum_k softplus(u_k - tau) = c. The sum is convex
    and decreasing in tau, and both first levels are too low (one term alone; Jensen), so Newton's method
    climbs monotonically and divides excess times slope by at least 4 a step.
    """
    c = c.clamp_min(torch.finfo(c.dtype).tiny)
    top, mean = u.amax(1, keepdim=True), u.mean(1, keepdim=True)
    tau = torch.maximum(top - _softplus_inverse(c), mean - _softplus_inverse(c / u.shape[1]))
    for _ in range(steps):
        x = u - tau
        excess = functional.softplus(x).sum(1, keepdim=True) - c
        tau = tau + excess / torch.sigmoid(x).sum(1, keepdim=True)
    filled = functional.softplus(u - tau)
    return filled / filled.sum(1, keepdim=True)


def _softplus_inverse(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))
