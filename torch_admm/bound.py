"""AnchoredADMM for a training loop of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from .data import AbstractRows, Rows, rows_of
from .feed import Chunk
from .problem import Problem

if TYPE_CHECKING:
    from .anchored import AnchoredADMM

__all__ = ["BoundADMM"]

WHOLE_BATCH = 4096  # a batch up to this is not cut into chunks


@final
class BoundADMM:
    """AnchoredADMM on one model; the model always holds the weights to use."""

    def __init__(self, method: AnchoredADMM, problem: Problem) -> None:
        """Made by `AnchoredADMM.bind`."""
        self.method, self.problem = method, problem
        self.usual = 0  # rows of the largest batch so far: a short last one counts for less

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step of all weights from the rows at hand; no graph is built, whatever surrounds the call."""
        with torch.inference_mode(False), torch.no_grad():
            rows = self._rows(x, y)
            if self.usual == 0:
                self.method.scale(rows)
            self.usual = max(self.usual, rows.count)
            chunks = list(rows.chunks(max(self.method.chunk, WHOLE_BATCH)))
            if len(chunks) == 1:
                self.method.sweep_batch(chunks[0].x, chunks[0].y, [rows.count], self.usual)
            else:
                whole = [Chunk.whole(c.x, c.y) for c in chunks]
                self.method.sweep([whole], self.usual, self.method.comm.open_order())
            self.problem.write(self.method.current())

    def _rows(self, x: Tensor, y: Tensor) -> AbstractRows:
        """Looking for NaN costs as much as a layer, so it is done when the method looks at its moments too."""
        problem = self.problem
        fine = x.ndim == 2 and x.shape[1] == problem.inputs and x.dtype == problem.dtype and x.device == problem.device
        seen = not self.method.looks() or bool(
            torch.isfinite(x.sum())
        )  # a sum may overflow: that is for rows_of to say
        if not fine or not seen or not len(x) == len(y) > 0:
            return rows_of((x, y), problem, "batch")
        return Rows(x, problem.loss.encode(y, problem.outputs, x))

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on, and the weights."""
        return self.method.state_dict() | {"usual": self.usual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, on a model of the same shape."""
        with torch.inference_mode(False):
            if "usual" not in state:
                raise ValueError("state has no 'usual'; one that BoundADMM.state_dict() gave is expected")
            self.method.load_state_dict(state)
            self.usual = int(state["usual"])
            self.problem.write(self.method.current())
