"""The sums that one weight step needs, and nothing else of the rows."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from . import steps
from .gram import Factor
from .maps import AbstractLinearMap

__all__ = ["Sums"]


@final
class Sums:
    """G = sum [a, 1]'[a, 1] and R = sum z'[a, 1] of one layer, added chunk by chunk, solved once, then empty again.

    Products are in the dtype `products` and added up in float64. A `factor` that is given stands in for G: the data
    never change, so theirs is taken once.
    """

    def __init__(
        self,
        linear: AbstractLinearMap,
        W: Tensor,
        *,
        ridge: float | None,
        products: torch.dtype,
        factor: Factor | None = None,
    ) -> None:
        """`W` gives shape, dtype and device."""
        self.linear, self.like, self.ridge, self.products, self.factor = linear, W, ridge, products, factor
        self._clear()

    def add(self, a: Tensor, z: Tensor) -> None:
        """Add rows of the layer's inputs a and of its targets z."""
        a, z = a.to(self.products), z.to(self.products)
        self.linear.cross(self.R, z, a)
        if self.factor is None:
            self.gram.accumulate(a)

    def solve(self) -> Tensor:
        """argmin_W sum ||z - W [a, 1]||^2 over the rows added since the last call."""
        W = steps.weight_step(self.factor or self.gram.factor(self.ridge), self.R, self.like)
        self._clear()
        return W

    def _clear(self) -> None:
        self.R = torch.zeros(self.like.shape, dtype=torch.float64, device=self.like.device)
        self.gram = self.linear.gram(self.like, products=self.products)
