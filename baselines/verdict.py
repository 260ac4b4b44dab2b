"""Who won, and by how much: AnchoredADMM at its defaults against the best of its tuned rivals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from .methods import AVERAGE, Settings, entry
from .problems import Task
from .summary import Row

__all__ = ["OURS", "Duel", "Verdict", "accuracy", "highest", "judge", "settings_text", "shown"]

OURS = "anchored"
WITHIN = 0.003  # accuracy that ours may lack


@final
@dataclass(frozen=True)
class Duel:
    """Ours against one rival, to the highest target; infinite seconds stand for never."""

    rival: Row
    seconds: float
    ours: float

    @property
    def ratio(self) -> float:
        """How many times as fast ours is; 0 where it never gets there, NaN where neither does."""
        if math.isinf(self.ours):
            return math.nan if math.isinf(self.seconds) else 0.0
        return self.seconds / self.ours

    def __str__(self) -> str:
        times = f"{self.ratio:.2f}" if math.isfinite(self.ratio) else "only ours got there"
        words = "neither got there" if math.isnan(self.ratio) else times
        return f"{words}: {self.name}, {shown(self.seconds)}"

    @property
    def name(self) -> str:
        """The rival with its settings."""
        return f"{self.rival.method} {settings_text(self.rival.settings) or 'at its defaults'}"


@final
@dataclass(frozen=True)
class Verdict:
    """`allowed` is the fastest of all rivals, `plain` of those that do not average their weights."""

    task: Task
    ours: Row
    allowed: Duel
    plain: Duel | None
    most_accurate: Row

    @property
    def gap(self) -> float:
        """Accuracy that ours lacks of the best rival's; below 0 where it has more."""
        return accuracy(self.most_accurate) - accuracy(self.ours)

    @property
    def short(self) -> list[str]:
        """In what ours falls short of what is aimed at."""
        aim = self.task.ratio or 1.0
        tests = {"speed": self.allowed.ratio >= aim, "accuracy": self.gap <= WITHIN}
        return [name for name, passed in tests.items() if not passed]

    @property
    def sentence(self) -> str:
        """Who won."""
        mine, theirs, target = self.allowed.ours, self.allowed.seconds, f"{float(highest(self.ours)):.4g}"
        if math.isinf(mine) and math.isinf(theirs):
            return f"Neither {OURS} nor any rival got to {target}."
        much = max(mine, theirs) / min(mine, theirs)
        by = "the other never got there" if math.isinf(much) else f"by a factor of {much:.2f}"
        word, rival = "faster" if mine < theirs else "slower", self.allowed.rival.method
        return f"To {target}, {OURS} at its defaults is {word} than the best rival, {rival}: {by}."

    def lines(self) -> Iterator[str]:
        """All figures; whether they are good enough only where something is aimed at."""
        aim = self.task.ratio
        yield f"to {float(highest(self.ours)):.4g}: {OURS} at its defaults {shown(self.allowed.ours)}"
        yield f"ratio, averaging allowed{f' (aimed at: {aim:g})' if aim else ''}: {self.allowed}"
        if self.plain is not None:
            yield f"ratio, plain: {self.plain}"
        more = f"{abs(self.gap) * 100:.2f} points {'less' if self.gap > 0 else 'more'}"
        at_most = f" (at most {WITHIN * 100:g} less is aimed at)" if aim else ""
        both = f"{OURS} {accuracy(self.ours):.2%}, {self.most_accurate.method} {accuracy(self.most_accurate):.2%}"
        yield f"best accuracy: {both}: {more}{at_most}"
        if aim:
            yield f"SHORT in {' and '.join(self.short)}" if self.short else "reached"


def judge(task: Task, rows: Sequence[Row]) -> Verdict | None:
    """None where ours or all rivals did not take part. Rows are those of one rank."""
    alone = [row for row in rows if row.ranks == 1]
    ours = next((row for row in alone if row.method == OURS), None)
    rivals = [row for row in alone if entry(row.method).gradient]
    if ours is None or not rivals:
        return None

    plain = [row for row in rivals if not row.method.endswith(AVERAGE)]
    return Verdict(task, ours, _duel(ours, rivals), _duel(ours, plain) if plain else None, max(rivals, key=accuracy))


def _duel(ours: Row, rivals: Sequence[Row]) -> Duel:
    target = highest(ours)
    best = min(rivals, key=lambda row: (row.seconds[target].median, -accuracy(row)))
    return Duel(best, best.seconds[target].median, ours.seconds[target].median)


def accuracy(row: Row) -> float:
    return row.best_accuracy.median if row.best_accuracy else 0.0


def highest(row: Row) -> str:
    return max(row.seconds, key=float)


def settings_text(settings: Settings) -> str:
    return " ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items())


def shown(seconds: float) -> str:
    return f"{seconds:.3f} s" if math.isfinite(seconds) else "never"
