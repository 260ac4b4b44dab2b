"""Building the group, and taking it down."""

from __future__ import annotations

import json
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from ..arguments import choice, positive, positive_int
from ..errors import CommError, told
from . import mpi
from .base import AbstractComm, Solo
from .group import Group
from .join import Store, joined, within
from .launch import Launch, launched
from .lost import Process, here, leave, line, lost, noticing_stops, stay
from .meet import meet
from .near import Near

__all__ = ["BACKENDS", "current", "start"]

LONGEST = 100_000.0  # minutes, ten weeks: torch counts milliseconds


@contextmanager
def start(
    backend: str = "auto", *, timeout_minutes: float = 5.0, threads: int | None = None, deterministic: bool = False
) -> Iterator[AbstractComm]:
    """Join the ranks that were started with this process, until the end of the block.

    - `backend`: "gloo", "nccl", "mpi" (mpi4py, where torch has no MPI of its own), or "auto": nccl with a GPU, or gloo,
      and among the ranks of one machine the memory they share.
    - `timeout_minutes`: a rank that does not answer for so long ends the run on all others.
    - `threads`: of torch on this rank; None shares the cores among the ranks that have them in common, or takes
      OMP_NUM_THREADS (but for the 1 that torchrun sets by itself: give `threads=1` if that is meant).
    - `deterministic`: of the comm that the block is given; `fit` has an argument of that name too.

    A process by itself gets `Solo`. A group that was made by init_process_group is taken as it is, and left in place.
    """
    choice("backend", backend, tuple(BACKENDS))
    patience = timedelta(minutes=positive("timeout_minutes", timeout_minutes, most=LONGEST))
    if threads is not None:
        torch.set_num_threads(positive_int("threads", threads))
    launch = launched()
    _check(backend, launch)
    if _is_initialised() or launch is None or launch.size == 1:
        if launch is not None and threads is None:
            _share_cores([(socket.gethostname(), sorted(_cores()))], launch)
        yield current(deterministic=deterministic)
        mpi.finish()
        return
    comm = _joined(launch, backend, patience, deterministic)
    try:
        with noticing_stops():
            comm.same({"backend": backend, "timeout_minutes": timeout_minutes})
            _look_around(comm, launch, near=backend == "auto", set_threads=threads is None, patience=patience)
            yield comm
            _part(comm, backend)
    except CommError:  # others were told, and a store that does not answer would keep this rank, too
        raise
    except BaseException as error:
        leave(comm.store, comm.rank, told(error))
        _forget()
        if launch.serves:
            stay(comm.store, comm.rank, comm.size)
        raise
    finally:
        _forget()


@final
@dataclass
class _Own:
    """What there is beside the group that `start` made."""

    store: Store
    near: Near | None = None
    processes: Sequence[Process] = ()


_own: _Own | None = None  # torch has one default group, so there is one


def _forget() -> None:
    global _own  # noqa: PLW0603
    if _own is not None and _own.near is not None:
        _own.near.close()
    _own = None
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _part(comm: AbstractComm, backend: str) -> None:
    """Nobody goes while another still has something to say; a group that broke is gone already."""
    if dist.is_initialized():
        comm.largest(0)
        if backend == "mpi":
            mpi.finish()


def current(*, deterministic: bool = False) -> AbstractComm:
    """The group there is, or `Solo`."""
    if _is_initialised():
        if _own is None:
            return Group(deterministic=deterministic)
        return Group(deterministic=deterministic, owned=True, **vars(_own))
    with suppress(ValueError):
        if (launch := launched()) is not None and launch.size > 1:
            said = f"{launch.by} started {launch.size} ranks, but this one trains alone"
            said += "; wrap the call in `with torch_admm.comm.start():`"
            warnings.warn(said, RuntimeWarning, stacklevel=3)
    return Solo(deterministic=deterministic)


