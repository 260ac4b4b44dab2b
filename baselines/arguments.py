"""Checks of arguments that only gradient methods have, in the manner of `torch_admm.arguments`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_admm.arguments import choice, fraction

__all__ = ["fractions", "switch"]


def fractions(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueError(f"{name} is {value!r}; two numbers of at least 0 and below 1 are expected")
    return fraction(f"{name}[0]", value[0]), fraction(f"{name}[1]", value[1])


def switch(name: str, value: Any) -> bool:
    return bool(choice(name, value, (False, True)))
