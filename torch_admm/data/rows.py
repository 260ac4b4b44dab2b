"""Rows of samples and targets, handed out in chunks (in order) or in batches (in a seeded random order)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ..problem import Problem

__all__ = ["Chunk", "Rows", "pair_of", "rows_of", "take"]

CHECK_ENTRIES = 1 << 20  # looked at together when checking: bounds the memory of the check


class Chunk(NamedTuple):
    """Some rows: which they are, their features and their encoded targets."""

    rows: slice
    x: Tensor
    y: Tensor


def take(values: Tensor, rows: slice) -> Tensor:
    """A view of some rows."""
    return values.narrow(0, rows.start, rows.stop - rows.start)


@final
class Rows:
    """All rows in memory: x of shape (count, inputs), y as the loss encoded it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        """Take checked tensors; `rows_of` does the checking."""
        self.x, self.y = x, y
        self.count = len(x)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """All rows in order, `size` at a time."""
        for start in range(0, self.count, size):
            rows = slice(start, min(start + size, self.count))
            yield Chunk(rows, take(self.x, rows), take(self.y, rows))

    def batches(self, size: int, seed: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows once in an order given by seed and epoch, `size` at a time; the last batch may be shorter."""
        generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(self.count, generator=generator).to(self.x.device)
        for index in order.split(size):
            yield self.x[index], self.y[index]

    def parted(self, held: int, seed: int) -> tuple[Rows, Rows]:
        """All but `held` rows, and those, drawn by the seed."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.count, generator=generator).to(self.x.device)
        parts = order.narrow(0, held, self.count - held).sort().values, order.narrow(0, 0, held).sort().values
        kept, out = (Rows(self.x.index_select(0, i), self.y.index_select(0, i)) for i in parts)
        return kept, out


def rows_of(data: Any, problem: Problem, name: str = "data") -> Rows:
    """Check (X, y) against the problem; raise a ValueError that names the argument, what came and what is expected."""
    x, y = pair_of(data, name)
    x = _check_features(x, problem, name, isinstance(data[0], np.ndarray))
    if y.ndim == 0 or len(y) != len(x):
        raise ValueError(f"{name}: X has {len(x)} rows but y has {len(y) if y.ndim else 'none'}; they must agree")
    _check_device(y, problem, f"{name}: y")
    try:
        return Rows(x, problem.loss.encode(y, problem.outputs, x))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


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


def _check_features(x: Tensor, problem: Problem, name: str, array: bool) -> Tensor:
    if x.dtype != problem.dtype:
        wanted = str(problem.dtype).removeprefix("torch.")
        how = f"X.astype('{wanted}')" if array else f"X.to(torch.{wanted})"
        raise ValueError(f"{name}: X is {x.dtype} but the model's weights are {problem.dtype}; convert one: {how}")
    _check_device(x, problem, f"{name}: X")
    if x.numel() == 0:
        raise ValueError(f"{name}: X is empty, shape {tuple(x.shape)}; at least one row and one feature are expected")
    if problem.flatten and x.ndim > 2:
        x = x.flatten(1)
    if x.ndim != 2 or x.shape[1] != problem.inputs:
        raise ValueError(
            f"{name}: X has shape {tuple(x.shape)}; (rows, {problem.inputs}) is expected, the inputs of the first layer"
        )
    rows = max(1, CHECK_ENTRIES // x.shape[1])
    for start in range(0, len(x), rows):
        bad = ~torch.isfinite(x[start : start + rows])
        if bad.any():
            row, column = (int(i) for i in bad.nonzero()[0])
            value = float(x[start + row, column])
            raise ValueError(f"{name}: X has {value} at row {start + row}, column {column}; finite values are expected")
    return x


def _check_device(value: Tensor, problem: Problem, name: str) -> None:
    if value.device != problem.device:
        raise ValueError(f"{name} is on {value.device} but the model is on {problem.device}; move one to the other")
