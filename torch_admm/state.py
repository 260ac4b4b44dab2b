"""Tensors of a run that are stored and come back: the states of both ADMM methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["Parts", "check", "check_number", "check_part", "copies", "copy_back"]

Parts = Mapping[str, Mapping[int, Tensor]]  # by name and layer


def copies(parts: Parts) -> dict[str, dict[int, Tensor]]:
    """What a state has of them."""
    return {name: {l: tensor.clone() for l, tensor in part.items()} for name, part in parts.items()}


def check(state: Mapping[str, Any], parts: Parts, others: Iterable[str], method: str) -> None:
    """Has `state` all of these parts, in these shapes, and the others? Nothing has been changed by then."""
    for name in (*parts, *others):
        if name not in state:
            raise ValueError(f"state has no {name!r}; one that {method}.state_dict() gave is expected")
    for name, part in parts.items():
        check_part(state[name], part, name)


def check_part(theirs: Any, part: Mapping[Any, Tensor], name: str) -> None:
    """Tensors of the same shapes, under the same keys."""
    if not isinstance(theirs, Mapping):
        raise ValueError(f"state: {name} is {_shown(theirs)}; tensors by layer are expected")
    for l, tensor in part.items():
        came = theirs.get(l)
        if not isinstance(came, Tensor) or came.shape != tensor.shape:
            raise ValueError(f"state: {name}[{l}] is {_shown(came)}; {tuple(tensor.shape)} is expected")


def check_number(state: Mapping[str, Any], name: str, like: float) -> None:
    """A counter, which is never below zero, or truth, or any number, as `like` is."""
    came = state[name]
    kinds, expected = {
        bool: ((bool,), "True or False"),
        int: ((int,), "a whole number of at least 0"),
        float: ((int, float), "a number"),
    }[type(like)]
    if type(came) not in kinds or (type(like) is int and came < 0):
        raise ValueError(f"state: {name} is {_shown(came)}; {expected} is expected")


def _shown(value: Any) -> str:
    """What came in the place of something else."""
    return "nothing" if value is None else str(tuple(value.shape)) if isinstance(value, Tensor) else repr(value)[:80]


def copy_back(parts: Parts, state: Mapping[str, Any]) -> None:
    """Take a state that was checked into the tensors of this run."""
    for name, part in parts.items():
        for l, tensor in part.items():
            tensor.copy_(state[name][l])
