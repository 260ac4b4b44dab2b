"""The search: samplers, budgets, going on after a kill, and what is stored."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from baselines import CG, pace, problems, samplers, search
from baselines.journal import read
from baselines.methods import METHODS, Choice, Entry, Log, entry
from baselines.ranking import best_of, score
from baselines.samplers import AbstractSampler, Grid, Tpe
from baselines.search import Search
from baselines.trials import GIVEN_UP, Trial, run_apart


def wanted(**changes: Any) -> Search:
    known: dict[str, Any] = {"methods": ("sgd",), "target": 0.9, "seconds": 2.0, "trials": 6}
    return Search("digits", **{**known, **changes})


def record(
    settings: dict[str, Any], seconds: float | None, accuracy: float | None = 0.5, **more: Any
) -> dict[str, Any]:
    reached = {"0.9": None if seconds is None else [seconds, 1.0]}
    return {
        "settings": settings,
        "targets": [0.9],
        "reached": reached,
        "best_accuracy": accuracy,
        "wall": 1.0,
        "seed": 0,
        **more,
    }


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Trials that take no time: the closer lr is to 0.3, the faster; those of 2 and more never get there."""
    asked: list[Trial] = []

    def run(trial: Trial, folder: Path | None) -> dict[str, Any]:
        if trial.seed < 1000:  # the rest only confirms
            asked.append(trial)
        lr = trial.settings.get("lr", 1.0)
        seconds = None if lr >= 2 else 0.1 + abs(math.log(lr / 0.3))
        made = record(trial.settings, seconds, 0.95 if seconds else 0.9 / lr, curve=[], outcome="")
        return {**made, **trial.named}

    monkeypatch.setattr(search, "run_apart", run)
    return asked


def test_score_orders_by_time_then_by_accuracy() -> None:
    faster, slower = record({}, 0.5), record({}, 100.0, 0.99)
    closer, further, failed = record({}, None, 0.89), record({}, None, 0.2), record({}, None, None)
    right = [faster, slower, closer, further, failed]
    assert sorted(right, key=score) == right
    assert sorted([failed, further, closer, slower, faster], key=score) == right
    costs = [samplers._cost(r) for r in right]
    assert costs == sorted(costs)
    assert all(map(math.isfinite, costs))


def test_grid_takes_every_combination_once() -> None:
    space = {"a": Choice((1, 2)), "b": Log((0.1, 1.0, 10.0))}
    grid = Grid(space, seed=0)
    grid.tell({"a": 1, "b": 0.1}, record({}, 1.0))
    taken = list(iter(grid.ask, None))
    assert len(taken) == len({json.dumps(t) for t in taken}) == 5
    assert {"a": 1, "b": 0.1} not in taken
    assert taken != list(iter(Grid(space, seed=1).ask, None))[:5]


def test_tpe_learns_from_what_it_is_told() -> None:
    """Told 40 trials whose time is the distance of lr from 0.3, it asks nearer to that than chance would."""
    sampler = Tpe({"lr": Log((1e-4, 10.0)), "size": Choice((1, 2, None))}, seed=0)
    for i in range(40):
        lr = 10 ** (-4 + 5 * i / 39)
        sampler.tell({"lr": lr, "size": None}, record({}, 0.1 + abs(math.log(lr / 0.3))))
    asked = [sampler.ask() for _ in range(10)]
    assert all(a is not None and 1e-4 <= a["lr"] <= 10 for a in asked)
    assert sum(0.03 < a["lr"] < 3 for a in asked if a) >= 8


def test_tpe_leaves_out_what_its_space_no_longer_has() -> None:
    sampler = Tpe({"lr": Log((0.1, 1.0))}, seed=0)
    for settings in ({"lr": 5.0}, {"lr": 0.5, "momentum": 0.9}, {}):
        sampler.tell(settings, record({}, 1.0))
    assert len(sampler.study.trials) == 0


def test_choices_alone_are_a_grid() -> None:
    assert isinstance(samplers.SAMPLERS["tpe"]({"size": Choice((1, 2))}, 0), Grid)
    assert isinstance(samplers.SAMPLERS["tpe"](entry("sgd").space, 0), Tpe)


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_search_stores_the_best_with_its_origin(sampler: str, fake: list[Trial], tmp_path: Path) -> None:
    stored = search.search(wanted(sampler=sampler, trials=12), tmp_path, show=False)
    assert [r["seed"] for r in read(tmp_path / "search.jsonl")] == [0] * 12 + [1001, 1002] * 2
    found = stored["methods"]["sgd"]
    best = min(read(tmp_path / "search.jsonl"), key=score)
    assert found["settings"] == best["settings"]
    assert found["seconds"] == best["reached"]["0.9"][0]
    assert found["how"] == {
        **{"target": 0.9, "seconds": 2.0, "trials": 12, "budget": None, "sampler": sampler, "jobs": 1, "seed": 0},
        "threads": 2,
        "command": "python -m baselines.search --problem digits --target 0.9 --seconds 2.0 --trials 12 "
        f"--sampler {sampler} --jobs 1 --seed 0 --threads 2 --methods sgd",
    }
    assert {"processor", "cores", "torch", "torch_admm", "python", "load_before"} <= found["machine"].keys()
    assert json.loads((tmp_path / "settings.json").read_text()) == stored


