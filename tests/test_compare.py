"""The comparison: trials apart, journals that survive a kill, resuming, outcomes, and what bad input says."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import examples.digits
from baselines import SGD, compare, problems, search, trials
from baselines.compare import Chosen, Comparison
from baselines.journal import Journal, read
from baselines.methods import METHODS, Choice, Log, build, entry, known_methods
from baselines.parts import InParts
from baselines.trials import DIVERGED, FAILED, REACHED, TIMED_OUT, Trial, run, run_apart
from benchmarks import time_to_accuracy
from tests.helpers import blobs, net
from torch_admm import AbstractMethod, AnchoredADMM, fit, from_module
from torch_admm.data import rows_of

ROOT = Path(__file__).parent.parent
DIGITS = problems.load("digits", None).fingerprint


def trial(method: str = "anchored", seconds: float = 0.2, target: float = 0.5, **changes: Any) -> Trial:
    known: dict[str, Any] = {"settings": {}, "seed": 1, "threads": 1, "targets": (target,), "data": DIGITS}
    return Trial("digits", method, **{**known, "seconds": seconds, **changes})


def comparison(**changes: Any) -> Comparison:
    methods = {"anchored": Chosen({}, "defaults"), "sgd": Chosen({"lr": 0.3}, "given by --set")}
    known = {"seeds": (1, 2), "threads": 1, "seconds": 0.1, "targets": (0.5,)}
    return Comparison("digits", **{"methods": methods, **known, **changes})


# --- slices of time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "anchored"])
def test_slices_learn_what_whole_epochs_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut after every batch: ten epochs in slices give the weights of ten epochs, to the bit."""
    monkeypatch.setattr("baselines.parts.EVERY", 0.0)
    x, y = blobs(100, 4, 3)
    make: dict[str, Callable[[], AbstractMethod]] = {
        "sgd": partial(SGD, "cross_entropy", batch_size=32),
        "anchored": partial(AnchoredADMM, "cross_entropy", batch_size=32),
    }
    whole, sliced = net(4, 8, 3), net(4, 8, 3)
    fit(whole, (x, y), make[name](), max_sweeps=10, sinks=(), seed=3, restore_best=False)
    method = InParts(make[name](), rows_of((x, y), from_module(sliced, "cross_entropy")), rarer=0.0)
    result = fit(sliced, (x[:9], y[:9]), method, max_sweeps=40, sinks=(), seed=3, restore_best=False)
    assert [row["epochs"] for row in result.history][:5] == [0, 0.32, 0.64, 0.96, 1]
    for a, b in zip(whole.parameters(), sliced.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_full_batches_count_sweeps() -> None:
    x, y = blobs(60)
    model = net(4, 5, 1)
    method = InParts(build("lbfgs", "logistic", {}), rows_of((x, y), from_module(model, "logistic")))
    result = fit(model, (x, y), method, max_sweeps=2, sinks=())
    assert result.history[-1]["epochs"] >= 2
    assert method.seconds > 0


def test_slices_cannot_be_saved() -> None:
    x, y = blobs(10)
    method = InParts(SGD("logistic"), rows_of((x, y), from_module(net(4, 5, 1), "logistic")))
    with pytest.raises(NotImplementedError, match="slices of time cannot be saved"):
        method.state_dict()
    with pytest.raises(NotImplementedError, match="slices of time cannot be loaded"):
        method.load_state_dict({})


# --- one trial --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["anchored", "bregman", "sgd", "adam+average", "adamw", "lbfgs", "cg"])
def test_every_method_gets_somewhere(method: str) -> None:
    """In this process; 50 % of ten digits is far from chance, and far from hard."""
    threads = torch.get_num_threads()
    try:
        record = run(trial(method, seconds=1.5, to_the_end=False), None)
    finally:
        torch.set_num_threads(threads)
    assert record["outcome"] == REACHED
    seconds, epochs = record["reached"]["0.5"]
    assert 0 < seconds <= record["trained_seconds"]
    assert 0 < epochs <= record["epochs"]
    assert record["curve"][0][1] == 0
    assert record["curve"][-1][2] >= 0.5
    assert record["peak_mib"] >= record["idle_mib"] > 0


def test_a_process_of_its_own_says_what_it_sees() -> None:
    seen: list[tuple[float, float]] = []
    record = run_apart(trial(seconds=0.6, target=1.0), None, lambda *row: seen.append(row))
    assert record["outcome"] == TIMED_OUT
    assert record["reached"] == {"1": None}
    assert record["trained_seconds"] >= 0.6
    assert len(seen) >= 2
    assert record["key"] == trial(seconds=0.6, target=1.0).key
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_divergence_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    record = run_apart(trial("sgd", settings={"lr": 1e30}), None)
    assert record["outcome"] == DIVERGED
    assert "NaN or infinite" in record["message"]


def test_an_exception_is_an_outcome() -> None:
    record = run_apart(trial(data="other"), None)
    assert record["outcome"] == FAILED
    assert record["message"] == f"ValueError: the data of digits are {DIGITS}, but other when this run began"
    assert record["best_accuracy"] is None


def test_a_killed_process_is_an_outcome() -> None:
    """As the kernel does it when memory runs out."""

    def kill(*row: float) -> None:
        (child,) = (int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _is_trial(p))
        os.kill(child, signal.SIGKILL)

    record = run_apart(trial(seconds=30.0), None, kill)
    assert record["outcome"] == FAILED
    assert record["message"] == "the process ended with signal SIGKILL"


def _is_trial(process: Path) -> bool:
    """A child of the fork server that this process started."""
    try:
        parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
        return b"forkserver" in Path(f"/proc/{parent}/cmdline").read_bytes() and _parent(parent) == os.getpid()
    except (OSError, IndexError):
        return False


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_trial_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "PATIENCE", 0.0)
    monkeypatch.setattr(trials, "GRACE", 1.0)
    record = run_apart(trial(seconds=60.0), None)
    assert record["outcome"] == TIMED_OUT
    assert record["message"] == "no end after 1 s on the wall"


