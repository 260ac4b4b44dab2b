"""The limited-memory BFGS method."""

from __future__ import annotations

from typing import Any, final

import torch

from torch_admm import loss_of
from torch_admm.arguments import positive_int

from .fullbatch import AbstractFullBatchMethod

__all__ = ["LBFGS"]


@final
class LBFGS(AbstractFullBatchMethod):
    """torch.optim.LBFGS with a strong Wolfe search on all rows; a sweep is one iteration with its line search."""

    def __init__(self, loss: Any, *, history_size: int = 20) -> None:
        """`history_size` curvature pairs are kept."""
        self.loss = loss_of(loss)
        self.history_size = positive_int("history_size", history_size)

    def build(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(
            self.model.parameters(),
            max_iter=1,
            max_eval=26,  # torch takes the evaluations of the line search from here; its default leaves none
            history_size=self.history_size,
            line_search_fn="strong_wolfe",
        )
