"""When a run saves its state, and what it does with the history of one that it goes on from."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import blobs, net
from torch_admm import AbstractSink, AbstractStop, BregmanADMM, Outcome, Target, fit
from torch_admm.checkpoint import Checkpoints
from torch_admm.problem import Weights
from torch_admm.record import Row

from .ranks import in_group, on_ranks
from .test_forged import Own


def run(folder: Path, sweeps: int, **changes: Any) -> Any:
    known: dict[str, Any] = {"sinks": (), "resume": "auto", "restore_best": False}
    method = BregmanADMM("logistic", warm_start=1)
    return fit(net(4, 6, 1), blobs(60), method, max_sweeps=sweeps, checkpoint=folder, **{**known, **changes})


class At(AbstractStop):
    """Ends the run at a sweep, and notes what it is asked about."""

    def __init__(self, sweep: int) -> None:
        self.sweep, self.asked = sweep, list[int]()

    def check(self, history: Sequence[Row], monitor: str) -> Outcome | None:
        self.asked.append(len(history))
        return Outcome.PATIENCE if history[-1]["sweep"] == self.sweep else None


class Told(AbstractSink):
    """Keeps rows, and has Ctrl-C pressed after one of them."""

    def __init__(self, at: int = -1, times: int = 0) -> None:
        self.at, self.times, self.rows = at, times, list[Row]()

    def write(self, row: Row) -> None:
        self.rows.append(row)
        for _ in range(self.times if row["sweep"] == self.at else 0):
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sweeps whose state was saved."""
    seen: list[int] = []
    save = Checkpoints.save

    def noted(self: Checkpoints, sweep: int, *args: Any) -> None:
        seen.append(sweep)
        save(self, sweep, *args)

    monkeypatch.setattr(Checkpoints, "save", noted)
    return seen


def test_every_so_many_sweeps_and_at_the_end(saves: list[int], tmp_path: Path) -> None:
    run(tmp_path, 7, checkpoint_every=3)
    assert saves == [3, 6, 7]
    run(tmp_path, 10, checkpoint_every=4)
    assert saves == [3, 6, 7, 8, 10]


def test_a_run_that_a_rule_ends_is_saved_as_it_ended(saves: list[int], tmp_path: Path) -> None:
    assert run(tmp_path, 9, stop=At(4), checkpoint_every=100).outcome is Outcome.PATIENCE
    assert saves == [4]


def test_rules_are_asked_before_the_first_sweep_of_a_run_that_goes_on(saves: list[int], tmp_path: Path) -> None:
    run(tmp_path, 3)
    ends = At(3)
    again = run(tmp_path, 9, stop=[Target(2.0), ends])
    assert (again.outcome, len(again.history), ends.asked) == (Outcome.PATIENCE, 4, [4])
    assert saves == [1, 2, 3]


def test_sinks_are_told_the_history_again(tmp_path: Path) -> None:
    run(tmp_path, 3)
    told = Told()
    again = run(tmp_path, 5, sinks=told)
    assert told.rows == again.history
    assert [row["sweep"] for row in told.rows] == [0, 1, 2, 3, 4, 5]


def _bytes(ranks: Any, folder: Path, sweeps: int) -> list[float]:
    return [row["bytes_sent"] for row in run(folder, sweeps).history]


def test_bytes_are_counted_from_where_they_were(tmp_path: Path) -> None:
    straight = on_ranks(2, in_group, _bytes, tmp_path / "straight", 4)
    on_ranks(2, in_group, _bytes, tmp_path / "parts", 2)
    assert on_ranks(2, in_group, _bytes, tmp_path / "parts", 4) == straight
    assert straight[0] == sorted(set(straight[0]))


@pytest.fixture
def _usual_ctrl_c() -> Iterator[None]:
    """Tests that run in the background of a shell have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_usual_ctrl_c")
def test_ctrl_c_is_kept_until_the_state_is_saved(saves: list[int], tmp_path: Path) -> None:
    ended = run(tmp_path, 1000, sinks=Told(2, times=1), checkpoint_every=1000)
    assert (ended.outcome, [row["sweep"] for row in ended.history]) == (Outcome.INTERRUPTED, [0, 1, 2, 3])
    assert saves == [3]
    straight, parts = run(tmp_path / "straight", 5), run(tmp_path, 5)
    assert all(torch.equal(a, b) for a, b in zip(straight.model.parameters(), parts.model.parameters(), strict=True))


@pytest.mark.usefixtures("_usual_ctrl_c")
def test_ctrl_c_that_is_ignored_stays_so(saves: list[int], tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert run(tmp_path, 4, sinks=Told(2, times=2)).outcome is Outcome.MAX_SWEEPS


@pytest.mark.usefixtures("_usual_ctrl_c")
def test_the_second_ctrl_c_ends_the_run_at_once(saves: list[int], tmp_path: Path) -> None:
    ended = run(tmp_path, 1000, sinks=Told(2, times=2), checkpoint_every=1000)
    assert (ended.outcome, len(ended.history), saves) == (Outcome.INTERRUPTED, 3, [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Broken(Own):
    def weights(self) -> Weights:
        return {l: W * math.nan for l, W in self.problem.read().items()}


def test_a_warning_points_at_who_called_fit() -> None:
    with pytest.warns(RuntimeWarning, match="a weight became NaN") as caught:
        fit(net(4, 6, 1), blobs(60), Broken("logistic"), max_sweeps=2, sinks=())
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files have no names here")
def test_names_change_once_what_they_stand_for_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut at any time leaves a whole checkpoint by its own name."""
    run(tmp_path, 2, keep=1)
    events: list[str] = []
    calls = {name: getattr(os, name) for name in ("fsync", "rename", "rmdir")}

    def noted(name: str, path: Any) -> None:
        events.append(f"{name} {Path(path).relative_to(tmp_path.parent)}".replace(tmp_path.name, "F"))

    def fsync(descriptor: int) -> None:
        noted("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        calls["fsync"](descriptor)

    def rename(source: Any, target: Any, **more: Any) -> None:
        noted("rename", source)
        calls["rename"](source, target, **more)

    def rmdir(path: Any, **more: Any) -> None:
        noted("rmdir", path)
        calls["rmdir"](path, **more)

    for name, call in (("fsync", fsync), ("rename", rename), ("rmdir", rmdir)):
        monkeypatch.setattr(os, name, call)
    run(tmp_path, 3, keep=1)
    new, old = "F/sweep-00000003", "F/sweep-00000002"
    written = [f"fsync {new}.part/shared", f"fsync {new}.part/rows-0-60", f"fsync {new}.part"]
    assert events == [*written, f"rename {new}.part", "fsync F", f"rename {old}", f"rmdir {old}.part"]