def test_ranks_train_together() -> None:
    """Two processes give one record; full batches and mini-batches, cut by the same slices."""
    for method, settings in (("sgd", {"lr": 0.3}), ("anchored", {}), ("cg", {})):
        record = run_apart(trial(method, settings=settings, seconds=1.0, target=0.9, ranks=2), None)
        assert record["outcome"] == REACHED, record["message"]
        assert record["ranks"] == 2
        assert record["curve"][-1][0] >= 1.0


def test_a_rank_that_fails_is_an_outcome() -> None:
    record = run_apart(trial("sgd", data="other", ranks=2), None)
    assert record["outcome"] == FAILED
    assert "but other when this run began" in record["message"]


def test_equal_trials_have_equal_keys_and_others_do_not() -> None:
    assert trial().key == trial().key
    changes: list[dict[str, Any]] = [{"seed": 2}, {"threads": 2}, {"settings": {"eta": 0.1}}, {"ranks": 2}]
    changes += [{"data": "x"}, {"to_the_end": False}, {"seconds": 0.3}, {"target": 0.6}, {"method": "sgd"}]
    assert len({trial().key, *(trial(**change).key for change in changes)}) == 1 + len(changes)


# --- the journal ------------------------------------------------------------------------------------------------------


def test_journal_keeps_what_was_whole(tmp_path: Path) -> None:
    """Cut at every byte of the last line: all lines before it are there, and appending goes on from them."""
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.append({"n": 1, "x": (1.5, float("inf"))})
        journal.append({"n": 2})
    raw = path.read_bytes()
    first = raw.index(b"\n") + 1
    for cut in range(first, len(raw)):
        path.write_bytes(raw[:cut])
        assert read(path) == [{"n": 1, "x": [1.5, None]}]
        with Journal(path) as journal:
            journal.append({"n": 3})
        assert [r["n"] for r in read(path)] == [1, 3]


