"""Shared by the tests: nets, data, and naive minimisers to compare the fast ones with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_admm
from torch_admm.data import Rows, rows_of

HOST_SYNCS = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "_linalg_check_errors",
    "masked_select",
)

Fn = Callable[[Tensor], Tensor]


def net(
    *widths: int, act: type[nn.Module] = nn.ReLU, bias: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """Linear layers of these widths with activations between them, always the same weights."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs, bias=bias, dtype=dtype), act()]
    return nn.Sequential(*parts[:-1])


def blobs(
    rows: int = 120, features: int = 4, classes: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Rows whose class is decided by a circle: no linear model separates them."""
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    radius = x.square().sum(1)
    cuts = torch.quantile(radius, torch.linspace(0, 1, classes + 1, dtype=torch.float64)[1:-1])
    return x.to(dtype), torch.bucketize(radius, cuts)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def started(
    method: torch_admm.AbstractMethod, model: nn.Module, data: tuple[Tensor, Tensor], seed: int = 0
) -> tuple[torch_admm.Problem, Rows]:
    """Bring a method to the point where it can step."""
    problem = torch_admm.from_module(model, method.loss)
    rows = rows_of(data, problem)
    assert isinstance(rows, Rows)
    method.init(problem, rows, batch_size=None, seed=seed)
    return problem, rows


def brute_force(cost: Fn, around: Tensor, reach: Tensor, kinks: Tensor, points: int = 400) -> Tensor:
    """The smallest cost on a fine grid of `points` a row, spanning `around` +- `reach`, and at `kinks`.

    cost maps (rows, candidates) to (rows, candidates), float64.
    """
    span = torch.linspace(-1, 1, points, dtype=torch.float64)
    grid = around[:, None] + reach[:, None] * span
    grid = torch.cat([grid, kinks.expand(len(around), -1)], 1)
    return cost(grid).amin(1)


class CountSyncs(TorchDispatchMode):
    """Counts operations that read a value of a tensor on the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        if func._schema.name.removeprefix("aten::") in HOST_SYNCS:
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def same(a: Any, b: Any) -> bool:
    """The same tree of the same types, to the last bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)
