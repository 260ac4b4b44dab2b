"""Tensors of a run that are stored and come back: the states of both ADMM methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["Parts", "check", "copies", "copy_back"]

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
        for l, tensor in part.items():
            theirs = state[name].get(l)
            if theirs is None or theirs.shape != tensor.shape:
                came = "nothing" if theirs is None else tuple(theirs.shape)
                raise ValueError(f"state: {name}[{l}] is {came}; {tuple(tensor.shape)} is expected")


def copy_back(parts: Parts, state: Mapping[str, Any]) -> None:
    """Take a state that was checked into the tensors of this run."""
    for name, part in parts.items():
        for l, tensor in part.items():
            tensor.copy_(state[name][l])
