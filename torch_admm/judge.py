"""Measuring the model as it is, by calling it: loss and metric on the training rows and on held-out ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from .comm import AbstractComm
from .data import AbstractRows, rows_of
from .identity import of_rows
from .problem import Problem
from .record import Row
from .tally import tally_for

__all__ = ["Judge"]

EVALUATION_ROWS = 16_384  # rows of one forward pass

Evaluate = Callable[[nn.Module], Mapping[str, float]]


@final
class Judge:
    """Adds the model's figures to a row of the history, and knows which of them tells the best row."""

    def __init__(
        self,
        problem: Problem,
        rows: AbstractRows,
        validation: AbstractRows | None,
        evaluate: Any,
        monitor: str | None,
        comm: AbstractComm,
    ) -> None:
        """`evaluate` is held-out data or a function of the model, which rank 0 calls. `rows` are those of this rank."""
        self.problem, self.comm, self.sets = problem, comm, {"train_": rows}
        self.custom: Evaluate | None = evaluate if callable(evaluate) else None
        self.held: dict[str, AbstractRows] = {}  # those of all ranks
        if evaluate is not None and self.custom is None:
            self.held["test"] = rows_of(evaluate, problem, "evaluate")
        if validation is not None:
            self.held["validation"] = validation
        self.sets |= {f"{name}_": comm.part(held) for name, held in self.held.items()}
        own = self.custom is not None and validation is None
        self._monitor = monitor or (None if own else f"{list(self.sets)[-1]}{problem.loss.metric}")

    @property
    def monitor(self) -> str:
        assert self._monitor is not None
        return self._monitor

    def measured(self) -> dict[str, int | bool]:
        """What figures are made of: rows of each set, on all ranks, and whether there is a function of the user's."""
        return {prefix: rows.total for prefix, rows in self.sets.items()} | {"own": self.custom is not None}

    def about(self) -> dict[str, str]:
        """Held-out rows, in words: figures on others would not go on from those there are."""
        return {name: said for kind, held in self.held.items() for name, said in of_rows(held, f"{kind} ").items()}

    def watched(self, monitor: str) -> str:
        """What an earlier process watched, unless something else is asked for now."""
        return self._monitor or monitor

    def resume(self, monitor: str) -> None:
        self._monitor = self.watched(monitor)

    def judge(self, row: Row) -> Row:
        """`row` with the model's figures added."""
        for prefix, rows in self.sets.items():
            loss, score = self.figures(rows)
            row["loss" if prefix == "train_" else f"{prefix}loss"] = loss
            row[f"{prefix}{self.problem.loss.metric}"] = score
        own = self._own_figures(row)
        self._monitor = self._monitor or next(iter(own), f"train_{self.problem.loss.metric}")
        row |= own
        if self._monitor not in row:
            raise ValueError(f"monitor is {self._monitor!r}, which is not recorded; recorded are {', '.join(row)}")
        return row

    def _own_figures(self, row: Row) -> dict[str, float]:
        """What the user's function says on rank 0, on all ranks."""
        if self.custom is None:
            return {}
        own: Any = {}
        with self.comm.together():
            if self.comm.rank == 0:
                own = self.custom(self.problem.model)
            if not isinstance(own, Mapping) or not row.keys().isdisjoint(own):
                said = f"a dict of numbers is expected, by other names than {list(row)}"
                raise ValueError(f"evaluate returned {own!r}; {said}")
            own = {str(k): float(v) for k, v in own.items()}
        agreed: dict[str, float] = json.loads(self.comm.texts(json.dumps(own))[0])
        return agreed

    @torch.no_grad()
    def figures(self, rows: AbstractRows) -> tuple[float, float]:
        """The mean loss, and the score, over the rows of all ranks."""
        tally = tally_for(self.problem, rows, self.comm)
        for part, chunk in self.comm.portions(rows, EVALUATION_ROWS):
            tally.add(self.problem.model(chunk.x), chunk, part)
        return tally.figures()
