"""Standardised inputs that leave no trace: x is shifted and scaled on the way in, and the first layer takes it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor

from .comm import AbstractComm
from .data import AbstractRows, Chunk

__all__ = ["Scaling", "looked", "measured"]

LOOKS, LOOK_ROWS = 16, 4096  # of more rows, so many stretches of so many are looked at
GLANCES, GLANCE_ROWS = 4, 128  # fewer, to see whether they are raw: most are not, and training waits
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


def measured(rows: AbstractRows, bias: bool, wanted: bool | None, comm: AbstractComm) -> Scaling | None:
    """The scaling of the rows of all ranks; with `wanted` None only if they look raw.

    Without a bias nothing is shifted. All ranks find the same, and the same as one process would.
    """
    if not (_look_raw(rows, comm) if wanted is None else wanted):
        return None
    mean, square = _moments(rows, comm)
    reach = torch.zeros_like(mean)
    for _, (_, x, _) in looked(rows, _stretches(rows.total, LOOKS, LOOK_ROWS), comm):
        reach = torch.maximum(reach, (x - mean).abs().amax(0))
    reach = comm.gather_later(reach).wait().amax(0)
    rms = square.sqrt()
    shift = mean if bias else torch.zeros_like(mean)
    spread = torch.maximum((square - shift * (2 * mean - shift)).clamp_min(0).sqrt(), reach / REACH)
    constant = spread <= 1e-12 * rms  # scaled too, or its shift would drown the bias that it is folded into
    scale = 1 / torch.where(constant, rms.clamp_min(1.0), spread)
    return Scaling(shift.to(rows.like.dtype), scale.to(rows.like.dtype))


def _look_raw(rows: AbstractRows, comm: AbstractComm) -> bool:
    """All that comes of it is a comparison: in which order squares are summed does not matter."""
    stretches = _stretches(rows.total, GLANCES, GLANCE_ROWS)
    seen = [chunk.x for stretch in stretches for chunk in _here(rows, stretch)]
    squares = torch.cat([rows.like, *seen]).double().square().sum(0)
    largest = (comm.total([squares], comm.open_order()).max() / _count(stretches)).sqrt()
    return bool((largest > RAW) | (largest < 1 / RAW))


def _moments(rows: AbstractRows, comm: AbstractComm) -> tuple[Tensor, Tensor]:
    """Mean and mean square of each feature, in float64, over the rows looked at."""
    stretches = _stretches(rows.total, LOOKS, LOOK_ROWS)
    nothing = rows.like.new_zeros(2, rows.like.shape[1], dtype=torch.float64)
    sums = [nothing.clone() for _ in comm.starts(rows)]
    for part, (_, x, _) in looked(rows, stretches, comm):
        sums[part] += torch.stack([x.double().sum(0), x.double().square().sum(0)])
    mean, square = (comm.total(sums, comm.order(rows), nothing) / _count(stretches)).unbind()
    return mean, square


def looked(rows: AbstractRows, stretches: Sequence[slice], comm: AbstractComm) -> Iterator[tuple[int, Chunk]]:
    """What is here of some stretches of the rows of all ranks, each with the piece that it is of."""
    for part, piece in enumerate(comm.pieces(rows)):
        for stretch in stretches:
            for chunk in _here(piece, stretch):
                yield part, Chunk(chunk.rows, comm.aligned(chunk.x), chunk.y)


def _here(piece: AbstractRows, stretch: slice) -> Iterator[Chunk]:
    """What the piece has of some of the rows of all ranks."""
    start, stop = (min(max(at - piece.first, 0), piece.count) for at in (stretch.start, stretch.stop))
    return piece.stretch(slice(start, stop)).chunks(stop - start) if start < stop else iter(())


def _stretches(count: int, looks: int, size: int) -> list[slice]:
    if count <= looks * size:
        return [slice(i, min(i + size, count)) for i in range(0, count, size)]
    starts = [round(i * (count - size) / (looks - 1)) for i in range(looks)]
    return [slice(start, start + size) for start in starts]


def _count(stretches: Sequence[slice]) -> int:
    return sum(s.stop - s.start for s in stretches)
