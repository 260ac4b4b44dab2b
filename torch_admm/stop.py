"""Outcomes of a run, and the rules that end it by looking at its history."""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Sequence
from numbers import Real
from typing import final

from .arguments import positive, positive_int
from .record import Row

__all__ = ["AbstractStop", "Outcome", "Patience", "Target", "TimeBudget", "Tolerance", "is_better"]


class Outcome(enum.Enum):
    """Why a run ended; the value is the sentence for people."""

    MAX_SWEEPS = "all sweeps were made"
    TARGET = "the target was reached"
    TOLERANCE = "the loss no longer changes by more than the tolerance"
    PATIENCE = "the monitored metric has not improved for as long as patience allows"
    TIME = "the time budget is used up"
    INTERRUPTED = "the run was interrupted from the keyboard"
    NON_FINITE = "a weight became NaN or infinite"

    def __str__(self) -> str:
        return self.value


FALLING = ("loss", "error", "mse", "rmse", "mae", "nll")


def is_better(key: str, value: float, than: float) -> bool:
    """Smaller is better for residuals and for names that end as in FALLING, larger for all others; NaN never is."""
    if math.isnan(value) or math.isnan(than):
        return not math.isnan(value)
    return value < than if key.lower().endswith(FALLING) or key.startswith("residual") else value > than


class AbstractStop(abc.ABC):
    """A rule that may end the run after a row has been recorded."""

    @abc.abstractmethod
    def check(self, history: Sequence[Row], monitor: str) -> Outcome | None:
        """The outcome if the run should end now. `monitor` is the key that decides which row is best."""


def _column(history: Sequence[Row], key: str, name: str) -> list[float]:
    if key not in history[-1]:
        raise ValueError(f"{name} watches {key!r}, which is not recorded; recorded are {', '.join(history[-1])}")
    return [row[key] for row in history if key in row]


@final
class Target(AbstractStop):
    """Stop once the monitored metric (or `key`) is at least as good as `value`."""

    def __init__(self, value: float, key: str | None = None) -> None:
        """`value` in the metric's own unit: an accuracy of 95 % is 0.95."""
        if not isinstance(value, Real) or math.isnan(value):
            raise ValueError(f"value is {value!r}; a number is expected")
        self.value: float = float(value)
        self.key: str | None = key

    def check(self, history: Sequence[Row], monitor: str) -> Outcome | None:
        key = self.key or monitor
        now = _column(history, key, "Target")[-1]
        return Outcome.TARGET if now == self.value or is_better(key, now, self.value) else None


@final
class Tolerance(AbstractStop):
    """Stop once `key` has changed by less than `relative` of itself over the last `evaluations` rows."""

    def __init__(self, relative: float = 1e-4, *, evaluations: int = 3, key: str = "loss") -> None:
        """Several rows in a row, so that one flat sweep does not end a run."""
        self.relative = positive("relative", relative)
        self.evaluations = positive_int("evaluations", evaluations)
        self.key = key

    def check(self, history: Sequence[Row], monitor: str) -> Outcome | None:
        last = _column(history, self.key, "Tolerance")[-self.evaluations - 1 :]
        flat = len(last) > self.evaluations and max(last) - min(last) <= self.relative * abs(last[-1])
        return Outcome.TOLERANCE if flat else None


@final
class Patience(AbstractStop):
    """Stop once the monitored metric (or `key`) has not improved for `evaluations` rows."""

    def __init__(self, evaluations: int = 10, key: str | None = None) -> None:
        """`evaluations` counts recorded rows, not sweeps."""
        self.evaluations, self.key = positive_int("evaluations", evaluations), key

    def check(self, history: Sequence[Row], monitor: str) -> Outcome | None:
        key = self.key or monitor
        values = _column(history, key, "Patience")
        best = 0
        for i, value in enumerate(values):
            best = i if is_better(key, value, values[best]) else best
        return Outcome.PATIENCE if len(values) - 1 - best >= self.evaluations else None


@final
class TimeBudget(AbstractStop):
    """Stop once the run has taken `seconds` on its own clock, which leaves out evaluation."""

    def __init__(self, seconds: float) -> None:
        """Looked at after each recorded row: the last sweep is finished, not cut."""
        self.seconds = positive("seconds", seconds)

    def check(self, history: Sequence[Row], monitor: str) -> Outcome | None:
        return Outcome.TIME if history[-1]["seconds"] >= self.seconds else None
