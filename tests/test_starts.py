"""Ranks that start more than once, otherwise than the others, or hang: all end, and are told why."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from torch_admm import comm
from torch_admm.comm import AbstractComm, Group, lost, meet
from torch_admm.errors import CommError, RankError

from .commands import finished
from .ranks import clean_environment, in_group, mpirun, on_ranks


def _twice(backend: str = "auto") -> list[float]:
    sums = []
    for _ in range(2):
        with comm.start(backend) as ranks:
            sums.append(ranks.sum_(torch.ones(1)).item())
    return sums


def test_a_process_can_start_twice() -> None:
    assert on_ranks(2, _twice) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_process_of_mpirun_can_start_twice(backend: str) -> None:
    """MPI is there until the process ends, for whoever else uses it."""
    code = f"import os; from tests.test_starts import _twice; os.write(1, str(_twice({backend!r})).encode())"
    command = [*mpirun(), "-n", "2", sys.executable, "-c", code]
    done = finished(command, clean_environment())
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0]" * 2), done


def test_an_mpi_of_one_process_leaves_nothing_behind() -> None:
    """MPICH's memory has a name until it is taken down."""
    mpirun()
    memory = Path("/dev/shm")
    before = {path.name for path in memory.glob("mpich_shm*")}
    code = "from torch_admm import comm\nwith comm.start('mpi'): import mpi4py.MPI as M; print(M.Is_initialized())"
    done = finished([sys.executable, "-c", code], clean_environment())
    assert (done.returncode, done.stdout) == (0, "True\n"), done
    assert {path.name for path in memory.glob("mpich_shm*")} <= before


def _otherwise(options: list[dict[str, Any]]) -> Any:
    try:
        with comm.start(**options[int(os.environ["RANK"])]) as ranks:
            return ranks.sum_(torch.ones(1)).item(), torch.get_num_threads()
    except RankError as error:
        return str(error)


def test_ranks_may_have_different_threads() -> None:
    assert on_ranks(2, _otherwise, [{"threads": 2}, {"threads": 1}]) == [(2.0, 2), (2.0, 1)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([{}, {"backend": "gloo"}], "ranks differ in backend: auto on rank 0, gloo on rank 1"),
        ([{}, {"timeout_minutes": 4.0}], "ranks differ in timeout_minutes: 5.0 on rank 0, 4.0 on rank 1"),
        ([{}, {}, {"backend": "mpi"}], "ranks differ in backend: gloo on rank 0, mpi on rank 2"),
        ([{"backend": "mpi"}, {}, {}], "ranks differ in backend: mpi on rank 0, gloo on rank 1"),
    ],
)
def test_ranks_that_start_otherwise_are_told(options: list[dict[str, Any]], said: str) -> None:
    if {"backend": "mpi"} in options:
        pytest.importorskip("mpi4py")
    assert on_ranks(len(options), _otherwise, options, env={"PMIX_RANK": "0"}) == [said] * len(options)


def _meet(culprit: int) -> str:
    linked = meet._linked

    def late(ranks: Group, *args: Any) -> Any:
        if ranks.rank == culprit:
            time.sleep(8)
        return linked(ranks, *args)

    meet._linked = late  # type: ignore[assignment]
    lost.GRACE = 3.0  # for a machine that has other things to do
    try:
        with comm.start(timeout_minutes=0.03):
            return "met"
    except CommError as error:
        return str(error)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_hangs_while_all_meet_is_named(culprit: int) -> None:
    said = on_ranks(2, _meet, culprit)
    assert said[1 - culprit].startswith(f"rank {culprit} is missing"), said


def _stop(ranks: AbstractComm, culprit: int) -> None:
    """One rank is stopped: no signal that can be handled ends it any more, not even that of its launcher."""
    ranks.sum_(torch.ones(1))
    if ranks.rank == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks.sum_(torch.ones(1))


def _stopped(backend: str, culprit: int) -> tuple[str, bool]:
    try:
        in_group(_stop, culprit, backend=backend, timeout_minutes=0.03)
    except CommError as error:
        return str(error), error.speaks
    return "went on", False


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_stopped_ends_too(culprit: int, backend: str) -> None:
    """It is let go on, finds the others gone, and leaves it to them to say so."""
    ends = on_ranks(3, _stopped, backend, culprit)
    assert all(isinstance(end, tuple) for end in ends), ends
    spokesman = min({0, 1, 2} - {culprit})
    assert [speaks for _, speaks in ends] == [rank == spokesman for rank in range(3)], ends
    said, _ = ends[spokesman]
    assert said.startswith(f"rank {culprit} is missing (it ended or is stuck); rank {spokesman} reports: "), said
    assert ".cc" not in said


def test_a_stuck_rank_does_not_keep_mpirun() -> None:
    """MPICH's waits for all processes of a job that makes no use of MPI."""
    code = "from tests import test_starts; test_starts.stick()"
    command = [*mpirun(), "-n", "2", sys.executable, "-c", code]
    began = time.monotonic()
    done = finished(command, clean_environment())
    assert done.returncode != 0
    assert re.search("CommError: rank 1 is missing", done.stderr), done
    assert time.monotonic() - began < STUCK  # not because the rank had waited long enough


STUCK = 150  # seconds


