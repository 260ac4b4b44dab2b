"""Measuring the model as it is, by calling it: loss and metric on the training rows and on held-out ones."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from .data import AbstractRows, Chunk, Rows, rows_of, take
from .problem import Problem
from .record import Row

__all__ = ["Judge"]

EVALUATION_ROWS = 16_384  # rows of one forward pass

Evaluate = Callable[[nn.Module], Mapping[str, float]]


@final
class Judge:
    """Adds the model's figures to a row of the history, and knows which of them tells the best row."""

    def __init__(
        self, problem: Problem, rows: AbstractRows, validation: AbstractRows | None, evaluate: Any, monitor: str | None
    ) -> None:
        """`evaluate` is held-out data or a function of the model."""
        self.problem, self.sets = problem, {"train_": rows}
        self.custom: Evaluate | None = evaluate if callable(evaluate) else None
        if evaluate is not None and self.custom is None:
            self.sets["test_"] = rows_of(evaluate, problem, "evaluate")
        if validation is not None:
            self.sets["validation_"] = validation
        own = self.custom is not None and validation is None
        self._monitor = monitor or (None if own else f"{list(self.sets)[-1]}{problem.loss.metric}")

    @property
    def monitor(self) -> str:
        assert self._monitor is not None
        return self._monitor

    def judge(self, row: Row) -> Row:
        """`row` with the model's figures added."""
        for prefix, rows in self.sets.items():
            loss, score = self.figures(rows)
            row["loss" if prefix == "train_" else f"{prefix}loss"] = loss
            row[f"{prefix}{self.problem.loss.metric}"] = score
        own = self.custom(self.problem.model) if self.custom else {}
        if not isinstance(own, Mapping) or not row.keys().isdisjoint(own):
            raise ValueError(
                f"evaluate returned {own!r}; a dict of numbers is expected, by other names than {list(row)}"
            )
        self._monitor = self._monitor or next(iter(own), f"train_{self.problem.loss.metric}")
        row |= {k: float(v) for k, v in own.items()}
        if self._monitor not in row:
            raise ValueError(f"monitor is {self._monitor!r}, which is not recorded; recorded are {', '.join(row)}")
        return row

    @torch.no_grad()
    def figures(self, rows: AbstractRows) -> tuple[float, float]:
        """The mean loss, and the score."""
        kind = _Whole if rows.resident else STREAMED.get(self.problem.loss.metric, _Whole)
        tally: _AbstractTally = kind(self.problem, rows)
        for chunk in rows.chunks(EVALUATION_ROWS):
            tally.add(self.problem.model(chunk.x), chunk)
        return tally.loss(), tally.score()


class _AbstractTally(abc.ABC):
    """Loss and score of rows that come chunk by chunk."""

    def __init__(self, problem: Problem, rows: AbstractRows) -> None:
        self.problem, self.rows = problem, rows

    @abc.abstractmethod
    def add(self, z: Tensor, chunk: Chunk) -> None:
        """The model's outputs for a chunk."""

    @abc.abstractmethod
    def loss(self) -> float:
        """The mean over all rows."""

    @abc.abstractmethod
    def score(self) -> float:
        """What `AbstractLoss.score` gives for all rows at once."""


@final
class _Whole(_AbstractTally):
    """Keeps all outputs and targets: for any metric, and for rows that are in memory anyway."""

    def __init__(self, problem: Problem, rows: AbstractRows) -> None:
        super().__init__(problem, rows)
        self.z = rows.like.new_empty(rows.count, problem.outputs)  # at once: small results between large leave holes
        self.kept: list[Tensor] = []

    def add(self, z: Tensor, chunk: Chunk) -> None:
        take(self.z, chunk.rows).copy_(z)
        if not isinstance(self.rows, Rows):
            self.kept.append(chunk.y)

    def loss(self) -> float:
        return float(self.problem.loss(self.z, self._y()).double().mean())

    def score(self) -> float:
        return self.problem.loss.score(self.z, self._y())

    def _y(self) -> Tensor:
        return self.rows.y if isinstance(self.rows, Rows) else torch.cat(self.kept)


class _AbstractStreamed(_AbstractTally):
    """Keeps sums."""

    total = 0.0
    count = 0

    def add(self, z: Tensor, chunk: Chunk) -> None:
        self.total += float(self.problem.loss(z, chunk.y).double().sum())
        self.count += len(z)
        self.add_score(z, chunk.y)

    @abc.abstractmethod
    def add_score(self, z: Tensor, y: Tensor) -> None:
        """As `add`, for the score."""

    def loss(self) -> float:
        return self.total / self.count


@final
class _Accuracy(_AbstractStreamed):
    """A share of the rows: that of all is the mean of those of the chunks."""

    right = 0.0

    def add_score(self, z: Tensor, y: Tensor) -> None:
        self.right += self.problem.loss.score(z, y) * len(z)

    def score(self) -> float:
        return self.right / self.count


@final
class _R2(_AbstractStreamed):
    """1 - residual / total sum of squares, mean over outputs, as `losses.targets.r2`; sums in float64."""

    def __init__(self, problem: Problem, rows: AbstractRows) -> None:
        super().__init__(problem, rows)
        zero = rows.like.new_zeros(problem.outputs, dtype=torch.float64)
        self.residual, self.spread, self.mean = zero, zero, zero

    def add_score(self, z: Tensor, y: Tensor) -> None:
        y = y.double()
        before, mean = self.count - len(y), y.mean(0)
        apart = mean - self.mean
        self.residual = self.residual + (z - y).square().sum(0)
        self.spread = self.spread + (y - mean).square().sum(0) + apart.square() * (before * len(y) / self.count)
        self.mean = self.mean + apart * (len(y) / self.count)

    def score(self) -> float:
        hit = (self.residual == 0).double()
        return float(torch.where(self.spread == 0, hit, 1 - self.residual / self.spread).mean())


STREAMED: dict[str, type[_AbstractStreamed]] = {"accuracy": _Accuracy, "r2": _R2}  # by what a loss calls its metric