def _is_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _joined(launch: Launch, backend: str, patience: timedelta, deterministic: bool) -> Group:
    global _own  # noqa: PLW0603
    _own = _Own(BACKENDS[backend](launch, patience))
    return Group(deterministic=deterministic, store=_own.store, owned=True)


def _look_around(comm: Group, launch: Launch, *, near: bool, set_threads: bool, patience: timedelta) -> None:
    """Ranks of one machine need no network between them, and share its cores."""
    assert _own is not None
    mine = {"host": socket.gethostname(), "cores": sorted(_cores()), "process": here()}
    ranks = [json.loads(text) for text in comm.texts(json.dumps(mine))]
    comm.processes = _own.processes = [Process(*rank["process"]) for rank in ranks]
    if set_threads:
        _share_cores([(rank["host"], rank["cores"]) for rank in ranks], launch)
    if near:
        comm.near = _own.near = meet(comm, patience.total_seconds())


def _check(backend: str, launch: Launch | None) -> None:
    """Before anybody is waited for."""
    if backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("backend is 'nccl', but there is no GPU here; 'gloo' is the one for CPUs")
    if backend == "mpi":
        mpi.check(launch)
        if (launch is None or launch.size == 1) and not dist.is_mpi_available():
            mpi.ready()  # for whoever else uses it


def _auto(launch: Launch, patience: timedelta) -> Store:
    return (_nccl if torch.cuda.is_available() else _gloo)(launch, patience)


def _gloo(launch: Launch, patience: timedelta) -> Store:
    return _init("gloo", launch, patience)


def _nccl(launch: Launch, patience: timedelta) -> Store:
    torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    return _init("cpu:gloo,cuda:nccl", launch, patience)


def _mpi(launch: Launch, patience: timedelta) -> Store:
    store = joined(launch, patience, "mpi")  # MPI would wait for a missing rank for ever, and cannot say who it is
    mpi.init(launch.size, launch.by, patience)
    return store


BACKENDS: dict[str, Callable[[Launch, timedelta], Store]] = {
    "auto": _auto,
    "gloo": _gloo,
    "nccl": _nccl,
    "mpi": _mpi,
}


def _init(backend: str, launch: Launch, patience: timedelta) -> Store:
    store = joined(launch, patience, backend.rpartition(":")[2])
    try:
        place: Any = {"store": store, "rank": launch.rank, "world_size": launch.size, "timeout": patience}
        with _loopback(launch.one_machine):
            within(patience, lambda: dist.init_process_group(backend, **place))
    except RuntimeError as error:
        reason = line(error)
    else:
        return store
    raise lost(store, launch.rank, launch.size, reason)


@contextmanager
def _loopback(wanted: bool) -> Iterator[None]:
    """On one machine ranks need no network, and no name of the machine that resolves."""
    name = "GLOO_SOCKET_IFNAME"
    loops = [loop for _, loop in socket.if_nameindex() if loop in ("lo", "lo0")]
    if not wanted or name in os.environ or not loops:
        yield
        return
    os.environ[name] = loops[0]
    try:
        yield
    finally:
        del os.environ[name]


def _share_cores(ranks: Sequence[tuple[str, list[int]]], launch: Launch) -> None:
    """Cores / ranks that may run on them. mpirun may have given each rank cores of its own.

    `ranks` are the hosts and cores of all. What OMP_NUM_THREADS says goes first, if it is a number (or several, for one
    in the other); but torchrun sets that to 1 by itself.
    """
    given, mine = os.environ.get("OMP_NUM_THREADS", ""), _cores()
    if not re.match(r"\s*0*[1-9]\d*\s*(,|$)", given) or (launch.by == "torchrun" and given == "1"):
        host = socket.gethostname()
        sharing = sum(theirs == host and not mine.isdisjoint(cores) for theirs, cores in ranks)
        torch.set_num_threads(max(1, len(mine) // sharing))


def _cores() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # no such call on macOS and Windows
        return set(range(os.cpu_count() or 1))
