"""Trials on digits, real and made up, for the tests."""

from __future__ import annotations

from typing import Any

from baselines import problems, trials
from baselines.trials import FAILED, Trial

__all__ = ["DIGITS", "made_up", "trial"]

DIGITS = problems.load("digits", None).fingerprint


def trial(method: str = "anchored", seconds: float = 0.2, target: float = 0.5, **changes: Any) -> Trial:
    """One on digits that takes no longer than a test may."""
    known: dict[str, Any] = {"settings": {}, "seed": 1, "threads": 1, "targets": (target,), "data": DIGITS}
    return Trial("digits", method, **{**known, "seconds": seconds, **changes})


def made_up(outcome: str) -> dict[str, Any]:
    """What a trial would have found."""
    if outcome == FAILED:
        return {**trials._failure("RuntimeError: no <luck>"), "wall": 1.0, "at": "now"}
    curve = [[0.01, 0.0, 0.1, 2.3], [0.05, 1.0, 0.6, 1.0], [0.1, 2.0, 0.9, 0.3]]
    figures = {"best_accuracy": 0.9, "trained_seconds": 0.1, "epochs": 2.0, "peak_mib": 300.0, "idle_mib": 280.0}
    reached = {"0.5": [0.05, 1.0]}
    return {"outcome": outcome, "message": "", "reached": reached, "curve": curve, **figures, "wall": 1.0, "at": "now"}
