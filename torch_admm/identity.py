"""What makes two runs, or two ranks, the same run: said in words, to be compared."""

from __future__ import annotations

import zlib
from typing import Any

from .data import AbstractRows
from .method import AbstractMethod
from .problem import Problem

__all__ = ["identity", "settings_of"]

LOOK_ROWS = 64

Plain = (bool, int, float, str, type(None))


def identity(
    problem: Problem, method: AbstractMethod, rows: AbstractRows, batch_size: int | None, seed: int
) -> dict[str, str]:
    """Model, loss, method and data; a checkpoint fits only where all of these are the same."""
    widths = [problem.inputs, *(layer.map.outputs for layer in problem.layers.values())]
    return {
        "net": "-".join(map(str, widths)),
        "model": " ".join(repr(problem.model).split()),
        "dtype": str(problem.dtype),
        "loss": problem.loss.name,
        "method": type(method).__name__,
        "rows": str(rows.total),
        "data": f"{_fingerprint(rows):08x} (CRC-32 of the first rows)",
        "batch_size": str(rows.batch_size if batch_size is None else batch_size),
        "seed": str(seed),
    }


def settings_of(method: AbstractMethod) -> dict[str, Any]:
    """The settings that are plain values; a method that has run before has its state beside them."""
    plain = {name: value for name, value in vars(method).items() if isinstance(value, Plain)}
    return {f"{type(method).__name__}.{name}": value for name, value in plain.items() if name[0] != "_"}


def _fingerprint(rows: AbstractRows) -> int:
    """Tells data apart that have the same shape, such as parts that ranks have cut by themselves."""
    found = 0
    for _, x, y in rows.stretch(slice(0, min(LOOK_ROWS, rows.count))).chunks(LOOK_ROWS):
        for values in (x, y):
            found = zlib.crc32(values.detach().cpu().contiguous().numpy().tobytes(), found)
    return found
