"""The comparison: resuming, the settings it takes, the commands it prints, and what bad input says."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import examples.digits
from baselines import compare
from baselines.compare import Chosen, Comparison
from baselines.journal import read
from baselines.methods import METHODS, Choice, Log, build, entry, known_methods
from baselines.trials import FAILED, REACHED, Trial
from tests.trials import DIGITS, made_up

ROOT = Path(__file__).parent.parent


def comparison(**changes: Any) -> Comparison:
    methods = {"anchored": Chosen({}, "defaults"), "sgd": Chosen({"lr": 0.3}, "given by --set")}
    known = {"seeds": (1, 2), "threads": 1, "seconds": 0.1, "targets": (0.5,)}
    return Comparison("digits", **{"methods": methods, **known, **changes})


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
        return {**wanted.named, **made_up(FAILED if wanted.method == "sgd" else REACHED)}

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
    monkeypatch.setattr(compare, "run_apart", lambda wanted, *_: {**wanted.named, **made_up(REACHED)})
    assert compare.main(["--problem", "digits", "--target", "0.5", "--out", str(tmp_path)]) == 2
    with pytest.raises(ImportError, match=r'pip install "torch-admm\[compare\]"'):
        raise ImportError(capsys.readouterr().err)
