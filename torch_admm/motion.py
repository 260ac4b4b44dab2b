"""The weights of a run in motion: momentum, the relative step, and the average."""

from __future__ import annotations

from itertools import pairwise
from typing import final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .block import Block
from .problem import Problem, Weights

__all__ = ["Motion"]


@final
class Motion:
    """W_l, their momentum V_l and their running mean. A step along D_l is, with norms of [W, b] as a whole,

        V_l = mu V_l + D_l
        W_l += eta max(||W_l||, ||W_l at the start||) V_l / ||V_l||

    All of them lie in one block of memory. No value is looked at on the host.
    """

    def __init__(self, problem: Problem) -> None:
        """Start from the weights of the problem's model."""
        read = problem.read()
        like, L = read[1], len(read)
        block = Block(list(read.values()))
        lines = like.new_zeros(3, block.size)
        _, self._all_W, self._all_means = lines.unbind()
        self.V, self.W, self.mean = (dict(zip(read, block.cut(line), strict=True)) for line in lines.unbind())
        self._inner = {l: W.narrow(1, 0, problem.layers[l].map.inputs) for l, W in self.W.items()}
        self._norms, self._strides = like.new_zeros(2, L), like.new_zeros(L)
        # a V whose squares underflow has no direction, and its layer hardly moves
        self._least = like.new_full((2, L), torch.finfo(like.dtype).tiny ** 0.5)
        self.first = dict(zip(read, self._least.select(0, 1).unbind(), strict=True))
        both, spans = lines.narrow(0, 0, 2), zip(self._norms.unbind(1), pairwise(block.starts), strict=True)
        self._measured = [(both.narrow(1, start, stop - start), at) for at, (start, stop) in spans]
        self._moved = list(zip(self.W.values(), self.V.values(), self._strides.unbind(), strict=True))
        self._lengths = self._norms.unbind()  # of V, of W
        for l, W in read.items():
            self.start(l, W)

    def start(self, l: int, W: Tensor) -> None:
        """Start from these weights; as the size of some that are zero or hardly above, that of fresh ones is taken."""
        norm, fresh = W.norm(), (len(W) / 3) ** 0.5
        self.first[l].copy_(torch.where(norm < fresh / 10, fresh, norm))
        self.W[l].copy_(W)
        self.mean[l].copy_(W)

    def step(self, D: Weights, mu: float, eta: float, weight_decay: float) -> None:
        """As above; the W in [W, b] also shrink by eta times `weight_decay`."""
        for l, V in self.V.items():
            torch.add(D[l], V, alpha=mu, out=V)
        for both, norms in self._measured:
            vector_norm(both, dim=1, out=norms)
        torch.maximum(self._norms, self._least, out=self._norms)
        length, size = self._lengths
        torch.div(size, length, out=self._strides)
        if weight_decay:
            for W in self._inner.values():
                W.mul_(1 - eta * weight_decay)
        for W, V, stride in self._moved:
            W.addcmul_(V, stride, value=eta)

    def average(self, weight: float) -> None:
        """Take the weights into their mean."""
        self._all_means.lerp_(self._all_W, weight)