@pytest.mark.parametrize(("culprit", "backend"), [(0, "auto"), (1, "mpi")])
def test_a_rank_that_is_stuck_before_all_meet_does_not_keep_mpirun(culprit: int, backend: str) -> None:
    """Not even MPI's own start, which knows no time-out."""
    code = f"from tests import test_starts; test_starts.come_late({culprit}, {backend!r})"
    began = time.monotonic()
    done = finished([*mpirun(), "-n", "2", sys.executable, "-c", code], clean_environment())
    assert done.returncode != 0
    said = rf"rank 0 did not open 127.0.0.1:\d+|rank {culprit} of 2 did not join"
    assert re.search(f"CommError: (?:{said}) within 3 s", done.stderr), done
    assert time.monotonic() - began < STUCK


def come_late(culprit: int, backend: str) -> None:
    if int(os.environ["PMI_RANK"]) == culprit:
        time.sleep(STUCK)
    with comm.start(backend, timeout_minutes=0.05):
        raise AssertionError("met")


def test_a_port_with_a_store_of_strangers_is_named_once_and_ends_the_job() -> None:
    """The others could wait there for rank 0 until their time is up, which is long."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    words = ["train", "--data", "none.h5", "--timeout", "3"]
    command = [*mpirun(), "-n", "3", sys.executable, "-m", "torch_admm", *words]
    done = finished(command, clean_environment(MASTER_PORT=str(store.port)), STUCK)
    assert done.returncode != 0
    said = f"torch-admm: port {store.port} is taken on 127.0.0.1; set MASTER_PORT to a free one\n"
    assert done.stderr == said, done


def test_what_an_earlier_start_left_in_a_store_that_stays_is_not_taken_for_this_one() -> None:
    """As torchrun keeps one: ranks that were there before have said hello, and one has come."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for rank in (0, 1):
        store.set(f"torch_admm/job/hello/{rank}", f"old{rank}")
        store.set(f"torch_admm/job/answer/old{rank}", "old0")
        store.set(f"torch_admm/job/old0/here/{rank}", "")
    kept = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    assert on_ranks(2, _twice, env=kept) == [[2.0, 2.0]] * 2


def _threads(cores: list[set[int]], given: str | None) -> int:
    mine = cores[int(os.environ["RANK"])]
    sys.modules["torch_admm.comm.start"]._cores = lambda: mine  # type: ignore[attr-defined]
    os.environ.pop("OMP_NUM_THREADS")
    if given is not None:
        os.environ["OMP_NUM_THREADS"] = given
    with comm.start():
        return torch.get_num_threads()


@pytest.mark.parametrize(
    ("cores", "given", "threads"),
    [
        ([{0}], None, [1]),
        ([{0, 1, 2, 3}], None, [4]),  # mpirun -n 1: MKL would take one
        ([{0, 1, 2, 3}] * 2, None, [2, 2]),
        ([{0, 1, 2, 3}] * 2, "1", [2, 2]),  # torchrun sets it, whatever the machine has
        ([{0, 1, 2, 3}] * 2, "3", [1, 1]),  # what people set stays: here, what torch took from it at its start
        ([{0, 1, 2, 3}] * 3, None, [1, 1, 1]),
        ([{0, 1, 2, 3}] * 2, "abc", [2, 2]),  # says nothing
        ([{0, 1, 2, 3}] * 2, "0", [2, 2]),
        ([{0, 1, 2, 3}] * 2, " 3,2", [1, 1]),
        ([{0}, {1, 2, 3}], None, [1, 3]),  # as mpirun has bound them
        ([{0, 1}, {1, 2, 3}], None, [1, 1]),
    ],
)
def test_ranks_share_the_cores(cores: list[set[int]], given: str | None, threads: list[int]) -> None:
    assert on_ranks(len(cores), _threads, cores, given) == threads


def stick() -> None:
    with comm.start(timeout_minutes=0.03) as ranks:
        ranks.sum_(torch.ones(1))
        if ranks.rank == 1:
            time.sleep(STUCK)
        ranks.sum_(torch.ones(1))


def _alone() -> Any:
    try:
        with comm.start(timeout_minutes=0.02):
            return "joined"
    except CommError as error:
        return str(error), error.speaks


def test_when_rank_0_never_comes_rank_1_says_so() -> None:
    """All others are silent."""
    (said,) = on_ranks(1, _as, 1)
    assert re.fullmatch(r"rank 0 did not open 127\.0\.0\.1:\d+ within 1\.2 s", said[0])
    assert said[1]
    (other,) = on_ranks(1, _as, 2)
    assert other == (said[0].replace(re.findall(r":\d+", said[0])[0], re.findall(r":\d+", other[0])[0]), False)


def _as(rank: int) -> Any:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    return _alone()


def _give_up(ranks: AbstractComm) -> str:
    ranks.sum_(torch.ones(1))
    if ranks.rank == 0:
        raise KeyError("my own trouble")
    try:
        ranks.sum_(torch.ones(1))
    except CommError as error:
        return str(error)
    return "went on"


def test_why_rank_0_goes_is_heard_though_the_store_goes_with_it() -> None:
    first, second = on_ranks(2, in_group, _give_up)
    assert isinstance(first, KeyError)
    assert second == "rank 0 stopped: KeyError: 'my own trouble'"


def _mixed(ranks: AbstractComm) -> str:
    try:
        if ranks.rank == 0:
            ranks.gather_later(torch.tensor([1])).wait()
        else:
            ranks.largest(0)
    except CommError as error:
        return str(error)
    return "went on"


def test_exchanges_of_different_kinds_are_told_apart() -> None:
    first, second = on_ranks(2, in_group, _mixed)
    assert first.endswith("rank 1 is at a maximum of 8 bytes, rank 0 at a gather of 8 bytes"), first
    assert second.endswith("rank 0 is at a gather of 8 bytes, rank 1 at a maximum of 8 bytes"), second
