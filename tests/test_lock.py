"""A folder of checkpoints is for one run at a time, and the next one need not wait for anything."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import blobs, net
from torch_admm import AbstractSink, AnchoredADMM, checkpoint, fit, lock
from torch_admm.checkpoint import Checkpoints
from torch_admm.comm import Solo
from torch_admm.errors import CheckpointError
from torch_admm.record import Row

from .ranks import in_group, on_ranks

fcntl = pytest.importorskip("fcntl")


def run(folder: Path, **changes: Any) -> Any:
    known: dict[str, Any] = {"method": AnchoredADMM("logistic"), "max_sweeps": 2, "sinks": (), "resume": "auto"}
    return fit(net(4, 6, 1), blobs(60), checkpoint=folder, **{**known, **changes})


class Second(AbstractSink):
    """Starts another run on the same folder in the midst of one whose save is under way."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, ""

    def write(self, row: Row) -> None:
        part = self.folder / "sweep-00000007.part"
        part.mkdir(exist_ok=True)
        for resume in (False, "auto"):
            with pytest.raises(CheckpointError) as caught:
                run(self.folder, resume=resume)
            self.said = str(caught.value)
        part.rmdir()  # was not removed


def test_a_second_run_is_refused_and_leaves_the_save_of_the_first_alone(tmp_path: Path) -> None:
    second = Second(tmp_path)
    run(tmp_path, sinks=second)
    here = f"process {os.getpid()} on {socket.gethostname()}"
    assert second.said == f"{tmp_path} is in use by another run ({here})"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep-00000001", "sweep-00000002"]


def test_runs_one_after_the_other_share_a_folder(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(CheckpointError, match="has checkpoints of a run already"):
        run(tmp_path, resume=False)
    with pytest.raises(ValueError, match="monitor is 'luck'"):
        run(tmp_path / "new", monitor="luck")
    assert not list((tmp_path / "new").iterdir())
    assert len(run(tmp_path, max_sweeps=3).history) == 4


HELD = """
import os, sys, time
from torch_admm.checkpoint import Checkpoints
from torch_admm.comm import Solo

with Checkpoints(sys.argv[1], Solo(), {}):
    if os.fork() == 0:  # as for a process that loads data: it lives a little longer
        time.sleep(30)
        os._exit(0)
    print("held", flush=True)
    time.sleep(100)
"""


def test_a_killed_run_leaves_nothing_locked(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            said = re.escape(f"{tmp_path} is in use by another run (process {process.pid} on {socket.gethostname()})")
            with pytest.raises(CheckpointError, match=said), Checkpoints(tmp_path, Solo(), {}):
                pass
            process.kill()
            process.wait()
            assert (tmp_path / lock.LOCK).exists()
            with Checkpoints(tmp_path, Solo(), {}) as saved:
                assert saved.there() == []
            assert not list(tmp_path.iterdir())
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK, None])
def test_where_there_are_no_locks_it_goes_on_without(
    code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(code, "no locks here")

    if code is None:
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "sweep-00000007.part").mkdir()
    run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} - {lock.LOCK} == {"sweep-00000001", "sweep-00000002"}


def test_a_file_that_its_holder_removed_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opened it before that would hold a lock on a file that nobody else can find."""
    flock, calls = fcntl.flock, []

    def late(descriptor: int, kind: int) -> None:
        calls.append(kind)
        if len(calls) == 1:
            (tmp_path / lock.LOCK).unlink()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with Checkpoints(tmp_path, Solo(), {}):
        assert len(calls) == 2
        with pytest.raises(CheckpointError, match="in use by another run"), Checkpoints(tmp_path, Solo(), {}):
            pass


def test_a_run_that_cannot_begin_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(path: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    (tmp_path / "sweep-00000007.part").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_remove", stuck)
        with pytest.raises(CheckpointError, match=f"cannot write checkpoints to {tmp_path}: Device or resource busy"):
            run(tmp_path)
    run(tmp_path)


def _refused(ranks: Any, folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        run(folder)
    return str(caught.value)


def test_all_ranks_hear_of_it(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, Solo(), {}):
        first, second = on_ranks(2, in_group, _refused, tmp_path)
    assert first.startswith(f"{tmp_path} is in use by another run (process {os.getpid()} on ")
    assert second == f"rank 0: {first}"
