"""What the methods with a line search share: loss and gradient over many rows, as a closure for their optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_admm import Problem
from torch_admm.arguments import positive_int
from torch_admm.comm.base import FEW_PIECES, WORTH_CUTTING
from torch_admm.data import AbstractRows

from .gradient import AbstractGradientMethod, Pair

__all__ = ["AbstractSearchingMethod"]

Pieces = Sequence[Iterable[Pair]]

BATCH_PIECES = {8192: 8, 4096: 4, 64: 2}  # from so many rows on: as many as cost an evaluation next to nothing


class AbstractSearchingMethod(AbstractGradientMethod):
    """Iterations of an optimiser that searches along a line: one over all rows a sweep, or `hold` on each batch.

    Batches let such a method see much of the data before it has gone far; on each it may stay for a while, since what
    it has learnt of the curvature belongs to those rows.

    A search may take another turn for one bit of a loss, so that everything is always summed `by_pieces`.
    """

    def __init__(self, loss: Any, *, batch_size: int | None, hold: int, chunk_rows: int, average: bool) -> None:
        """`batch_size` is used unless `fit` is given one; None takes all rows. `chunk_rows` bounds the memory."""
        super().__init__(loss, average=average)
        self._batch_size = None if batch_size is None else positive_int("batch_size", batch_size)
        self.hold, self.chunk_rows = positive_int("hold", hold), positive_int("chunk_rows", chunk_rows)

    @property
    def by_pieces(self) -> bool:
        return True

    def part(self, problem: Problem, rows: AbstractRows, batch_size: int | None) -> AbstractRows:
        """Neighbouring shards are one piece: each by itself would cost more than its rows."""
        size, comm = self._step_rows(rows, batch_size), self.comm
        by_shard = comm.deterministic or comm.is_many
        merged = 1 if by_shard else comm.shards // self._pieces_of(size, rows.total)
        mine = comm.part(rows, merged)
        mine.merged = merged
        return mine

    def _pieces_of(self, size: int, total: int) -> int:
        if size >= total:
            return self.comm.shards if total >= self.comm.shards * WORTH_CUTTING else FEW_PIECES
        if self.comm.size == 1 and torch.get_num_threads() > 1:  # products then round by the threads anyway
            return 1
        return next((pieces for least, pieces in BATCH_PIECES.items() if size >= least), 1)

    def _step_rows(self, rows: AbstractRows, batch_size: int | None) -> int:
        return batch_size or self._batch_size or rows.total

    def init(self, problem: Problem, rows: AbstractRows, *, batch_size: int | None, seed: int) -> None:
        super().init(problem, rows, batch_size=batch_size, seed=seed)
        self._work_on(self._all)

    def step(self) -> None:
        size = self._step_rows(self.rows, self.batch_size)
        if size >= self.rows.total:
            self._iterate()
        else:
            for pieces in self.batches(size):
                self._work_on(partial(self._split, pieces))
                for _ in range(self.hold):
                    self._iterate()
        self.epoch += 1

    def _all(self) -> Pieces:
        pieces = self.comm.pieces(self.rows)
        return [((x, y) for _, x, y in piece.chunks(self.chunk_rows)) for piece in pieces]

    def _split(self, pieces: Sequence[Pair]) -> Pieces:
        return [zip(*(column.split(self.chunk_rows) for column in piece), strict=True) for piece in pieces]

    def _work_on(self, pieces: Callable[[], Pieces]) -> None:
        """The rows of the next iterations."""
        self._pieces = pieces
        self._last: tuple[Tensor, float, list[Tensor | None]] | None = None

    def _iterate(self) -> None:
        self.optimiser.step(self._closure)
        self.updated()

    def _closure(self) -> float:
        """The mean loss, with its gradient left in the parameters.

        An optimiser evaluates once more where its last step ended; that evaluation is remembered, not repeated.
        """
        at = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
        if self._last is None or not torch.equal(self._last[0], at):
            self._last = at.clone(), self._evaluate(), [p.grad for p in self.model.parameters()]
        for p, gradient in zip(self.model.parameters(), self._last[2], strict=True):
            p.grad = gradient
        return self._last[1]

    def _evaluate(self) -> float:
        """Loss and gradient, chunk by chunk; searches compare losses, so these cross in double precision."""
        return self.mean_gradient(self._pieces(), torch.float64)
