"""The limited-memory BFGS method."""

from __future__ import annotations

from typing import Any, final

import torch

from torch_admm.arguments import positive, positive_int

from .searching import AbstractSearchingMethod

__all__ = ["LBFGS"]


@final
class LBFGS(AbstractSearchingMethod):
    """torch.optim.LBFGS with a strong Wolfe search; a sweep is one iteration on all rows, or an epoch of batches."""

    def __init__(
        self,
        loss: Any,
        *,
        history_size: int = 20,
        lr: float = 1.0,
        max_evals: int = 25,
        batch_size: int | None = None,
        hold: int = 5,
        chunk_rows: int = 4096,
        average: bool = False,
    ) -> None:
        """`history_size` curvature pairs are kept; a search begins at the length `lr` and makes up to `max_evals`.

        With `batch_size`, each batch serves `hold` iterations. Gradients are taken `chunk_rows` rows at a time.
        """
        super().__init__(loss, batch_size=batch_size, hold=hold, chunk_rows=chunk_rows, average=average)
        self.history_size, self.lr = positive_int("history_size", history_size), positive("lr", lr)
        self.max_evals = positive_int("max_evals", max_evals)

    def build(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(
            self.model.parameters(),
            lr=self.lr,
            max_iter=1,
            max_eval=1 + self.max_evals,  # the first is where it stands; torch's default leaves none for the search
            history_size=self.history_size,
            line_search_fn="strong_wolfe",
        )
