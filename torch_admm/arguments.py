"""Checks of arguments: each returns the value or raises a ValueError naming argument, value and expectation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

__all__ = ["choice", "fraction", "multiple", "non_negative", "per_layer", "positive", "positive_int"]

T = TypeVar("T")


def positive(name: str, value: Any, most: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}; a finite number above 0 is expected")
    if float(value) > most:
        raise ValueError(f"{name} is {value!r}; at most {most:g} is expected")
    return float(value)


def fraction(name: str, value: Any) -> float:
    return _from_zero(name, value, 1.0, "a number of at least 0 and below 1")


def non_negative(name: str, value: Any) -> float:
    return _from_zero(name, value, math.inf, "a finite number of at least 0")


def positive_int(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} is {value!r}; a whole number of at least {least} is expected")
    return int(value)


def multiple(name: str, value: Any, of: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < of or int(value) % of:
        raise ValueError(f"{name} is {value!r}; a multiple of {of} is expected")
    return int(value)


def choice(name: str, value: T, known: Sequence[T]) -> T:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; one of {', '.join(map(repr, known))} is expected")
    return value


def per_layer(name: str, value: float | Sequence[float], count: int | None) -> dict[int, float]:
    """Keys 1..count; one number serves all layers. With count None only the values are checked."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if count is not None and len(value) != count:
            raise ValueError(f"{name} has {len(value)} values; one number or {count}, one a layer, are expected")
        return {l: positive(f"{name}[{l - 1}]", v) for l, v in enumerate(value, start=1)}
    return dict.fromkeys(range(1, (count or 0) + 1), positive(name, value))


def _from_zero(name: str, value: Any, below: float, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < below:
        raise ValueError(f"{name} is {value!r}; {expected} is expected")
    return float(value)
