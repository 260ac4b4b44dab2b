"""Which trials of a search were better, and which settings won."""

from __future__ import annotations

import json
import math
import statistics

from .journal import Record
from .methods import Settings

__all__ = ["best_of", "score", "seconds_of", "settings_key"]


def score(record: Record) -> tuple[float, float]:
    """Smaller is better: the seconds to the highest target, then how much accuracy was missing."""
    accuracy = record["best_accuracy"]
    return seconds_of(record), 1.0 - accuracy if accuracy is not None else math.inf


def seconds_of(record: Record) -> float:
    there = record["reached"].get(f"{max(record['targets']):g}")
    return there[0] if there else math.inf


def best_of(records: list[Record]) -> Record:
    """Of one method: of the settings tried with most seeds those with the best median, and how they did."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(settings_key(record["settings"]), []).append(record)
    most = max(len({r["seed"] for r in group}) for group in groups.values())
    best = min((g for g in groups.values() if len({r["seed"] for r in g}) == most), key=_medians)
    seconds, missing = _medians(best)
    return {
        "settings": best[0]["settings"],
        "seconds": seconds if math.isfinite(seconds) else None,
        "best_accuracy": 1 - missing if math.isfinite(missing) else None,
        "trials": len(records),
        "wall": round(sum(r["wall"] for r in records), 1),
    }


def _medians(group: list[Record]) -> tuple[float, float]:
    seconds, missing = zip(*map(score, group), strict=True)
    return statistics.median(seconds), statistics.median(missing)


def settings_key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)
