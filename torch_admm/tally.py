"""Loss and score of rows that come chunk by chunk, on several ranks."""

from __future__ import annotations

import abc
from functools import reduce
from typing import final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .comm import AbstractComm
from .data import AbstractRows, Chunk, Rows, take
from .precision import LITTLE_SWEEP
from .problem import Problem

__all__ = ["AbstractTally", "tally_for"]

ROWS_OF_ALL = WeakKeyDictionary[AbstractRows, tuple[Tensor, Tensor]]()  # by those here: they are judged again and again


class AbstractTally(abc.ABC):
    """Give it all chunks of the rows here, then ask for the figures of all ranks."""

    def __init__(self, problem: Problem, rows: AbstractRows, comm: AbstractComm) -> None:
        self.problem, self.rows, self.comm = problem, rows, comm

    @abc.abstractmethod
    def add(self, z: Tensor, chunk: Chunk, part: int) -> None:
        """The model's outputs for a chunk, and the piece that it is of."""

    @abc.abstractmethod
    def figures(self) -> tuple[float, float]:
        """The mean loss over all rows, and what `AbstractLoss.score` gives for them all at once."""


def tally_for(problem: Problem, rows: AbstractRows, comm: AbstractComm) -> AbstractTally:
    """How rows are grouped decides how their figures round, so that the number of ranks has no part in that.

    Few rows that are in memory anyway are scored at once; others shard by shard, which they are cut into from now on.
    """
    if rows.resident and not comm.cuts(rows) and rows.total * problem.size <= LITTLE_SWEEP:
        return _AtOnce(problem, rows, comm)
    rows.cut = True
    return STREAMED.get(problem.loss.metric, _Whole)(problem, rows, comm)


@final
class _AtOnce(AbstractTally):
    """Every rank looks at all rows as one process would: it takes no longer than that, and they cross but once."""

    def add(self, z: Tensor, chunk: Chunk, part: int) -> None:
        self.z, self.x, self.y = z, chunk.x, chunk.y

    def figures(self) -> tuple[float, float]:
        if self.comm.size > 1:
            x, y = self._rows_of_all()
            z = self.problem.model(x)
        else:
            z, y = self.z if self.x.is_contiguous() else self.problem.model(self.x.contiguous()), self.y
        return float(self.problem.loss(z, y).double().mean()), self.problem.loss.score(z, y)

    def _rows_of_all(self) -> tuple[Tensor, Tensor]:
        rows = self.rows
        assert isinstance(rows, Rows), "others are not in memory"
        if rows not in ROWS_OF_ALL:
            ROWS_OF_ALL[rows] = self.comm.gather_rows(rows.x, rows), self.comm.gather_rows(rows.y, rows)
        return ROWS_OF_ALL[rows]


@final
class _Whole(AbstractTally):
    """Keeps all outputs and targets: for any metric. Those of all ranks are brought together."""

    def __init__(self, problem: Problem, rows: AbstractRows, comm: AbstractComm) -> None:
        super().__init__(problem, rows, comm)
        self.z = rows.like.new_empty(rows.count, problem.outputs)  # at once: small results between large leave holes
        self.kept: list[Tensor] = []

    def add(self, z: Tensor, chunk: Chunk, part: int) -> None:
        take(self.z, chunk.rows).copy_(z)
        if not isinstance(self.rows, Rows):
            self.kept.append(chunk.y)

    def figures(self) -> tuple[float, float]:
        z, y = self.z, self.rows.y if isinstance(self.rows, Rows) else torch.cat(self.kept)
        if self.comm.size > 1:
            z, y = (self.comm.gather_rows(t, self.rows) for t in (z, y))
        return float(self.problem.loss(z, y).double().mean()), self.problem.loss.score(z, y)


class _AbstractStreamed(AbstractTally):
    """Keeps one small vector a piece: the number of rows, their loss, and what the score is made of."""

    def __init__(self, problem: Problem, rows: AbstractRows, comm: AbstractComm) -> None:
        super().__init__(problem, rows, comm)
        nothing = rows.like.new_zeros(2 + self.numbers(), dtype=torch.float64)
        self.parts = [nothing for _ in comm.starts(rows)]

    def add(self, z: Tensor, chunk: Chunk, part: int) -> None:
        loss = self.problem.loss(z, chunk.y).double().sum()
        counted = torch.cat([torch.stack([torch.full_like(loss, len(z)), loss]), self.of(z, chunk.y)])
        self.parts[part] = self.joined(self.parts[part], counted)

    def figures(self) -> tuple[float, float]:
        total = reduce(self.joined, self.comm.collect(self.parts, self.rows))
        count, loss, *_ = total.tolist()
        return loss / count, self.score(total)

    @abc.abstractmethod
    def numbers(self) -> int:
        """How many numbers `of` gives."""

    @abc.abstractmethod
    def of(self, z: Tensor, y: Tensor) -> Tensor:
        """What the score needs of a chunk."""

    @abc.abstractmethod
    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        """The vector of the rows of both."""

    @abc.abstractmethod
    def score(self, total: Tensor) -> float:
        """The score, from the vector of all rows."""


@final
class _Accuracy(_AbstractStreamed):
    """A share of the rows, or, of several labels at once, of all their entries, counted in whole entries: exact."""

    def numbers(self) -> int:
        return 1

    def of(self, z: Tensor, y: Tensor) -> Tensor:
        right = round(self.problem.loss.score(z, y) * len(z) * self.problem.outputs)
        return torch.tensor([right], dtype=torch.float64, device=z.device)

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    def score(self, total: Tensor) -> float:
        return float(total[2] / (total[0] * self.problem.outputs))


@final
class _R2(_AbstractStreamed):
    """1 - residual / total sum of squares, mean over outputs, as `losses.targets.r2`; sums in float64."""

    def numbers(self) -> int:
        return 3 * self.problem.outputs

    def of(self, z: Tensor, y: Tensor) -> Tensor:
        y = y.double()
        mean = y.mean(0)
        return torch.cat([(z - y).square().sum(0), (y - mean).square().sum(0), mean])

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        a, b, count = first[0], second[0], (first[0] + second[0]).clamp_min(1)
        _, _, mean_a = first[2:].view(3, -1)
        _, _, mean_b = second[2:].view(3, -1)
        apart = mean_b - mean_a
        between = apart.square() * (a * b / count)
        both = (first + second)[2:].view(3, -1)
        return torch.cat([(first + second)[:2], both[0], both[1] + between, mean_a + apart * (b / count)])

    def score(self, total: Tensor) -> float:
        residual, spread, _ = total[2:].view(3, -1)
        hit = (residual == 0).double()
        return float(torch.where(spread == 0, hit, 1 - residual / spread).mean())


STREAMED: dict[str, type[_AbstractStreamed]] = {"accuracy": _Accuracy, "r2": _R2}  # by what a loss calls its metric
