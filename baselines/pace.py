"""How far trials of a search have got by some times, and which are too far behind to go on.

The median stopping rule of Google Vizier (Golovin et al., KDD 2017): a trial ends where it is less accurate than the
median of its method's earlier trials was at that time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .journal import Record

__all__ = ["by_then", "marks"]

MARKS = (0.25, 0.5, 1.0, 2.0, 4.0)  # seconds of training
EARLIER = 5  # trials at least that have got there


def by_then(curve: Sequence[Sequence[float]]) -> dict[str, float]:
    """The best accuracy by each of the marks that the trial has lived to see."""
    end = curve[-1][0] if curve else 0.0
    return {f"{mark:g}": max((row[2] for row in curve if row[0] <= mark), default=0.0) for mark in MARKS if mark <= end}


def marks(done: Sequence[Record]) -> tuple[tuple[float, float], ...]:
    """(seconds, accuracy) that the next trial has to reach."""
    columns = {mark: [r["by_then"][f"{mark:g}"] for r in done if f"{mark:g}" in r["by_then"]] for mark in MARKS}
    return tuple((mark, statistics.median(column)) for mark, column in columns.items() if len(column) >= EARLIER)
