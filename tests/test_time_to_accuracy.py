"""The benchmark of time to accuracy: it tunes every rival, compares, and says who won."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from baselines import compare, problems, search
from baselines.methods import METHODS
from baselines.trials import REACHED, Trial
from benchmarks import time_to_accuracy
from tests.trials import made_up


@pytest.mark.parametrize("problem", time_to_accuracy.PROBLEMS)
def test_every_rival_is_tuned_over_twenty_settings(problem: str) -> None:
    args = argparse.Namespace(quick=False, threads=2, data_dir=None)
    settings: dict[str, int] = {}
    for wanted in time_to_accuracy.searches(problem, args):
        assert wanted.trials is not None
        for method in wanted.methods:
            family = method.removesuffix("+average")
            settings[family] = settings.get(family, 0) + wanted.trials
    rivals = [name for name in problems.task(problem).methods if METHODS[name].gradient]
    assert rivals
    assert all(settings[name] >= 20 for name in rivals)


def test_time_to_accuracy_tunes_compares_and_says_who_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole run of it with trials that take no time: SGD is slower than ours, but faster with averaged weights."""
    times = {"anchored": 0.05, "sgd": 0.2, "sgd+average": 0.04}

    def fake(wanted: Trial, *_: Any) -> dict[str, Any]:
        made = made_up(REACHED)
        return {**made, **wanted.named, "reached": {"0.5": [times.get(wanted.method, 0.5), 1.0]}}

    task = problems.Task("digits", (64, 64, 10), "cross_entropy", (0.5,), 1.0, ratio=1.5, methods=("anchored", "sgd"))
    monkeypatch.setitem(problems.PROBLEMS, "digits", task)
    monkeypatch.setattr(time_to_accuracy, "PROBLEMS", ["digits"])
    for module in (compare, search):
        monkeypatch.setattr(module, "run_apart", fake)
    options = ["--data-dir", str(tmp_path), "--problems", "digits", "--out", str(tmp_path)]
    assert time_to_accuracy.main(options) == 0
    screen = capsys.readouterr().out
    assert "digits: 57 trials of the search" in screen  # 3 methods, 15 settings, 2 of them from 2 more seeds
    assert len([line for line in screen.splitlines() if line.startswith("  sgd ")]) == 19
    assert "ratio, averaging allowed (aimed at: 1.5): 0.80: sgd+average lr=" in screen
    assert "ratio, plain: 4.00: sgd lr=" in screen
    assert "SHORT in speed" in screen
    config = json.loads((tmp_path / "digits" / "config.json").read_text())
    assert config["methods"]["anchored"]["settings"] == {}
    assert config["seeds"] == [1, 2, 3, 4, 5]
    assert "search: 19 trials, tpe, seed 0" in config["methods"]["sgd"]["where"]
    assert time_to_accuracy.main([*options, "--threads", "0"]) == 2
    assert "threads is 0" in capsys.readouterr().err
