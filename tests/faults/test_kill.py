"""SIGKILL at many points of a run, on every rank: the next run goes on from the last checkpoint, to the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_admm import AnchoredADMM, BregmanADMM, fit, gram
from torch_admm.checkpoint import Checkpoints
from torch_admm.comm import Group, lost
from torch_admm.data.hdf5 import Writer
from torch_admm.errors import CommError

from ..helpers import blobs, net
from ..ranks import clean_environment, free_port, in_group, on_ranks

RANKS, SWEEPS, ROWS = 3, 4, 97
POINTS = {"message": 18, "work": 6}  # of a method, dealt out over the run and the ranks
METHODS: dict[str, Callable[[], Any]] = {
    "bregman": lambda: BregmanADMM("hinge", warm_start=1),
    "anchored": lambda: AnchoredADMM("hinge", batch_size=40, refresh=3),
}
DISK = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir")

pytestmark = pytest.mark.slow


def train(name: str, folder: Path) -> Any:
    """All weights and the history without the clock."""
    model = net(4, 7, 5, 1)
    more: dict[str, Any] = {"checkpoint": folder, "resume": "auto", "deterministic": True, "sinks": ()}
    result = fit(model, blobs(ROWS, 4), METHODS[name](), max_sweeps=SWEEPS, evaluate=blobs(30, 4), **more)
    rest = [{k: v for k, v in row.items() if k not in ("seconds", "bytes_sent")} for row in result.history]
    return [p.tolist() for p in model.parameters()], rest


def run(name: str, kind: str, folder: Path, rank: int, moment: int) -> Any:
    """Train; rank `rank` is killed before its so-manieth message or call that touches the disk, or product of rows."""
    lost.GRACE = 0.3
    seen = [0]
    if int(os.environ["RANK"]) == rank:
        calls = [(Group, "_later"), *((os, call) for call in DISK)] if kind == "message" else [(gram, "product")]
        for owner, call in calls:
            _count(owner, call, seen, moment)
    _note_saves(folder)
    try:
        return in_group(lambda _: train(name, folder), timeout_minutes=0.5), seen[0]
    except CommError as error:
        return str(error)


def _count(owner: Any, name: str, seen: list[int], moment: int) -> None:
    call = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(owner, name, counted)


def _note_saves(folder: Path) -> None:
    """A file that says which save was the last to be reported as done."""
    save = Checkpoints.save

    def noted(self: Checkpoints, sweep: int, *args: Any) -> None:
        save(self, sweep, *args)
        folder.with_suffix(".done").write_text(str(sweep))

    Checkpoints.save = noted  # type: ignore[method-assign, assignment]


FROZEN = """
import os, signal, sys
from torch_admm.cli import main
from torch_admm.comm import Group

seen, later = [0], Group._later

def frozen(*args):
    seen[0] += 1
    if seen[0] == 40 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    return later(*args)

Group._later = frozen
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_0_that_is_frozen_with_its_store_leaves_nobody_waiting(tmp_path: Path) -> None:
    with Writer(tmp_path / "rows.h5", features=4, source="made up", classes=["in", "out"]) as writer:
        writer.write(*(values.numpy() for values in blobs(ROWS, 4)))
    argv = ["train", "--data", str(tmp_path / "rows.h5"), "--net", "5", "--timeout", "0.05"]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command: Any = {"args": [sys.executable, "-c", FROZEN, *argv], "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(**command, env=clean_environment(**place, RANK=rank)) for rank in ("0", "1")]
    try:
        _, said = ranks[1].communicate(timeout=100)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[1].returncode == 2
    assert re.fullmatch(r"torch-admm: rank 0 is missing \(it ended or is stuck\); rank 1 reports: .*\n", said), said


@pytest.mark.parametrize("kind", POINTS)
@pytest.mark.parametrize("name", METHODS)
def test_every_run_that_is_killed_goes_on_to_the_same_bits(name: str, kind: str, tmp_path: Path) -> None:
    alone, points = train(name, tmp_path / "alone"), POINTS[kind]
    whole = on_ranks(RANKS, run, name, kind, tmp_path / "whole", 0, -1)
    assert [result for result, _ in whole] == [alone] * RANKS
    events = whole[0][1]
    assert events > 3 * points
    for point in range(points):
        moment, rank, folder = 1 + point * (events - 1) // points, point % RANKS, tmp_path / str(point)
        ends = on_ranks(RANKS, run, name, kind, folder, rank, moment)
        if isinstance(ends[rank], tuple):  # ranks other than 0 have fewer calls: this one got through
            moment //= 2
            ends = on_ranks(RANKS, run, name, kind, folder := tmp_path / f"{point}b", rank, moment)
        assert ends.pop(rank) == -signal.SIGKILL
        for text in ends:
            assert re.match(rf"ranks? (\d+, )*{rank}\b.* missing", str(text)), (rank, moment, text)
        done = folder.with_suffix(".done")
        newest = max((int(p.name[6:]) for p in folder.glob("sweep-????????")), default=0)
        assert newest >= (int(done.read_text()) if done.exists() else 0), "a checkpoint was lost"
        assert on_ranks(2, run, name, kind, folder, 0, -1)[0][0] == alone, (rank, moment)
