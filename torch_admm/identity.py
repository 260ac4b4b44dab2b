"""What makes two runs, or two ranks, the same run: said in words, to be compared."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .data import AbstractRows
from .method import AbstractMethod
from .problem import Problem

__all__ = ["alike", "fingerprint", "identity", "in_words", "of_rows", "settings_of"]

STRETCHES, STRETCH = 16, 16  # looks at the rows, all over them, and rows of each


def identity(
    problem: Problem, method: AbstractMethod, rows: AbstractRows, batch_size: int | None, seed: int
) -> dict[str, str]:
    """Model, loss, method with its settings, and data; a checkpoint fits only where all of these are the same."""
    widths = [problem.inputs, *(layer.map.outputs for layer in problem.layers.values())]
    return {
        "net": "-".join(map(str, widths)),
        "model": " ".join(repr(problem.model).split()),
        "dtype": str(problem.dtype),
        "loss": problem.loss.name,
        "method": type(method).__name__,
        **settings_of(method),
        **of_rows(rows),
        "batch_size": str(rows.batch_size if batch_size is None else batch_size),
        "seed": str(seed),
    }


def of_rows(rows: AbstractRows, kind: str = "") -> dict[str, str]:
    """How many, and which."""
    return {f"number of {kind}rows": str(rows.total), f"{kind}data": f"{_data(rows):08x} (CRC-32 of some rows)"}


def alike(one: str, other: str) -> bool:
    """Is it the same setting? One number for all layers is, as a list of it for each."""
    return one == other or {one} == _entries(other) or {other} == _entries(one)


def _entries(text: str) -> set[str]:
    return set(text[1:-1].split(", ")) if text.startswith("[") else set()


def settings_of(method: AbstractMethod) -> dict[str, str]:
    """Those of the method and of its loss: what they were made with, not what a run has made of it since.

    A setting is kept under its own name, or where a run has another use for that, under _name.
    """
    loss, given = method.loss, vars(method)
    found = {}
    for name in inspect.signature(type(method)).parameters:
        key = f"_{name}" if f"_{name}" in given else name
        if name != "loss" and key in given:
            found[f"{type(method).__name__}.{name}"] = _words(given[key])
    return found | {f"{loss.name}.{name}": _words(value) for name, value in vars(loss).items()}


def in_words(thing: Any) -> str:
    """An object by its class and what it was given: a stop rule, say."""
    return f"{type(thing).__name__}({', '.join(f'{name}={_words(value)}' for name, value in vars(thing).items())})"


def fingerprint(state: Mapping[str, Any] | None) -> str:
    """Tells one state of a run from another; the parts that belong to rows are left out by the caller."""
    if state is None:
        return "none"
    found = 0
    for value in _leaves(state):
        raw = _bytes(value) if isinstance(value, Tensor) else repr(value).encode()
        found = zlib.crc32(raw, found)
    return f"{found:08x} (CRC-32)"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield name
            yield from _leaves(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _words(value: Any) -> str:
    """What reads the same in any process: other objects may be told by where they lie in memory."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_words, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_words(key)}: {_words(part)}' for key, part in value.items()))}}}"
    plain = isinstance(value, bool | int | float | str | torch.dtype | None)
    return str(value) if plain else type(value).__name__


def _data(rows: AbstractRows) -> int:
    """Tells data apart that have the same shape, such as parts that ranks have cut by themselves."""
    found, last = 0, max(0, rows.count - STRETCH)
    for first in dict.fromkeys(last * i // (STRETCHES - 1) for i in range(STRETCHES)):
        for _, x, y in rows.stretch(slice(first, min(first + STRETCH, rows.count))).chunks(STRETCH):
            for values in (x, y):
                found = zlib.crc32(_bytes(values), found)
    return found


def _bytes(values: Tensor) -> bytes:
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
