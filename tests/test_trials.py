"""Trials: in slices of time, in processes apart, with an outcome whatever happens; journals that survive a kill."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines import SGD, trials
from baselines.journal import Journal, read
from baselines.methods import build
from baselines.parts import InParts
from baselines.trials import DIVERGED, FAILED, REACHED, TIMED_OUT, run, run_apart
from tests.helpers import blobs, net
from tests.trials import DIGITS, trial
from torch_admm import AbstractMethod, AnchoredADMM, fit, from_module
from torch_admm.data import rows_of

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


def test_divergence_is_anmade_up(monkeypatch: pytest.MonkeyPatch) -> None:
    record = run_apart(trial("sgd", settings={"lr": 1e30}), None)
    assert record["outcome"] == DIVERGED
    assert "NaN or infinite" in record["message"]


def test_an_exception_is_anmade_up() -> None:
    record = run_apart(trial(data="other"), None)
    assert record["outcome"] == FAILED
    assert record["message"] == f"ValueError: the data of digits are {DIGITS}, but other when this run began"
    assert record["best_accuracy"] is None


def test_a_killed_process_is_anmade_up() -> None:
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


def test_a_rank_that_fails_is_anmade_up() -> None:
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
