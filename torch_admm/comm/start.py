"""Building the group, and taking it down."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..arguments import choice, positive, positive_int
from ..errors import CommError, told
from . import mpi
from .base import AbstractComm, Solo
from .group import Group
from .launch import Launch, launched
from .lost import GRACE, Process, here, leave, line, lost, stay
from .meet import meet
from .near import Near

__all__ = ["BACKENDS", "current", "start"]

Store = Any  # torch's stores have no common class in Python
Made = TypeVar("Made")


@contextmanager
def start(
    backend: str = "auto", *, timeout_minutes: float = 5.0, threads: int | None = None, deterministic: bool = False
) -> Iterator[AbstractComm]:
    """Join the ranks that were started with this process, until the end of the block.

    - `backend`: "gloo", "nccl", "mpi" (mpi4py, where torch has no MPI of its own), or "auto": nccl with a GPU, or gloo,
      and among the ranks of one machine the memory they share.
    - `timeout_minutes`: a rank that is not heard of for so long ends the run on all others.
    - `threads`: of torch on this rank; None shares the cores among the ranks that have them in common.
    - `deterministic`: of the comm that the block is given; `fit` has an argument of that name too.

    A process by itself gets `Solo`. A group that was made by init_process_group is taken as it is, and left in place.
    """
    choice("backend", backend, tuple(BACKENDS))
    patience = timedelta(minutes=positive("timeout_minutes", timeout_minutes))
    if threads is not None:
        torch.set_num_threads(positive_int("threads", threads))
    if backend == "mpi":
        mpi.check()
    launch = launched()
    if _is_initialised() or launch is None or launch.size == 1:
        yield current(deterministic=deterministic)
        return
    comm = _joined(launch, backend, patience, deterministic)
    try:
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
_starts = 0  # so far: what one left in the store is not meant for the next
_stores: dict[tuple[str, int], TCPStore] = {}  # the port is taken as long as the process lives


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
            said = f"{launch.by} started {launch.size} ranks, but this one trains alone: with torch_admm.comm.start():"
            warnings.warn(said, RuntimeWarning, stacklevel=3)
    return Solo(deterministic=deterministic)


def _is_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _joined(launch: Launch, backend: str, patience: timedelta, deterministic: bool) -> Group:
    global _own, _starts  # noqa: PLW0603
    _starts += 1
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


def _auto(launch: Launch, patience: timedelta) -> Store:
    return (_nccl if torch.cuda.is_available() else _gloo)(launch, patience)


def _gloo(launch: Launch, patience: timedelta) -> Store:
    return _init("gloo", launch, patience)


def _nccl(launch: Launch, patience: timedelta) -> Store:
    if not torch.cuda.is_available():
        raise ValueError("backend is 'nccl', but there is no GPU here; 'gloo' is the one for CPUs")
    torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    return _init("cpu:gloo,cuda:nccl", launch, patience)


def _mpi(launch: Launch, patience: timedelta) -> Store:
    store = _store(launch, patience)  # MPI cannot say who is missing
    mpi.init(launch.size, launch.by, patience)
    return store


BACKENDS: dict[str, Callable[[Launch, timedelta], Store]] = {
    "auto": _auto,
    "gloo": _gloo,
    "nccl": _nccl,
    "mpi": _mpi,
}


def _init(backend: str, launch: Launch, patience: timedelta) -> Store:
    store = _store(launch, patience)
    _wait_for_all(store, launch, patience)
    try:
        place: Any = {"store": store, "rank": launch.rank, "world_size": launch.size, "timeout": patience}
        with _loopback(launch.one_machine):
            _within(patience, lambda: dist.init_process_group(backend, **place))
    except RuntimeError as error:
        reason = line(error)
    else:
        return store
    raise lost(store, launch.rank, launch.size, reason)


def _store(launch: Launch, patience: timedelta) -> Store:
    """Where ranks meet. The prefix tells a restart by torchrun from what was left there before (pytorch#135712)."""
    try:
        socket.getaddrinfo(launch.address, launch.port)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        said = f"MASTER_ADDR is {launch.address!r}, and that name has no address: {why}"
        raise CommError(said, speaks=launch.rank == 0) from None
    place = launch.address, launch.port
    if place not in _stores:
        _stores[place] = _connected(launch, patience)
    return PrefixStore(f"torch_admm/{launch.job}/{_starts}", _stores[place])


def _connected(launch: Launch, patience: timedelta) -> TCPStore:
    place, late = (launch.address, launch.port), patience + timedelta(seconds=GRACE)
    try:
        return _within(late, lambda: TCPStore(*place, None, launch.serves, patience, wait_for_workers=False))
    except RuntimeError as error:
        reason = str(error)
    speaks = launch.rank == 0
    if "EADDRINUSE" in reason or "already in use" in reason:
        said = f"port {launch.port} is taken on {launch.address}; set MASTER_PORT to a free one"
    elif not launch.serves and not launch.waits and not _listens(place):
        said = f"rank 0 did not come to {launch.address}:{launch.port} within {_said(patience)}"
        speaks = launch.rank == 1
    else:
        said = f"rank {launch.rank} cannot reach {launch.address}:{launch.port}: {reason.splitlines()[0]}"
    raise CommError(said, speaks=speaks)


def _listens(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, GRACE).close()
    except OSError:
        return False
    return True


def _within(patience: timedelta, connect: Callable[[], Made]) -> Made:
    """A stranger that listens and says nothing, or a rank that ends while others connect, would be waited for.

    Torch's own time-outs do not cover either.
    """
    made: list[Made | Exception] = []

    def attempt() -> None:
        try:
            made.append(connect())
        except Exception as error:
            made.append(error)

    thread = Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(patience.total_seconds())
    found = made[0] if made else RuntimeError("no answer")
    if isinstance(found, Exception):
        raise found
    return found


def _wait_for_all(store: Store, launch: Launch, patience: timedelta) -> None:
    store.set(f"here/{launch.rank}", "")
    try:
        store.wait([f"here/{rank}" for rank in range(launch.size)], patience)
    except RuntimeError:
        missing = _absent(store, launch)
    else:
        return
    said = f"rank {', '.join(missing)} of {launch.size} did not come within {_said(patience)}"
    raise CommError(said, speaks=launch.rank == 0 or "0" in missing)


def _absent(store: Store, launch: Launch) -> list[str]:
    try:
        return [str(rank) for rank in range(launch.size) if not store.check([f"here/{rank}"])]
    except RuntimeError:  # nobody keeps the store any more
        return ["0"]


def _said(patience: timedelta) -> str:
    return f"{patience.total_seconds():g} s"


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

    `ranks` are the hosts and cores of all. What OMP_NUM_THREADS says goes first, but torchrun sets that to 1 by itself.
    """
    given, mine = os.environ.get("OMP_NUM_THREADS"), _cores()
    if given is None or (launch.by == "torchrun" and given == "1"):
        host = socket.gethostname()
        sharing = sum(theirs == host and not mine.isdisjoint(cores) for theirs, cores in ranks)
        torch.set_num_threads(max(1, len(mine) // sharing))


def _cores() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # no such call on macOS and Windows
        return set(range(os.cpu_count() or 1))
