"""The dense map of nn.Linear, and the registry `map_of`."""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from .. import gram
from .base import AbstractLinearMap, InputSolve

__all__ = ["Dense", "map_of"]

PLAIN_ROWS = 6  # times the outputs: from so many on, copying the rows takes longer than all that it saves


class _Views(NamedTuple):
    """Some weights and parts of them, cut once: a view takes as long as a small product."""

    W: Tensor
    turned: Tensor
    inner: Tensor  # without b
    row: Tensor  # the first


@final
class Dense(AbstractLinearMap):
    """m = W a + b with a dense W, weights in an nn.Linear."""

    def __init__(self, module: nn.Linear) -> None:
        """Wrap `module`; nothing is copied."""
        self.module = module
        self.inputs, self.outputs = module.in_features, module.out_features
        self.bias = module.bias is not None
        self._last: _Views | None = None

    def read(self) -> Tensor:
        weight = self.module.weight.detach()
        return torch.cat([weight, self.module.bias.detach().unsqueeze(1)], 1) if self.bias else _packed(weight)

    @torch.no_grad()
    def write(self, W: Tensor) -> None:
        self.module.weight.copy_(W.narrow(1, 0, self.inputs))
        if self.bias:
            self.module.bias.copy_(W.select(1, self.inputs))

    def forward(self, W: Tensor, a: Tensor, out: Tensor | None = None) -> Tensor:
        whole = a.shape[1] == W.shape[1]  # without a bias, or [a, 1]
        if self.outputs == 1 and out is None:  # several times faster than a product with one column
            w = self._views(W).row
            m = torch.mv(a, w if whole else w.narrow(0, 0, self.inputs)).unsqueeze(1)
            return m if whole else m.add_(W.select(1, self.inputs))
        if whole:
            return torch.mm(a, self._views(W).turned, out=out)
        if self.inputs < self.outputs:  # a column of ones is cheaper than a pass over m; addmm makes two
            return torch.mm(gram.with_ones(a), W.T, out=out)
        return torch.mm(a, self._matrix(W).T, out=out).add_(_packed(W.select(1, self.inputs)))

    def gram(self, like: Tensor, products: torch.dtype = torch.float64, at_once: int | None = None) -> gram.Gram:
        return gram.Gram(self.inputs, self.bias, like, products, at_once)

    def cross(self, z: Tensor, a: Tensor, at_once: int | None = None) -> Tensor:
        return gram.cross(z, a, self.bias and a.shape[1] == self.inputs, at_once)

    def cross_into(self, z: Tensor, a: Tensor, out: Tensor) -> Tensor:
        return gram.cross_into(z, a, out)

    def cross_stacked(self, z: Tensor, a: Tensor, out: Tensor) -> None:
        torch.bmm(z.mT, a, out=out)

    def solve_input(self, W: Tensor, beta: float, gamma: float) -> InputSolve:
        """a = h + (z - W h - b) M with M = beta (beta W W' + gamma I)^-1 W, from the smaller of W W' and W'W.

        For a scalar output that is a rank-one correction. The residual form keeps float32 accurate: where the next
        layer agrees with h already, nothing is added.
        """
        V = self._matrix(W).double()
        wide = self.outputs <= self.inputs
        small = V @ V.T if wide else V.T @ V
        K = beta * small + gamma * torch.eye(len(small), dtype=V.dtype, device=V.device)
        L = torch.linalg.cholesky_ex(K).L
        M = beta * (torch.cholesky_solve(V, L) if wide else torch.cholesky_solve(V.T, L).T)
        M = M.to(W.dtype)
        return lambda h, z: h.addmm_(z - self.forward(W, h), M)

    def inner(self, extended: Tensor) -> Tensor:
        return extended.narrow(1, 0, self.inputs)

    def prefers_plain(self, rows: int) -> bool:
        """Instead of the rows, W and its sums are copied."""
        return self.inputs > self.outputs and rows >= PLAIN_ROWS * self.outputs

    def output_factor(self, W: Tensor, beta: float, gamma: float) -> Tensor:
        V = self._views(W).inner
        if self.outputs == 1:
            return torch.mm(V, V.T).add_(gamma / beta).reciprocal_()
        K = (V @ V.T).double()
        K.diagonal().add_(gamma / beta)
        inverse: Tensor = torch.linalg.inv_ex(K).inverse  # does not raise: what explodes is noticed later
        return inverse.to(W.dtype, memory_format=torch.contiguous_format, copy=True)  # as a stored one comes back

    def pull_back(self, W: Tensor, r: Tensor, out: Tensor) -> Tensor:
        V = self._views(W).inner
        return torch.mul(r, V, out=out) if self.outputs == 1 else torch.mm(r, V, out=out)

    def pull_back_onto(self, W: Tensor, r: Tensor, m: Tensor, k: float) -> Tensor:
        return m.addmm_(r, self._views(W).inner, alpha=k)

    def _views(self, W: Tensor) -> _Views:
        if self._last is None or self._last.W is not W:
            self._last = _Views(W, W.T, W.narrow(1, 0, self.inputs), W.select(0, 0))
        return self._last

    def _matrix(self, W: Tensor) -> Tensor:
        return _packed(W.narrow(1, 0, self.inputs))


def _packed(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)  # working on a strided part costs more than this copy


@singledispatch
def map_of(module: nn.Module) -> AbstractLinearMap | None:
    """The linear map that `module` computes, or None if none is registered for its class."""
    return None


@map_of.register
def _(module: nn.Linear) -> AbstractLinearMap:
    return Dense(module)
