"""What the files of a checkpoint have in them: anything else is not taken up.

A checksum tells that a file is as it was written, not that a run wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import container
from .errors import CheckpointError

__all__ = ["read_rows", "read_shared", "rows_of"]

State = dict[str, Any]
Stretch = tuple[int, int]  # of rows: from .. to


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
        raise CheckpointError(f"{file}: is not the state of a run")
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


def _files(path: Path, total: int) -> dict[Stretch, Path]:
    """The files of rows, in order; together they have all."""
    named = ((re.fullmatch(r"rows-(\d+)-(\d+)", file.name), file) for file in path.iterdir())
    files = sorted(((int(found[1]), int(found[2])), file) for found, file in named if found)
    if [0, *(end for (_, end), _ in files)] != [*(first for (first, _), _ in files), total]:
        raise CheckpointError(f"{path}: the state of some of its {total} rows is missing")
    return dict(files)


def rows_of(path: Path, total: int, token: str, begin: int, end: int) -> State:
    """The state of the rows from `begin` to `end`, from the files that have some; no rows still have a width."""
    files = _files(path, total)
    needed = [(first, stop) for first, stop in files if max(first, begin) < min(stop, end)]
    cuts = [(max(first, begin) - first, min(stop, end) - max(first, begin)) for first, stop in needed]
    if not needed:
        needed, cuts = list(files)[:1], [(0, 0)]
    parts = [read_rows(files[first, stop], stop - first, token) for first, stop in needed]
    try:
        joined: State = _joined(parts, cuts)
    except (LookupError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its files of rows do not go together: {error}") from error
    return joined


def _joined(parts: list[Any], cuts: list[tuple[int, int]]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat([part.narrow(0, *cut) for part, cut in zip(parts, cuts, strict=True)])
    return {key: _joined([part[key] for part in parts], cuts) for key in parts[0]}
