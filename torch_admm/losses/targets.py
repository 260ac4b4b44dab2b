"""Targets in, scores out: the checks, encodings and metrics that the loss families share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "accuracy",
    "binary_labels",
    "class_labels",
    "class_weights",
    "columns",
    "like_z",
    "newton_steps",
    "one_hot",
    "r2",
    "require_classes",
    "unit_interval",
]


# --- from the user's y to what a loss takes; every refusal names y, what came and what is expected


def columns(y: Tensor, outputs: int, like: Tensor) -> Tensor:
    """Finite real targets as (rows, outputs), in the dtype and device of `like`."""
    _require_real(y)
    one = outputs == 1
    if tuple(y.shape[1:]) != (outputs,) and not (one and y.ndim == 1):
        expected = "(rows,) or (rows, 1) for one output" if one else f"(rows, {outputs}) for {outputs} outputs"
        raise ValueError(f"y has shape {tuple(y.shape)}, expected {expected}")
    cast = y.to(like)  # checked after the cast: a float64 value may overflow in float32
    if not _within(cast, -torch.finfo(like.dtype).max, torch.finfo(like.dtype).max):
        _refuse(~torch.isfinite(cast), y, f"targets must be finite in {like.dtype}")
    return cast.reshape(len(y), outputs)


def binary_labels(y: Tensor, outputs: int, like: Tensor) -> Tensor:
    """Labels 0 and 1 (bool, integer, or whole floating numbers) as (rows, outputs)."""
    cast = columns(y, outputs, like)
    wide = _comparable(y)
    if y.numel() and bool(((wide == -1) | (wide == 1)).all()) and bool((wide == -1).any()):
        raise ValueError("y holds labels -1 and +1: map them to 0 and 1, e.g. y = (y + 1) / 2")
    _refuse((wide != 0) & (wide != 1), y, "expected labels 0 and 1")
    return cast


def unit_interval(y: Tensor, outputs: int, like: Tensor) -> Tensor:
    """Labels or probabilities in [0, 1] as (rows, outputs)."""
    cast = columns(y, outputs, like)
    if not _within(y, 0, 1):
        wide = _comparable(y)
        hint = "expected labels or probabilities between 0 and 1 (map labels -1 and +1 to 0 and 1)"
        _refuse((wide < 0) | (wide > 1), y, hint)
    return cast


def class_labels(y: Tensor, outputs: int, like: Tensor) -> Tensor:
    """Integer labels 0 .. outputs-1 as int64 (rows,): one-hot rows are made per call, from chunks."""
    _require_real(y)
    require_classes(outputs)
    if y.is_floating_point() or y.dtype == torch.bool:
        raise ValueError(f"y has dtype {y.dtype}, expected integer class labels, e.g. y.long()")
    if y.ndim != 1:
        raise ValueError(f"y has shape {tuple(y.shape)}, expected (rows,) for class labels")
    labels = y.to(torch.int64)
    if not _within(labels, 0, outputs - 1):
        _refuse((labels < 0) | (labels >= outputs), y, f"expected class labels 0..{outputs - 1}")
    return labels.to(like.device)


def _require_real(y: Tensor) -> None:
    if y.is_complex():
        raise ValueError(f"y has dtype {y.dtype}, expected real targets")


def require_classes(outputs: int) -> None:
    if outputs == 1:
        raise ValueError(
            "y holds class labels but the net has one output: use the loss 'hinge' or 'logistic', "
            "or give the net as many outputs as classes"
        )


def _comparable(y: Tensor) -> Tensor:
    """Bool and the small unsigned types lack some comparisons; int64 has them all."""
    return y if y.is_floating_point() else y.to(torch.int64)


def _within(values: Tensor, least: float, most: float) -> bool:
    """Are all values from `least` to `most`, and none NaN? One pass: every mini-batch of a user's loop is checked."""
    low, high = torch.aminmax(values) if values.numel() else (least, most)
    return least <= float(low) and float(high) <= most


def _refuse(bad: Tensor, y: Tensor, expected: str) -> None:
    """Name the first offending entry, row index first."""
    if bool(bad.any()):
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"y[{', '.join(map(str, at))}] is {y[at].item()}: {expected}")


# --- what __call__ and prox share


def one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """(rows, outputs) zeros and ones; unlike torch's one_hot it never looks at the values."""
    return torch.zeros_like(like).scatter_(1, labels.unsqueeze(1), 1)


def like_z(values: tuple[float, ...], z: Tensor) -> Tensor:
    """A setting as a tensor beside z; non_blocking, so that a GPU is not waited for."""
    return torch.tensor(values, dtype=z.dtype).to(z.device, non_blocking=True)


def class_weights(values: Tensor | Sequence[float] | float | None, name: str) -> tuple[float, ...] | None:
    """One finite number >= 0 per output, as plain floats: comparable, and at home on any device."""
    if values is None:
        return None
    row = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    if row.numel() == 0 or row.numel() != (row.shape or (1,))[-1]:
        raise ValueError(f"{name} has shape {tuple(row.shape)}, expected one number per output")
    weights = tuple(map(float, row.flatten()))
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"{name} is {weights}, expected finite numbers >= 0 (the loss must stay convex)")
    return weights


def newton_steps(c: float, dtype: torch.dtype) -> int:
    """How many Newton steps reach rounding level when the loss outweighs the penalty by c.

    Measured over c in 0.05 .. 5e4 (cross-entropy with 2 .. 1000 classes, logistic), plus one to spare.
    """
    return (4 if dtype == torch.float64 else 2) + math.ceil(math.log2(1 + c))


# --- metrics


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """The share of equal entries; nan when there are none to compare."""
    return int((predicted == labels).sum()) / labels.numel() if labels.numel() else math.nan


def r2(z: Tensor, y: Tensor) -> float:
    """1 - residual / total sum of squares, mean over outputs; a constant column counts 1 if hit, else 0.

    In float64: the best of many rows of a history would else be a matter of rounding.
    """
    z, y = z.double(), y.double()
    residual = (z - y).square().sum(0)
    total = (y - y.mean(0)).square().sum(0)
    constant = (residual == 0).to(z.dtype)
    return float(torch.where(total == 0, constant, 1 - residual / total).mean())
