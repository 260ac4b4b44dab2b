"""From the user's X and y to tensors that a problem can take; a refusal names argument, what came and what is due."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..problem import Problem

__all__ = ["encoded", "features", "pair_of", "same_device", "same_rows"]

CHECK_ENTRIES = 1 << 20  # looked at together when checking: bounds the memory of the check

Number = Callable[[int], int]


def pair_of(data: Any, name: str = "data") -> tuple[Tensor, Tensor]:
    """X and y as tensors, not yet looked at."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ValueError(f"{name} must be a pair (X, y) of tensors or numpy arrays, got {type(data).__name__}")
    return _tensor(data[0], f"{name}: X"), _tensor(data[1], f"{name}: y")


def _tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ValueError(f"{name} is {value.layout}; a dense tensor is expected: .to_dense()")
        return value.detach()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiub" or value.dtype == np.longdouble:
            raise ValueError(f"{name} is an array of {value.dtype}; numbers of at most 64 bits are expected")
        with warnings.catch_warnings():  # nothing here writes to the array, so one that must not be written will do
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            return torch.from_numpy(np.ascontiguousarray(value, value.dtype.newbyteorder("=")))
    raise ValueError(f"{name} must be a tensor or a numpy array, got {type(value).__name__}")


def features(x: Tensor, problem: Problem, name: str, number: Number = int, array: bool = False) -> Tensor:
    """X as (rows, inputs), of the model's dtype and finite; `number` tells under which number a row is known."""
    if x.dtype != problem.dtype:
        wanted = str(problem.dtype).removeprefix("torch.")
        how = f"X.astype('{wanted}')" if array else f"X.to(torch.{wanted})"
        raise ValueError(f"{name}: X is {x.dtype} but the model's weights are {problem.dtype}; convert one: {how}")
    same_device(x, problem, f"{name}: X")
    if x.numel() == 0:
        raise ValueError(f"{name}: X is empty, shape {tuple(x.shape)}; at least one row and one feature are expected")
    if problem.flatten and x.ndim > 2:
        x = x.flatten(1)
    if x.ndim != 2 or x.shape[1] != problem.inputs:
        raise ValueError(
            f"{name}: X has shape {tuple(x.shape)}; (rows, {problem.inputs}) is expected, the inputs of the first layer"
        )
    _check_finite(x, name, number)
    return x


def _check_finite(x: Tensor, name: str, number: Number) -> None:
    rows = max(1, CHECK_ENTRIES // x.shape[1])
    for start in range(0, len(x), rows):
        bad = ~torch.isfinite(x[start : start + rows])
        if bad.any():
            row, column = (int(i) for i in bad.nonzero()[0])
            value, at = float(x[start + row, column]), number(start + row)
            raise ValueError(f"{name}: X has {value} at row {at}, column {column}; finite values are expected")


def same_rows(x: Tensor, y: Tensor, name: str) -> None:
    if y.ndim == 0 or len(y) != len(x):
        raise ValueError(f"{name}: X has {len(x)} rows but y has {len(y) if y.ndim else 'none'}; they must agree")


def same_device(value: Tensor, problem: Problem, name: str) -> None:
    if value.device != problem.device:
        raise ValueError(f"{name} is on {value.device} but the model is on {problem.device}; move one to the other")


def encoded(y: Tensor, x: Tensor, problem: Problem, name: str, number: Number = int) -> Tensor:
    """y as the loss takes it."""
    try:
        return problem.loss.encode(y, problem.outputs, x)
    except ValueError as error:
        message = re.sub(r"^y\[(\d+)", lambda found: f"y[{number(int(found[1]))}", str(error))
        raise ValueError(f"{name}: {message}") from None
