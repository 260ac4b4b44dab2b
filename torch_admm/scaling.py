"""Standardised inputs that leave no trace: x is shifted and scaled on the way in, and the first layer takes it back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from .data import AbstractRows

__all__ = ["Scaling", "measured"]

LOOKS, LOOK_ROWS = 16, 4096  # of more rows, so many stretches of so many are looked at
REACH = 10.0  # no value looked at ends up further out: a column that is almost always the same would, by its spread
RAW = 10.0  # columns whose root mean square is beyond this, or all of them below its inverse, are in raw units


@final
class Scaling:
    """u = (x - shift) * scale, and the first weights in either unit: W u + b = (W scale) x + b - (W scale) shift."""

    def __init__(self, shift: Tensor, scale: Tensor) -> None:
        """Vectors with one entry a feature."""
        self.shift, self.scale = shift, scale

    def __call__(self, x: Tensor) -> Tensor:
        """x standardised."""
        return (x - self.shift).mul_(self.scale)

    def fold(self, W: Tensor) -> Tensor:
        """Weights for standardised inputs, turned into weights for raw ones."""
        return self._turn(W, self.scale, -self.shift)

    def unfold(self, W: Tensor) -> Tensor:
        """Weights for raw inputs, turned into weights for standardised ones."""
        return self._turn(W, 1 / self.scale, self.shift * self.scale)

    def _turn(self, W: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        columns = len(self.scale)
        V = W.narrow(1, 0, columns) * scale
        if W.shape[1] == columns:
            return V
        return torch.cat([V, (W.select(1, columns) + V @ shift).unsqueeze(1)], 1)

    def state_dict(self) -> dict[str, Any]:
        """Both vectors."""
        return {"shift": self.shift, "scale": self.scale}


def measured(rows: AbstractRows, bias: bool, wanted: bool | None) -> Scaling | None:
    """The scaling of these rows; with `wanted` None only if they look raw. Without a bias nothing is shifted."""
    mean, square, reach = _statistics(rows)
    rms = square.sqrt()
    if wanted is None:
        wanted = bool((rms.max() > RAW) | (rms.max() < 1 / RAW))
    if not wanted:
        return None
    shift = mean if bias else torch.zeros_like(mean)
    spread = torch.maximum((square - shift * (2 * mean - shift)).clamp_min(0).sqrt(), reach / REACH)
    constant = spread <= 1e-12 * rms  # scaled too, or its shift would drown the bias that it is folded into
    scale = 1 / torch.where(constant, rms.clamp_min(1.0), spread)
    return Scaling(shift.to(rows.like.dtype), scale.to(rows.like.dtype))


def _statistics(rows: AbstractRows) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, mean square and greatest distance from the mean of each feature, in float64, over the rows looked at."""
    count, total, square = 0, *(rows.like.new_zeros(rows.like.shape[1], dtype=torch.float64) for _ in range(2))
    for x in _looks(rows):
        count += len(x)
        total = total + x.double().sum(0)
        square = square + x.double().square().sum(0)
    mean = total / count
    reach = torch.stack([(x - mean).abs().amax(0) for x in _looks(rows)]).amax(0)
    return mean, square / count, reach


def _looks(rows: AbstractRows) -> Iterator[Tensor]:
    for stretch in _stretches(rows.count):
        for chunk in rows.stretch(stretch).chunks(LOOK_ROWS):
            yield chunk.x


def _stretches(count: int) -> list[slice]:
    if count <= LOOKS * LOOK_ROWS:
        return [slice(i, min(i + LOOK_ROWS, count)) for i in range(0, count, LOOK_ROWS)]
    starts = [round(i * (count - LOOK_ROWS) / (LOOKS - 1)) for i in range(LOOKS)]
    return [slice(start, start + LOOK_ROWS) for start in starts]
