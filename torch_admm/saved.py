"""What the files of a checkpoint have in them: anything else is not taken up.

A checksum tells that a file is as it was written, not that a run wrote it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from . import container
from .errors import CheckpointError

__all__ = ["read_rows", "read_shared"]

State = dict[str, Any]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_row(value: Any) -> bool:
    """Of a history."""
    known = isinstance(value, dict) and {"sweep", "seconds"} <= value.keys()
    return known and all(_is_text(name) and isinstance(number, int | float) for name, number in value.items())


SOUND: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("sweep", "bytes_sent", "rows"), _is_count),
    "seconds": lambda value: isinstance(value, float) and value >= 0,
    "history": lambda value: isinstance(value, list) and all(map(_is_row, value)),
    "best": _is_row,
    "best_weights": lambda value: (
        isinstance(value, dict) and all(_is_count(l) and isinstance(W, Tensor) for l, W in value.items())
    ),
    "method": lambda value: isinstance(value, dict),
    "about": lambda value: isinstance(value, dict) and all(map(_is_text, [*value, *value.values()])),
    "by_row": lambda value: isinstance(value, bool),
    **dict.fromkeys(("monitor", "token"), _is_text),
}


def read_shared(file: Path) -> State:
    """What all ranks have in common, if it is what a run can take up: these names and no others."""
    shared = container.read(file)
    if not isinstance(shared, dict):
        raise CheckpointError(f"{file}: has no names")
    for name in {**SOUND, **shared}:
        if name not in shared:
            raise CheckpointError(f"{file}: has no {name}")
        if name not in SOUND:
            raise CheckpointError(f"{file}: has {name!r}, which no checkpoint has")
        if not SOUND[name](shared[name]):
            raise CheckpointError(f"{file}: its {name} makes no sense")
    if shared["monitor"] not in shared["best"]:
        raise CheckpointError(f"{file}: its best row has no {shared['monitor']}")
    return dict(shared)


def read_rows(file: Path, count: int, token: str) -> State:
    """The state in one file of rows, if it is of this checkpoint and of as many rows as its name says."""
    content = container.read(file)
    theirs, by_row = (content.get("token"), content.get("by_row")) if isinstance(content, dict) else (None, None)
    if not isinstance(theirs, str) or not isinstance(by_row, dict) or not _has_rows(by_row, count):
        raise CheckpointError(f"{file}: it does not have the state of {count} rows")
    if theirs != token:
        raise CheckpointError(f"{file} belongs to another checkpoint")
    return dict(by_row)


def _has_rows(value: Any, count: int) -> bool:
    if isinstance(value, dict):
        return all(_has_rows(inner, count) for inner in value.values())
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count
