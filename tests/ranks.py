"""Functions on several ranks: real processes in a real group, for the tests."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_admm import comm

__all__ = ["Task", "clean_environment", "free_port", "in_group", "mpirun", "on_ranks"]

PRELOAD = ["torch", "torch_admm", "torch.distributed", "baselines", "tests.ranks"]  # once, not once a rank
SECONDS = 120.0

Task = Callable[..., Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def on_ranks(size: int, task: Task, *args: Any, env: dict[str, str] | None = None) -> list[Any]:
    """What `task(*args)` gives on each rank: its result, what it raised, or the exit code of one that ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size), **(env or {})}
    place |= {"LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_run, args=(place | {"RANK": str(rank)}, pipes[rank][1], task, args), daemon=True)
        for rank in range(size)
    ]
    try:
        for rank, (_, end) in zip(ranks, pipes, strict=True):
            rank.start()
            end.close()
        return [_result(rank, pipe) for rank, (pipe, _) in zip(ranks, pipes, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _result(rank: Any, pipe: Connection) -> Any:
    if pipe not in wait([pipe], SECONDS):
        return TimeoutError(f"no result in {SECONDS:g} s")
    try:
        return pipe.recv()
    except EOFError:
        rank.join(SECONDS)
        return rank.exitcode


def _run(env: dict[str, str], pipe: Connection, task: Task, args: tuple[Any, ...]) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        result = task(*args)
    except Exception as error:
        traceback.print_exc()
        result = error
    pipe.send(result)
    pipe.close()


def in_group(task: Task, *args: Any, **options: Any) -> Any:
    """`task(comm, *args)` within a group, of one thread a rank: how many there are decides how products round."""
    with comm.start(**{"threads": 1} | options) as ranks:
        return task(ranks, *args)


def mpirun(kind: str = "MPICH") -> list[str]:
    """The command that starts ranks, of the MPI that mpi4py comes with or of an Open MPI that is installed here.

    Tests without it are skipped.
    """
    pytest.importorskip("mpi4py")
    name, options = {"MPICH": ("mpiexec", []), "Open MPI": ("mpirun.openmpi", ["--oversubscribe"])}[kind]
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"no {name} here")
    return [found, *options]


def clean_environment(**more: str) -> dict[str, str]:
    """For commands that start ranks: one thread each, and nothing of a launcher that started the tests."""
    foreign = ("OMPI_", "PMI", "SLURM_", "MASTER_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_")
    kept = {k: value for k, value in os.environ.items() if not k.startswith(foreign) or k == "SLURM_CONF"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | root | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)} | more
