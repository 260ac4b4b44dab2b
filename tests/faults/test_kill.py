"""SIGKILL at many points of a run, on every rank: the next run goes on from the last checkpoint, to the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_admm import AnchoredADMM, BregmanADMM, container, fit, gram, saved
from torch_admm.checkpoint import Checkpoints
from torch_admm.comm import Group, lost
from torch_admm.data.hdf5 import Writer
from torch_admm.errors import CommError

from ..helpers import blobs, net
from ..ranks import clean_environment, free_port, in_group, on_ranks

RANKS, SWEEPS, ROWS = 3, 4, 97
POINTS = {"message": 12, "work": 5, "disk": 12}  # of a method, dealt out over the run and the ranks
METHODS: dict[str, Callable[[], Any]] = {
    "bregman": lambda: BregmanADMM("hinge", warm_start=1),
    "anchored": lambda: AnchoredADMM("hinge", batch_size=40, refresh=3),
}
DISK = [(os, call) for call in ("mkdir", "open", "fsync", "rename", "unlink", "rmdir")]
CALLS: dict[str, list[tuple[Any, str]]] = {
    "message": [(Group, "_later"), *DISK],
    "work": [(gram, "product")],
    "disk": DISK,  # and each part of a file that is written
}

pytestmark = pytest.mark.slow


def train(name: str, folder: Path) -> Any:
    """All weights and the history without the clock; and the number of sweeps that it took."""
    model, method, steps = net(4, 7, 5, 1), METHODS[name](), Count()
    method.step = steps.before(method.step)
    more: dict[str, Any] = {"checkpoint": folder, "resume": "auto", "deterministic": True, "sinks": ()}
    result = fit(model, blobs(ROWS, 4), method, max_sweeps=SWEEPS, evaluate=blobs(30, 4), **more)
    rest = [{k: v for k, v in row.items() if k not in ("seconds", "bytes_sent")} for row in result.history]
    return ([p.tolist() for p in model.parameters()], rest), steps.seen


def run(name: str, kind: str, folder: Path, rank: int, moment: int) -> Any:
    """Train; rank `rank` is killed at its so-manieth call of a kind. The result, and how many calls there were."""
    lost.GRACE = 0.3
    warnings.simplefilter("error", RuntimeWarning)  # no checkpoint is damaged
    calls = Count(moment if int(os.environ["RANK"]) == rank else -1)
    for owner, call in CALLS[kind]:
        setattr(owner, call, calls.before(getattr(owner, call)))
    if kind == "disk":
        parts = container._parts
        container._parts = lambda *args: map(calls.before(lambda part: part), parts(*args))
    _note_saves(folder)
    try:
        return in_group(lambda _: train(name, folder), timeout_minutes=0.5), calls.seen
    except CommError as error:
        return str(error)


class Count:
    """Of calls; the process is killed before one of them."""

    def __init__(self, moment: int = -1) -> None:
        self.moment, self.seen = moment, 0

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            if self.seen == self.moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted


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
    (alone, _), points = train(name, tmp_path / "alone"), POINTS[kind]
    whole = on_ranks(RANKS, run, name, kind, tmp_path / "whole", 0, -1)
    assert [result for result, _ in whole] == [(alone, SWEEPS)] * RANKS
    events = [seen for _, seen in whole]
    busy = [rank for rank in range(RANKS) if events[rank] > points]  # the others have nothing to write
    assert events[0] > 3 * points
    for point in range(points):
        rank, folder = busy[point % len(busy)], tmp_path / str(point)
        moment = 1 + point * (events[rank] - 1) // points
        ends = on_ranks(RANKS, run, name, kind, folder, rank, moment)
        assert ends.pop(rank) == -signal.SIGKILL
        for text in ends:
            assert re.match(rf"ranks? (\d+(, | and ))*{rank}\b.* missing", str(text)), (rank, moment, text)
        newest = _newest(folder)
        (again, steps), _ = on_ranks(2, run, name, kind, folder, 0, -1)[0]
        assert (again, steps) == (alone, SWEEPS - newest), (rank, moment)


def _newest(folder: Path) -> int:
    """The number of the newest checkpoint; all that are there are whole, and none that was reported is lost."""
    numbers = [0]
    for path in folder.glob("sweep-????????"):
        shared = saved.read_shared(path / "shared")
        if shared["by_row"]:
            saved.rows_of(path, shared["rows"], shared["token"], 0, ROWS)
        numbers.append(int(path.name[6:]))
    done = folder.with_suffix(".done")
    assert max(numbers) >= (int(done.read_text()) if done.exists() else 0), "a checkpoint was lost"
    return max(numbers)
