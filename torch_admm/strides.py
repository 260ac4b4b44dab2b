"""How far the weights of each layer go in a step, relative to their own size."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .problem import Weights

__all__ = ["Strides"]


@final
class Strides:
    """max(||W_l||, ||W_l at the start||) / ||V_l||, with norms of [W, b]. No value is looked at on the host.

    All norms have their places in one tensor, so that the rest is done for all layers at once.
    """

    def __init__(self, W: Weights) -> None:
        """`W` are the weights at the start."""
        like = W[1]
        self._norms = like.new_zeros(3, len(W))
        self._found = like.new_zeros(len(W))
        self._V, self._W, first = (row.unbind() for row in self._norms.unbind())
        self._by = self._found.unbind()
        self.first = dict(zip(W, first, strict=True))
        # a V whose squares underflow has no direction, and its layer hardly moves
        self._least = torch.finfo(like.dtype).tiny ** 0.5
        for l, W_l in W.items():
            self.start(l, W_l)

    def start(self, l: int, W: Tensor) -> None:
        """Take these as the weights at the start; for some that are zero or hardly above, fresh ones in their place."""
        norm, fresh = W.norm(), (len(W) / 3) ** 0.5
        self.first[l].copy_(torch.where(norm < fresh / 10, fresh, norm))

    def __call__(self, V: Weights, W: Weights) -> tuple[Tensor, ...]:
        """One factor a layer; the next call writes over them."""
        for places, weights in ((self._V, V), (self._W, W)):
            for place, values in zip(places, weights.values(), strict=True):
                vector_norm(values, out=place)
        length, size, first = self._norms.unbind()
        torch.div(torch.maximum(size, first), length.clamp_min_(self._least), out=self._found)
        return self._by
