"""Building the group, and taking it down."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..arguments import choice, positive, positive_int
from ..errors import CommError
from . import mpi
from .base import AbstractComm, Solo
from .group import Group, leave, lost
from .launch import Launch, launched
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
        if backend == "auto":
            _look_around(comm, patience)
        if threads is None:
            _share_cores(comm, launch)
        yield comm
        _part(comm, backend)
    except CommError:  # others were told, and a store that does not answer would keep this rank, too
        raise
    except BaseException as error:
        leave(comm.store, comm.rank, str(error) or type(error).__name__)
        raise
    finally:
        _forget()


def _forget() -> None:
    global _own  # noqa: PLW0603
    if _own is not None and _own[1] is not None:
        _own[1].close()
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
        store, near = _own if _own is not None else (None, None)
        return Group(deterministic=deterministic, store=store, owned=_own is not None, near=near)
    with suppress(ValueError):
        if (launch := launched()) is not None and launch.size > 1:
            said = f"{launch.by} started {launch.size} ranks, but this one trains alone: with torch_admm.comm.start():"
            warnings.warn(said, RuntimeWarning, stacklevel=3)
    return Solo(deterministic=deterministic)


_own: tuple[Store, Near | None] | None = None  # of the group that `start` made


def _is_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _joined(launch: Launch, backend: str, patience: timedelta, deterministic: bool) -> Group:
    global _own  # noqa: PLW0603 (torch has one default group, so there is one store)
    store = BACKENDS[backend](launch, patience)
    _own = store, None
    return Group(deterministic=deterministic, store=store, owned=True)


def _look_around(comm: Group, patience: timedelta) -> None:
    """Ranks of one machine need no network between them."""
    global _own  # noqa: PLW0603
    comm.near = meet(comm, patience.total_seconds())
    _own = comm.store, comm.near


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
        reason = _line(error)
    else:
        return store
    raise lost(store, launch.rank, launch.size, reason)


def _store(launch: Launch, patience: timedelta) -> Store:
    """Where ranks meet. The prefix tells a restart by torchrun from what was left there before (pytorch#135712)."""
    try:
        socket.getaddrinfo(launch.address, launch.port)
    except socket.gaierror as error:
        said = f"MASTER_ADDR is {launch.address!r}, and that name has no address: {error.strerror}"
        raise CommError(said, speaks=launch.rank == 0) from None
    serves = launch.rank == 0 and not launch.waits
    place = launch.address, launch.port
    try:
        store = _within(patience, lambda: TCPStore(*place, None, serves, patience, wait_for_workers=False))
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            said = f"port {launch.port} is taken on {launch.address}; set MASTER_PORT to a free one"
        else:
            said = f"rank {launch.rank} cannot reach {launch.address}:{launch.port}: {_line(error)}"
        raise CommError(said, speaks=launch.rank == 0) from None
    return PrefixStore(f"torch_admm/{launch.job}", store)


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
        missing = [str(rank) for rank in range(launch.size) if not store.check([f"here/{rank}"])]
        said = f"rank {', '.join(missing)} of {launch.size} did not come within {patience.total_seconds():g} s"
        speaks = launch.rank == 0 or "0" in missing
        raise CommError(said, speaks=speaks) from None


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


def _share_cores(comm: AbstractComm, launch: Launch) -> None:
    """Cores / ranks that may run on them. mpirun may have given each rank cores of its own.

    What OMP_NUM_THREADS says goes first, but torchrun sets that to 1 by itself.
    """
    given = os.environ.get("OMP_NUM_THREADS")
    mine = _cores()
    told = [json.loads(text) for text in comm.texts(json.dumps([socket.gethostname(), sorted(mine)]))]
    if given is None or (launch.by == "torchrun" and given == "1"):
        here = socket.gethostname()
        sharing = sum(host == here and not mine.isdisjoint(cores) for host, cores in told)
        torch.set_num_threads(max(1, len(mine) // sharing))


def _cores() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # no such call on macOS and Windows
        return set(range(os.cpu_count() or 1))


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