def test_one_lucky_run_does_not_make_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is fastest by far from the first seed is slow from others."""
    times = {4: (0.1, 5.0), 10: (0.5, 0.6), 25: (0.9, 0.7)}
    monkeypatch.setitem(METHODS, "cg", Entry(CG, {"max_evals": Choice(tuple(times))}))

    def run(trial: Trial, folder: Path | None) -> dict[str, Any]:
        first, later = times[trial.settings["max_evals"]]
        made = record(trial.settings, first if trial.seed == 0 else later, 0.95, curve=[])
        return {**made, **trial.named}

    monkeypatch.setattr(search, "run_apart", run)
    found = search.search(wanted(methods=("cg",)), tmp_path, show=False)["methods"]["cg"]
    assert found["settings"] == {"max_evals": 10}
    assert found["seconds"] == 0.6
    assert found["trials"] == 3 + 4


def test_goes_on_with_what_is_missing(fake: list[Trial], tmp_path: Path) -> None:
    search.search(wanted(trials=4), tmp_path, show=False)
    first = read(tmp_path / "search.jsonl")
    search.search(wanted(trials=9), tmp_path, show=False)
    assert len(fake) == 9
    assert read(tmp_path / "search.jsonl")[: len(first)] == first
    search.search(wanted(trials=9), tmp_path, show=False)
    assert len(fake) == 9
    search.search(wanted(trials=9, seed=1), tmp_path, show=False)
    assert len(fake) == 18


def test_a_grid_goes_on_with_what_it_has_not_tried(fake: list[Trial], tmp_path: Path) -> None:
    for trials in (20, 60):
        search.search(wanted(trials=trials, sampler="grid"), tmp_path, show=False)
    assert len({json.dumps(trial.settings) for trial in fake}) == len(fake) == 60


def test_other_methods_stay_in_the_file(fake: list[Trial], tmp_path: Path) -> None:
    search.search(wanted(trials=3), tmp_path, show=False)
    stored = search.search(wanted(trials=3, methods=("adam", "lbfgs")), tmp_path, show=False)
    assert list(stored["methods"]) == ["sgd", "adam", "lbfgs"]
    assert "lbfgs" in "\n".join(search.lines(stored))


def test_budget_in_seconds_is_shared_by_jobs(fake: list[Trial], tmp_path: Path) -> None:
    """Every trial says that it took one second on the wall; with two jobs there is time for twice as many."""
    search.search(wanted(trials=None, budget=4.0), tmp_path / "one", show=False)
    assert len(fake) == 4
    search.search(wanted(trials=None, budget=4.0, jobs=2), tmp_path / "two", show=False)
    assert 8 <= len(fake) - 4 <= 9
    assert fake[-1].threads == 1


def test_a_grid_ends_when_all_is_tried(fake: list[Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "cg", Entry(CG, {"max_evals": Choice((4, 10, 25))}, starts=({"max_evals": 10},)))
    stored = search.search(wanted(trials=99, methods=("cg",)), tmp_path, show=False)
    assert fake[0].settings == {"max_evals": 10}
    assert sorted(trial.settings["max_evals"] for trial in fake) == [4, 10, 25]
    assert stored["methods"]["cg"]["trials"] == 3 + 4


def test_a_search_begins_with_what_served_elsewhere(fake: list[Trial], tmp_path: Path) -> None:
    for trials in (3, 9):
        search.search(wanted(trials=trials), tmp_path, show=False)
    starts = list(entry("sgd").starts)
    assert [trial.settings for trial in fake][: len(starts)] == starts
    assert all(trial.settings not in starts for trial in fake[len(starts) :])


def test_what_the_problem_settles_is_not_searched() -> None:
    some, everything = (Search(name, ("lbfgs",), 0.9, 1.0, trials=1) for name in ("mnist-4096", "higgs-full"))
    assert "batch_size" not in some.space("lbfgs")
    assert "hold" in some.space("lbfgs")
    assert {"batch_size", "hold"}.isdisjoint(everything.space("lbfgs"))
    starts = everything.starts("lbfgs")
    assert all(start.keys() == everything.space("lbfgs").keys() for start in starts)
    assert len({json.dumps(start) for start in starts}) == len(starts)


def test_marks_are_medians_of_earlier_trials() -> None:
    curve = [[0.0, 0, 0.1, 9.0], [0.2, 0, 0.5, 9.0], [0.3, 0, 0.4, 9.0], [1.1, 0, 0.9, 9.0]]
    assert pace.by_then(curve) == {"0.25": 0.5, "0.5": 0.5, "1": 0.5}
    assert pace.by_then([]) == {}
    done = [{"by_then": {"0.25": a}} for a in (0.1, 0.2, 0.3, 0.4, 0.9)]
    assert pace.marks(done) == ((0.25, 0.3),)
    assert pace.marks(done[1:]) == ()


def test_one_that_is_behind_is_given_up() -> None:
    data = problems.load("digits", None).fingerprint
    trial = Trial("digits", "sgd", {}, 0, 1, 60.0, (1.0,), data, to_the_end=False, marks=((0.1, 0.05), (0.2, 1.1)))
    record = run_apart(trial, None)
    assert record["outcome"] == GIVEN_UP
    assert 0.2 <= record["trained_seconds"] < 60


def test_the_best_of_all_methods_bounds_a_trial(fake: list[Trial], tmp_path: Path) -> None:
    """SGD may take 9 s, until one of its trials takes 0.1 s; from there on, whoever is next has a third of that."""
    search.search(wanted(trials=10, seconds=9.0, sampler="grid", methods=("sgd", "adam")), tmp_path, show=False)
    assert fake[0].seconds == 9.0
    assert not fake[0].to_the_end
    assert [trial.seconds for trial in fake if trial.method == "adam"] == [3.0] * 10


def test_never_reached_is_said() -> None:
    best = best_of([record({"lr": 1}, None, 0.3, seed=0), record({"lr": 2}, None, 0.6, seed=0)])
    assert best["settings"] == {"lr": 2}
    assert best["seconds"] is None
    stored = {"methods": {"sgd": best}}
    assert "never reached, 2 trials" in next(search.lines(stored))


def test_real_trials_two_at_a_time_and_a_torn_journal(tmp_path: Path) -> None:
    """As a kill leaves it: in the middle of a line. That trial is run again, and the others stay."""
    options = ["--problem", "digits", "--methods", "sgd", "--target", "0.5", "--seconds", "0.2", "--sampler", "grid"]
    command = [*options, "--jobs", "2", "--trials", "4", "--out", str(tmp_path)]
    journal = tmp_path / "search.jsonl"
    assert search.main(command) == 0
    before = read(journal)
    assert len(before) == 4 + 4
    assert all(r["threads"] == 1 for r in before)
    journal.write_bytes(journal.read_bytes()[:-20])
    assert search.main(command) == 0
    after = read(journal)
    assert after[:7] == before[:7]
    assert len(after) == 8
    assert json.loads((tmp_path / "settings.json").read_text())["data"] == problems.load("digits", None).fingerprint


BAD: dict[str, tuple[list[str], str]] = {
    "problem": (["--problem", "iris"], "problem is 'iris'; one of higgs, svhn"),
    "method": (["--methods", "newton"], "method is 'newton'; one of anchored"),
    "sampler": (["--sampler", "random"], "sampler is 'random'; one of tpe, grid is expected"),
    "jobs": (["--jobs", "0"], "jobs is 0; a whole number of at least 1 is expected"),
    "target": (["--target", "-1"], "target is -1.0; a finite number above 0 is expected"),
    "no data folder": (["--problem", "svhn"], "svhn needs --data-dir"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, message = BAD[name]
    assert search.main(["--problem", "digits", "--out", str(tmp_path), *options]) == 2
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)
    assert not (tmp_path / "settings.json").exists()


def test_a_budget_is_needed() -> None:
    with pytest.raises(ValueError, match="neither trials nor budget is given"):
        wanted(trials=None)


def test_tpe_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert search.main(["--problem", "digits", "--methods", "sgd", "--out", str(tmp_path)]) == 2
    with pytest.raises(ImportError, match=r'needs Optuna: pip install "torch-admm\[compare\]"'):
        raise ImportError(capsys.readouterr().err)


def test_interrupting_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "run_apart", interrupt)
    assert search.main(["--problem", "digits", "--methods", "lbfgs", "--out", str(tmp_path)]) == 130
    assert "the same command goes on from here" in capsys.readouterr().err


def test_samplers_are_abstract_or_final() -> None:
    assert issubclass(Grid, AbstractSampler)
    with pytest.raises(TypeError, match="abstract"):
        AbstractSampler()  # type: ignore[abstract]
