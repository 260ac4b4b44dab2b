"""How processes find each other, and what they say: launchers, sums, agreement, and ranks that fail or go missing."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from torch_admm import comm
from torch_admm.comm import AbstractComm, Solo, launched, lost, mpi, rank_in
from torch_admm.comm.join import joined
from torch_admm.comm.launch import Launch
from torch_admm.data import Rows
from torch_admm.errors import CommError, RankError

from .commands import finished
from .helpers import rng
from .ranks import clean_environment, free_port, in_group, mpirun, on_ranks

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{k}": v for k, v in {"RANK": "2", "SIZE": "3", "LOCAL_RANK": "2", "LOCAL_SIZE": "3"}.items()
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    **{"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
    **{"SLURM_STEP_NODELIST": "node[03-04]", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"},
}


@pytest.mark.parametrize(
    ("env", "by", "numbers", "address"),
    [
        (TORCHRUN | {"MASTER_PORT": "4321"}, "torchrun", (1, 4, 1, 2), "node7"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "torchrun", (1, 2, 1, 1), "127.0.0.1"),  # set by hand, on machines unknown
        (OPEN_MPI, "Open MPI", (2, 3, 2, 3), "127.0.0.1"),
        (MPICH, "MPICH", (0, 2, 0, 2), "127.0.0.1"),
        (SLURM, "Slurm", (5, 8, 1, 4), "node03"),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, "Slurm", (5, 8, 1, 4), "node03"),  # srun --mpi=pmi2
        (SLURM | TORCHRUN, "torchrun", (1, 4, 1, 2), "node7"),
        (SLURM | OPEN_MPI, "Open MPI", (2, 3, 2, 3), "127.0.0.1"),
    ],
)
def test_finds_how_it_was_started(
    env: dict[str, str], by: str, numbers: tuple[int, int, int, int], address: str
) -> None:
    found = launched(env)
    assert found is not None
    assert (found.by, found.address) == (by, address)
    assert (found.rank, found.size, found.local_rank, found.local_size) == numbers
    assert found.port == (4321 if "MASTER_PORT" in env else found.port)
    assert 1024 < found.port < 32768


def test_a_process_by_itself_and_a_batch_script_without_srun_are_alone() -> None:
    assert launched({}) is None
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}) is None


def test_nodes_that_count_restarts_differently_are_one_job() -> None:
    """torchrun counts on the node whose rank failed only."""
    first, second = (launched(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": n}) for n in "01")
    assert first is not None
    assert first == second


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, 0),
        (SLURM, 5),
        (OPEN_MPI | {"MASTER_PORT": "70000"}, 2),
        (TORCHRUN | {"RANK": "x"}, 0),
        ({"RANK": "3"}, 3),
        (TORCHRUN | {"WORLD_SIZE": "0", "RANK": "2"}, 2),
        (TORCHRUN | {"RANK": "4"}, 0),  # a fifth of four, which has to speak for itself
    ],
)
def test_knows_its_rank_even_if_the_rest_makes_no_sense(env: dict[str, str], rank: int) -> None:
    assert rank_in(env) == rank


def test_the_machines_of_one_mpich_job_know_each_other_by_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    several = MPICH | {"MPI_LOCALNRANKS": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "4321"}
    found = []
    for starter in (7, 8):  # the process that starts the ranks of a machine has another number on each
        monkeypatch.setattr(os, "getppid", lambda starter=starter: starter)
        found.append(launched(several))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("env", "match"),
    [
        (TORCHRUN | {"RANK": "one"}, "RANK is 'one' in the environment; a whole number is expected"),
        (TORCHRUN | {"RANK": "4"}, "torchrun says rank 4 of 4; a rank from 0 to 3"),
        (TORCHRUN | {"MASTER_PORT": ""}, "MASTER_PORT is '' in the environment; a whole number"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "Open MPI started ranks on several machines; set MASTER_ADDR"),
        (
            MPICH | {"MPI_LOCALNRANKS": "1", "MASTER_ADDR": "node7"},
            "MPICH started ranks on several machines; set MASTER_ADDR to the host name of rank 0's machine, and",
        ),
        ({"RANK": "1"}, "RANK is set in the environment, but WORLD_SIZE is not; set both, or none to train alone"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set in the environment, but RANK is not"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "torchrun says that there are 0 ranks; at least 1 is expected"),
        (
            TORCHRUN | {"MASTER_PORT": "70000"},
            "MASTER_PORT is 70000 in the environment; a port from 1 to 65535 is expected",
        ),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT is 0 in the environment; a port from 1 to 65535 is expected"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID is not set in the environment; a whole number"),
    ],
)
def test_refuses_an_environment_that_makes_no_sense(env: dict[str, str], match: str) -> None:
    with pytest.raises(ValueError, match=re.escape(match)):
        launched(env)


def test_one_process_is_the_trivial_case() -> None:
    alone = Solo()
    values = torch.arange(3.0)
    assert alone.sum_(values) is values
    assert alone.total([values], alone.open_order()) is values
    assert alone.largest(3, -1) == [3, -1]
    assert alone.texts("só") == ["só"]
    assert alone.all_true(True)
    assert not alone.all_true(False)
    assert (alone.rank, alone.size, alone.bytes_sent) == (0, 1, 0)
    alone.same({"batch_size": 3})
    with pytest.raises(KeyError, match="lost"), alone.together():
        raise KeyError("lost")
    with comm.start() as found:
        assert isinstance(found, Solo)


LARGE = 150_001  # numbers


def _say(ranks: AbstractComm) -> dict[str, Any]:
    rank = ranks.rank
    said: dict[str, Any] = {}
    values, before = torch.full((3,), float(rank), dtype=torch.float64), ranks.bytes_sent
    said["sum"] = ranks.sum_(values)[0].item()
    said["bytes of a sum"] = ranks.bytes_sent - before
    first, second = ranks.sum_later(torch.ones(2)), ranks.sum_later(torch.full((2,), 2.0))
    said["two at once"] = second.wait()[0].item() + first.wait()[0].item() + first.wait()[0].item()
    said["gathered"] = ranks.gather_later(torch.tensor([rank, 7])).wait().tolist()
    lines = torch.tensor([[rank, other] for other in range(ranks.size)])
    said["swapped"] = ranks.swap_later(lines).wait().tolist()
    said["largest"] = ranks.largest(rank, -rank)
    said["all"] = ranks.all_true(True), ranks.all_true(rank != 1)
    said["texts"] = ranks.texts("é" * rank)
    said["first"] = ranks.from_first_(torch.full((2,), 5.0 + rank)).tolist()
    return said


def _disagree(ranks: AbstractComm) -> list[str]:
    messages = []
    ranks.same({"width": 3})
    for what in (
        {"batch_size": 256 if ranks.rank == 1 else 512},
        {"net": "28-300-1", **({"x": 1} if ranks.rank else {})},
    ):
        with pytest.raises(RankError) as caught:
            ranks.same(what)
        messages.append(str(caught.value))
    for said in ("no such file", ""):
        with pytest.raises(ValueError, match=said) as failure, ranks.together():
            _fail_on(ranks.rank == 1, said)
        messages.append(str(failure.value))
    return messages


def _fail_on(culprit: bool, said: str) -> None:
    if culprit:
        raise ValueError(said)


def _tree(ranks: AbstractComm) -> tuple[bytes, bytes, int]:
    """The sum of 25 leaves, unevenly dealt out, and all of them in order."""
    rows = Rows(torch.zeros(100, 1), torch.zeros(100)).part(ranks.rank, ranks.size, shards=25)
    leaves = [torch.randn(50, generator=rng(i)) for i in rows.split.here]
    collected = torch.stack(ranks.collect(leaves, rows))
    return (
        ranks.total(leaves, ranks.order(rows)).numpy().tobytes(),
        collected.numpy().tobytes(),
        torch.get_num_threads(),
    )


def _large_tree(ranks: AbstractComm) -> tuple[str, int]:
    """The sum of leaves that are too large to be sent to everybody, and the bytes that it took."""
    rows = Rows(torch.zeros(100, 1), torch.zeros(100)).part(ranks.rank, ranks.size, shards=25)
    leaves, before = (torch.randn(LARGE, generator=rng(i)) for i in rows.split.here), ranks.bytes_sent
    pending = ranks.totals_later(([leaf] for leaf in leaves), torch.float32, ranks.order(rows))
    ranks.sum_(torch.ones(3))  # another exchange, before anybody waits for this one
    (total,) = pending.wait()
    return hashlib.sha256(total.numpy().tobytes()).hexdigest(), ranks.bytes_sent - before


def _all(ranks: AbstractComm) -> dict[str, Any]:
    found = _say(ranks) | {"disagree": _disagree(ranks)}
    fixed = comm.current(deterministic=True)
    found["tree"], found["collected"], found["threads"] = _tree(fixed)
    found["large tree"], found["bytes of stripes"] = _large_tree(fixed)
    return found


def _all_by(backend: str) -> Any:
    return in_group(_all, backend=backend)


@pytest.mark.parametrize(("size", "backend"), [(2, "auto"), (3, "auto"), (3, "gloo")])
def test_a_group_of_real_processes(size: int, backend: str) -> None:
    for rank, said in enumerate(on_ranks(size, _all_by, backend)):
        assert isinstance(said, dict), said
        _check(said, rank, size)


def _check(said: dict[str, Any], rank: int, size: int) -> None:
    numbers = list(range(size))
    assert said["sum"] == sum(numbers)
    assert said["bytes of a sum"] == 3 * 8
    assert said["two at once"] == 4 * size
    assert said["gathered"] == [[n, 7] for n in numbers]
    assert said["swapped"] == [[n, rank] for n in numbers]
    assert said["largest"] == [size - 1, 0]
    assert said["all"] == (True, False)
    assert said["texts"] == ["é" * n for n in numbers]
    assert said["first"] == [5.0, 5.0]
    assert (said["tree"], said["collected"]) == _tree(Solo(deterministic=True))[:2]
    assert said["large tree"] == _large_tree(Solo(deterministic=True))[0]
    stripe, branches = -(-LARGE // size), 4  # that a rank of three has at most; of two, one each, which are just added
    assert said["bytes of stripes"] == 4 * (3 + (LARGE if size == 2 else branches * stripe * size + stripe))
    *differ, failed, nameless = said["disagree"]
    assert differ == [
        "ranks differ in batch_size: 512 on rank 0, 256 on rank 1",
        "ranks differ in x: None on rank 0, 1 on rank 1",
    ]
    assert failed == ("no such file" if rank == 1 else "rank 1: no such file")
    assert nameless == ("" if rank == 1 else "rank 1: ValueError")


@pytest.mark.parametrize("kind", ["MPICH", "Open MPI"])
@pytest.mark.parametrize(("size", "backend"), [(2, "gloo"), (2, "mpi"), (3, "mpi")])
def test_ranks_of_mpirun(size: int, backend: str, kind: str) -> None:
    """Both ways to use an mpirun: as a launcher only, and for what crosses."""
    code = f"from tests import test_comm; test_comm.report({backend!r})"
    command = [*mpirun(kind), "-n", str(size), sys.executable, "-c", code]
    done = finished(command, clean_environment())
    assert (done.returncode, done.stdout.split()) == (0, [backend] * size), done


def report(backend: str) -> None:
    with comm.start(backend) as ranks:
        _check(_all(ranks), ranks.rank, ranks.size)
        said = torch.distributed.get_backend()
    os.write(1, said.replace("mpi4py", "mpi").encode() + b"\n")


def test_an_mpi_of_torch_needs_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the builds here has one: that it is asked for first is all that can be seen."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match="needs mpi4py and an MPI library"), comm.start("mpi"):
        pass
    made: list[Any] = []
    monkeypatch.setattr(torch.distributed, "is_mpi_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **_: made.append(args))
    with comm.start("mpi") as alone:
        assert alone.size == 1
    mpi.init(2, "MPICH", timedelta(seconds=1))
    mpi.finish()
    assert made == [("mpi",)]


def test_ranks_of_torchrun_do_not_know_each_other_by_mpi() -> None:
    pytest.importorskip("mpi4py")
    command = [sys.executable, "-c", "from torch_admm import comm; comm.start('mpi').__enter__()"]
    env = clean_environment(RANK="0", WORLD_SIZE="2", MASTER_PORT=str(free_port()))
    done = finished(command, env)
    assert done.returncode == 1
    assert "MPI sees 1 of the 2 ranks that torchrun started: start them with mpirun" in done.stderr


def test_a_stuck_rank_of_mpi_is_named_by_one_that_is_left() -> None:
    """MPI itself says nothing of it. mpirun ends all with the first: that is the one that speaks."""
    command = [*mpirun(), "-n", "3", sys.executable, "-c", "from tests import test_comm; test_comm.stick()"]
    done = finished(command, clean_environment())
    assert done.returncode != 0
    said = re.findall("^rank .* missing.*", done.stdout, re.MULTILINE)
    assert said[0] == "rank 1 is missing (it ended or is stuck); rank 0 reports: no answer within 1.8 s (speaks)", done


def stick() -> None:
    with comm.start("mpi", timeout_minutes=0.03) as ranks:
        os.write(1, _go_wrong(ranks, "stuck", 1).encode() + b"\n")
        sys.exit(1)


def test_a_missing_rank_is_named_within_two_seconds() -> None:
    """After the time-out: the roll call, pauses for others to be heard; the rest is for taking down."""
    assert lost.GRACE + 10 * lost.POLL + 2 * lost.HEARD <= 1.3


def _go_wrong(ranks: AbstractComm, what: str, culprit: int) -> str:
    lost.GRACE = 3.0  # for a machine that has other things to do
    ranks.sum_(torch.ones(1000))
    if ranks.rank == culprit:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stuck":
            time.sleep(9)
        if what == "failed":
            raise ValueError("row 7 is not finite")
    try:
        ranks.sum_(torch.ones(1000))
    except CommError as error:
        return f"{error} ({'speaks' if error.speaks else 'is silent'})"
    return "went on"


@pytest.mark.parametrize(
    ("what", "culprit", "match"),
    [
        ("killed", 1, "rank 1 is missing"),
        ("killed", 0, "rank 0 is missing"),  # and the store with it
        ("stuck", 2, "rank 2 is missing"),
        ("failed", 1, "rank 1 stopped: row 7 is not finite"),
    ],
)
def test_a_rank_that_goes_missing_is_named_by_all_others(what: str, culprit: int, match: str) -> None:
    minutes = 0.05 if what == "stuck" else 1.0
    results = on_ranks(3, in_group_briefly, _go_wrong, what, culprit, minutes)
    others = [text for rank, text in enumerate(results) if rank != culprit]
    for text in others:
        assert str(text).startswith(match), results
    assert [str(text).endswith("(speaks)") for text in others] == [True, False]


def in_group_briefly(task: Any, what: str, culprit: int, minutes: float) -> Any:
    return in_group(task, what, culprit, timeout_minutes=minutes)


def _join(backend: str = "auto") -> str:
    try:
        in_group(_say, backend=backend, timeout_minutes=0.02)
    except (CommError, ValueError, ImportError) as error:
        return str(error)
    return "joined"


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        first, _ = on_ranks(2, _join, env={"MASTER_PORT": port})
    assert first == f"port {port} is taken on 127.0.0.1; set MASTER_PORT to a free one"


def test_a_host_without_address_is_named() -> None:
    for text in on_ranks(2, _join, env={"MASTER_ADDR": "no-such-host.invalid"}):
        assert text.startswith("MASTER_ADDR is 'no-such-host.invalid', which cannot be resolved")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"rank": 0}, ""),
        ({"rank": 1, "local_rank": 1}, None),
        ({"rank": 2}, "rank 2: "),  # the first of another machine, where rank 0's may have no name
        ({"rank": 3, "local_rank": 1}, None),
        ({"rank": 1, "local_rank": 1, "local_size": 1}, "rank 1: "),  # as by hand
        ({"rank": 2, "local_size": 4}, None),
    ],
)
def test_a_host_without_address_is_named_by_those_who_do_not_know_it(
    place: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    usual: dict[str, Any] = {"by": "Slurm", "size": 4, "local_rank": 0, "local_size": 2, "port": 1, "job": "7"}
    launch = Launch(**(usual | place), address="no-such-host.invalid")
    with pytest.raises(CommError, match=f"^{said or ''}MASTER_ADDR is 'no-such-host.invalid', which") as caught:
        joined(launch, timedelta(seconds=1), "gloo")
    assert caught.value.speaks == (said is not None)
    assert len(waited) == (launch.rank > 0)  # so that whoever speaks first can end the job


def _wait_for_nobody() -> str:
    os.environ["WORLD_SIZE"] = "3"
    return _join()


def test_a_rank_that_never_comes_is_named() -> None:
    assert on_ranks(1, _wait_for_nobody) == ["ranks 1 and 2 of 3 did not join within 1.2 s"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backend": "smoke"}, "backend is 'smoke'; one of 'auto', 'gloo', 'nccl', 'mpi' is expected"),
        ({"timeout_minutes": 0}, "timeout_minutes is 0; a finite number above 0"),
        ({"timeout_minutes": 1e13}, "timeout_minutes is 10000000000000.0; at most 100000 is expected"),
        ({"threads": 0}, "threads is 0; a whole number of at least 1"),
        ({"backend": "nccl"}, "backend is 'nccl', but there is no GPU here"),
    ],
)
def test_refuses_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=re.escape(match)), comm.start(**options):
        pass


def test_without_mpi4py_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=re.escape('pip install "torch-admm[mpi]"')), comm.start("mpi"):
        pass


def test_warns_of_ranks_that_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(RuntimeWarning, match="torchrun started 2 ranks, but this one trains alone"):
        assert isinstance(comm.current(), Solo)
