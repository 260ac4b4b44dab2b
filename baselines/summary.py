"""Trials summed up: median and spread over seeds for each method, as a table, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from .journal import Record

__all__ = ["COLUMNS", "Row", "Spread", "as_csv", "as_text", "cells", "loaded", "named", "summarise"]


@final
@dataclass(frozen=True, order=True)
class Spread:
    """Median, least and greatest over seeds; infinite seconds stand for never."""

    median: float
    low: float
    high: float

    def shown(self, form: str) -> str:
        """The median and, where there is any, the spread."""
        if not math.isfinite(self.median):
            return "never" if self.low == math.inf else f"never (once {self.low:{form}})"
        median, low = f"{self.median:{form}}", f"{self.low:{form}}"
        high = f"{self.high:{form}}" if math.isfinite(self.high) else "never"
        return median if low == high else f"{median} ({low} to {high})"


def spread(values: Sequence[float]) -> Spread:
    """Where half of the values are infinite, so is the median."""
    return Spread(statistics.median(values), min(values), max(values))


@final
@dataclass(frozen=True)
class Row:
    """One method over its seeds. What failed counts as never having got there."""

    method: str
    settings: Record
    ranks: int
    outcomes: dict[str, int]
    seconds: dict[str, Spread]  # by target
    epochs: dict[str, Spread]
    best_accuracy: Spread | None
    memory_mib: Spread | None  # beyond what the data and an idle process take
    message: str  # of the first trial that failed

    @property
    def seeds(self) -> int:
        return sum(self.outcomes.values())


def summarise(records: Sequence[Record]) -> list[Row]:
    """One row a method and number of ranks, the fastest to the highest target first."""
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["method"], record["ranks"]), []).append(record)
    rows = [_row(group) for group in groups.values()]
    return sorted(rows, key=_order)


def loaded(stored: Sequence[Record]) -> list[Row]:
    """Rows as they were before they became JSON, which has no infinity."""
    return [Row(**{name: _loaded(name, value) for name, value in row.items()}) for row in stored]


def _loaded(name: str, value: Any) -> Any:
    if name in ("seconds", "epochs"):
        return {target: _spread(part) for target, part in value.items()}
    return _spread(value) if name in ("best_accuracy", "memory_mib") and value is not None else value


def _spread(stored: Record) -> Spread:
    return Spread(**{name: math.inf if value is None else value for name, value in stored.items()})


def _order(row: Row) -> tuple[float, float]:
    highest = max(row.seconds, key=float)
    return row.seconds[highest].median, -(row.best_accuracy.median if row.best_accuracy else 0.0)


def _row(group: list[Record]) -> Row:
    first, targets = group[0], [f"{target:g}" for target in group[0]["targets"]]
    points = {t: [r["reached"].get(t) or (math.inf, math.inf) for r in group] for t in targets}
    measured = [r for r in group if r["best_accuracy"] is not None]
    return Row(
        first["method"],
        first["settings"],
        first["ranks"],
        dict(Counter(r["outcome"] for r in group)),
        {t: spread([p[0] for p in points[t]]) for t in targets},
        {t: spread([p[1] for p in points[t]]) for t in targets},
        spread([r["best_accuracy"] for r in measured]) if measured else None,
        spread([r["peak_mib"] - r["idle_mib"] for r in measured]) if measured else None,
        next((r["message"] for r in group if r["best_accuracy"] is None), ""),
    )


COLUMNS = ("epochs", "best accuracy", "memory, MiB", "outcome")


def titles(rows: Sequence[Row]) -> list[str]:
    targets = [f"{float(t):.4g}, s" for t in rows[0].seconds] if rows else []
    return ["method", *(f"to {t}" for t in targets), *COLUMNS]


def cells(row: Row) -> list[str]:
    """As people read them."""
    highest = max(row.seconds, key=float)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items())
    return [
        named(row.method, row.ranks),
        *(s.shown(".3f") for s in row.seconds.values()),
        row.epochs[highest].shown(".3g"),
        row.best_accuracy.shown(".2%") if row.best_accuracy else "",
        row.memory_mib.shown(".0f") if row.memory_mib else "",
        f"{outcomes}: {row.message}" if row.message else outcomes,
    ]


def named(method: str, ranks: int) -> str:
    return method if ranks == 1 else f"{method}, {ranks} ranks"


def as_text(rows: Sequence[Row]) -> str:
    """For a terminal."""
    table = [titles(rows), *(cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def as_csv(rows: Sequence[Row]) -> str:
    """One line a method, numbers only; an empty field for never."""
    lines = [_flat(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    named = {f"seconds_to_{t}": s for t, s in row.seconds.items()} | {
        f"epochs_to_{t}": s for t, s in row.epochs.items()
    }
    named |= {"best_accuracy": row.best_accuracy, "memory_mib": row.memory_mib}  # type: ignore[dict-item]
    flat: dict[str, Any] = {"method": row.method, "ranks": row.ranks, "seeds": row.seeds}
    for name, values in named.items():
        for part in ("median", "low", "high"):
            value = getattr(values, part, None)
            flat[f"{name}_{part}"] = None if value is None or math.isinf(value) else round(value, 6)
    return {**flat, **{f"trials_{o.replace(' ', '_')}": row.outcomes.get(o, 0) for o in OUTCOMES}}


OUTCOMES = ("reached", "timed out", "diverged", "failed")