def test_journal_refuses_damage(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        for n in range(3):
            journal.append({"n": n})
    path.write_bytes(path.read_bytes().replace(b'"n": 1', b'"n": 7'))
    with pytest.raises(ValueError, match=r"j\.jsonl, line 2 is damaged; remove that line to run its trial again"):
        read(path)


def test_journal_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl"), pytest.raises(ValueError, match="is in use by another run"):
        Journal(tmp_path / "j.jsonl")


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_seeds_are_outermost_and_methods_shuffled() -> None:
    methods = {name: Chosen({}, "defaults") for name in ("anchored", "sgd", "adam", "lbfgs", "cg")}
    order = comparison(methods=methods, seeds=(1, 2, 3)).trials(DIGITS)
    assert [t.seed for t in order] == [1] * 5 + [2] * 5 + [3] * 5
    orders = [[t.method for t in order[i : i + 5]] for i in (0, 5, 10)]
    assert all(sorted(o) == sorted(methods) for o in orders)
    assert len({tuple(o) for o in orders}) > 1
    both = comparison(methods=methods, seeds=(1,), ranks=(1, 2)).trials(DIGITS)
    assert sorted((t.method, t.ranks) for t in both) == sorted((m, r) for m in methods for r in (1, 2))


def test_a_second_run_does_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def fake(wanted: Trial, folder: Path | None, watch: Any = None) -> dict[str, Any]:
        asked.append((wanted.method, wanted.seed))
        return {**wanted.named, **_outcome(FAILED if wanted.method == "sgd" else REACHED)}

    monkeypatch.setattr(compare, "run_apart", fake)
    monkeypatch.setattr(compare, "_figures", lambda *_: [])
    compare.compare(comparison(), tmp_path)
    assert sorted(asked) == [("anchored", 1), ("anchored", 2), ("sgd", 1), ("sgd", 2)]
    compare.compare(comparison(seeds=(1, 2, 3)), tmp_path)
    assert sorted(asked[4:]) == [("anchored", 3), ("sgd", 3)]
    compare.compare(comparison(), tmp_path, retry=True)
    assert sorted(asked[6:]) == [("sgd", 1), ("sgd", 2)]
    assert compare.compare(comparison(seconds=0.2), tmp_path)[0].seeds == 2
    assert len(asked) == 12


def _outcome(outcome: str) -> dict[str, Any]:
    if outcome == FAILED:
        return {**trials._failure("RuntimeError: no <luck>"), "wall": 1.0, "at": "now"}
    curve = [[0.01, 0.0, 0.1, 2.3], [0.05, 1.0, 0.6, 1.0], [0.1, 2.0, 0.9, 0.3]]
    figures = {"best_accuracy": 0.9, "trained_seconds": 0.1, "epochs": 2.0, "peak_mib": 300.0, "idle_mib": 280.0}
    reached = {"0.5": [0.05, 1.0]}
    return {"outcome": outcome, "message": "", "reached": reached, "curve": curve, **figures, "wall": 1.0, "at": "now"}


def test_killed_and_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real run, killed after its first trial; the second one keeps that trial as it was."""
    options = ["--problem", "digits", "--methods", "anchored", "sgd", "--seeds", "1", "2", "--seconds", "0.1"]
    command = [sys.executable, "-m", "baselines.compare", *options, "--threads", "1", "--out", str(tmp_path)]
    journal = tmp_path / "trials.jsonl"
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until(lambda: journal.exists() and b"\n" in journal.read_bytes())
    finally:
        process.kill()
        process.wait()
    before = read(journal)
    with open(journal, "ab") as file:
        file.write(b'{"key": "torn')
    assert compare.main(command[3:]) == 0
    after = read(journal)
    assert after[: len(before)] == before
    assert len(after) == 4
    assert "report: " in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()
    assert list((tmp_path / "tensorboard" / "anchored" / "seed-1").glob("events.*"))


def _wait_until(true: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--methods", "anchored", "lbfgs", "--seeds", "1", "--seconds", "0.2", "--out", str(tmp_path / "demo")]
    assert examples.digits.main(options) == 0
    screen = capsys.readouterr().out
    assert "1347 training rows, 450 test rows, net 64-64-10" in screen
    for method in ("anchored", "lbfgs"):
        assert f"\n{method}" in screen
    assert (tmp_path / "demo" / "report.html").exists()


# --- settings and bad input -------------------------------------------------------------------------------------------


def test_settings_given_tuned_or_default(tmp_path: Path) -> None:
    found = {"settings": {"lr": 0.5}, "trials": 7, "how": {"sampler": "tpe", "seed": 0, "command": "s"}}
    tuned = tmp_path / "settings.json"
    stored = {"problem": "digits", "methods": {"sgd": found, "adam": found, "anchored": found, "anchored-tuned": found}}
    tuned.write_text(json.dumps(stored))
    chosen = compare.choose("digits", ["sgd", "adam", "cg", "anchored", "anchored-tuned"], {"adam": {"lr": 1}}, tuned)
    assert {name: c.settings for name, c in chosen.items()} == {
        "sgd": {"lr": 0.5},
        "adam": {"lr": 1},
        "cg": {},
        "anchored": {},
        "anchored-tuned": {"lr": 0.5},
    }
    assert chosen["sgd"].where == "search: 7 trials, tpe, seed 0"
    assert chosen["adam"].where == "given by --set"
    assert chosen["anchored"].where == "defaults"
    assert chosen["sgd"].command == "s"


BAD: dict[str, tuple[list[str], str]] = {
    "problem": (
        ["--problem", "iris"],
        "problem is 'iris'; one of higgs, svhn, mnist, mnist-4096, higgs-full, fashion-mnist, digits is expected",
    ),
    "method": (
        ["--methods", "sdg"],
        "method is 'sdg'; one of anchored, anchored-tuned, bregman, sgd, adam, adamw, lbfgs",
    ),
    "average": (["--methods", "bregman+average"], r"method is 'bregman\+average'; one of anchored"),
    "setting": (["--set", "sgd.eta=1"], "sgd has no setting 'eta'; its settings are lr, momentum, nesterov"),
    "value": (["--set", "sgd.lr=fast"], "sgd: lr is 'fast'; a finite number above 0 is expected"),
    "not compared": (["--set", "cg.max_evals=4"], "--set has 'cg', which is not compared; compared are anchored, sgd"),
    "form": (["--set", "lr=3"], "--set 'lr=3'; METHOD.NAME=VALUE is expected, such as sgd.lr=0.1"),
    "no data folder": (["--problem", "higgs"], "higgs needs --data-dir, .*python -m torch_admm data prepare higgs"),
    "no data": (
        ["--problem", "mnist", "--data-dir", "none"],
        "prepare it first: python -m torch_admm data prepare mnist",
    ),
    "target": (["--target", "95"], "target is 95.0; an accuracy above 0 and up to 1 is expected"),
    "seed": (["--seeds", "-1"], "seed is -1; a whole number of at least 0 is expected"),
    "ranks": (["--ranks", "1", "0"], "ranks is 0; a whole number of at least 1 is expected"),
    "threads": (["--threads", "0"], "threads is 0; a whole number of at least 1 is expected"),
    "seconds": (["--seconds", "-1"], "seconds is -1.0; a finite number above 0 is expected"),
    "settings file": (["--settings", "none.json"], "none.json does not exist; python -m baselines.search writes one"),
    "untuned": (["--methods", "anchored-tuned"], "anchored-tuned is anchored with searched settings, and .* has none"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = BAD[name]
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    defaults = ["--problem", "digits", "--methods", "anchored", "sgd", "--out", str(tmp_path / "out")]
    assert compare.main([*defaults, *options]) == 2
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)
    assert not (tmp_path / "out" / "report.html").exists()


def test_commands_repeat_it_from_nothing(tmp_path: Path) -> None:
    """Whoever reads the report has other folders."""
    methods = {"anchored": Chosen({}, "defaults"), "sgd": Chosen({"lr": 0.3}, "given by --set")}
    methods |= {
        name: Chosen({"lr": 1}, "search: 7 trials", "python -m baselines.search ...") for name in ("adam", "adamw")
    }
    wanted = Comparison("higgs", methods, (1, 2), 2, 3.0, (0.64, 0.7), tmp_path)
    assert list(compare.commands(wanted)) == [
        "python -m torch_admm data prepare higgs --data-dir DIR",
        "python -m baselines.search ...",
        "python -m baselines.compare --problem higgs --data-dir DIR --threads 2 --seconds 3 --seeds 1 2 "
        "--target 0.64 0.7 --methods anchored sgd adam adamw --set sgd.lr=0.3",
    ]
    (*_, last) = compare.commands(dataclasses.replace(wanted, ranks=(1, 2)))
    assert "--target 0.64 0.7 --ranks 1 2 --methods" in last


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"problem": "higgs", "methods": {}}), r"s\.json has settings for higgs, not for digits"),
        ('{"problem": "digits", "meth', r"s\.json is not what python -m baselines.search writes; make it anew"),
        ("[]", r"s\.json is not what python -m baselines.search writes"),
        (json.dumps({"problem": "digits"}), r"s\.json is not what python -m baselines.search writes"),
    ],
)
def test_settings_that_are_not_for_this(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        compare.choose("digits", ["sgd"], {}, tmp_path / "s.json")


def test_interrupting_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "run_apart", interrupt)
    assert compare.main(["--problem", "digits", "--out", str(tmp_path)]) == 130
    assert "interrupted; the same command goes on from here" in capsys.readouterr().err


def test_names_and_spaces() -> None:
    rivals = {name for name, found in METHODS.items() if found.gradient}
    assert {f"{name}+average" for name in rivals} == {n for n in known_methods() if "+" in n}
    assert entry("sgd+average").fixed == {"average": True}
    assert "average" not in entry("sgd+average").known
    for name, found in METHODS.items():
        assert set(found.space) <= set(found.known)
        for setting, space in found.space.items():
            for value in space.values:
                build(name, "cross_entropy", {setting: value})
        for start in found.starts:
            assert start.keys() == found.space.keys()
            assert all(min(s.values) <= start[k] <= max(s.values) for k, s in found.space.items() if isinstance(s, Log))
            assert all(start[k] in s.values for k, s in found.space.items() if isinstance(s, Choice))


@pytest.mark.parametrize("module", ["sklearn.datasets", "matplotlib.figure", "torch.utils.tensorboard"])
def test_missing_packages_name_the_extra(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(compare, "run_apart", lambda wanted, *_: {**wanted.named, **_outcome(REACHED)})
    assert compare.main(["--problem", "digits", "--target", "0.5", "--out", str(tmp_path)]) == 2
    with pytest.raises(ImportError, match=r'pip install "torch-admm\[compare\]"'):
        raise ImportError(capsys.readouterr().err)


# --- time to accuracy -------------------------------------------------------------------------------------------------


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
        made = _outcome(REACHED)
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
