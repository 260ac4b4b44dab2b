"""Where ranks meet: a store that all can reach, and a name for this start of the job on which they agree.

A store that a launcher keeps outlives the ranks, and still has what those of an earlier start left there. Its count of
restarts does not tell them apart, since torchrun counts on the node that failed only (see also pytorch#135712). So each
rank says hello with a token of its own, and rank 0 answers every token with the name of this start.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, TCPStore

from ..errors import CommError, RankError
from .launch import Launch
from .lost import GRACE, POLL, ended, line, named

__all__ = ["Store", "joined", "within"]

Store = Any  # torch's stores have no common class in Python
Made = TypeVar("Made")

APART = 2.0  # seconds by which ranks may come after one another

_stores: dict[tuple[str, int], TCPStore] = {}  # the port is taken as long as the process lives


def joined(launch: Launch, patience: timedelta, way: str) -> Store:
    """A store for this start alone, once all ranks have come; else a CommError that names who is missing.

    All are to go on the same way, or they would wait for each other.
    """
    _check_address(launch)
    place = launch.address, launch.port
    if place not in _stores:
        _stores[place] = _connected(launch, patience)
    store, deadline = PrefixStore(f"torch_admm/{launch.job}", _stores[place]), time.monotonic() + _seconds(patience)
    token = secrets.token_hex(8)
    store.set(f"hello/{launch.rank}", token)
    name = token if launch.rank == 0 else _answer(store, launch, token, patience)
    own = PrefixStore(name, store)
    own.set(f"here/{launch.rank}", way)
    missing = _invited(store, own, launch, name, deadline) if launch.rank == 0 else _awaited(own, launch, deadline)
    if missing:
        speaks = launch.rank == min(set(range(launch.size)).difference(missing))
        raise _absent(missing, launch, patience, speaks=speaks)
    if differs := _agreed(own, launch, way):
        raise RankError(differs)
    return own


def _agreed(own: Store, launch: Launch, way: str) -> str:
    """What rank 0 has to say to the ways of all."""
    if launch.rank == 0:
        ways = {own.get(f"here/{rank}").decode(): rank for rank in reversed(range(launch.size))}
        others = [f"ranks differ in backend: {way} on rank 0, {o} on rank {rank}" for o, rank in ways.items() if rank]
        own.set("agreed", others[-1] if others else "")
        _wait_for(range(1, launch.size if others else 1), own, "heard")  # the store goes with this rank
    try:
        found = str(own.get("agreed").decode())
        own.set(f"heard/{launch.rank}", "")
    except RuntimeError as error:
        reason = line(error)
    else:
        return found
    raise ended(f"rank {launch.rank} lost rank 0: {reason}", speaks=launch.rank == 1)


def _wait_for(ranks: Iterable[int], own: Store, key: str) -> None:
    """For a little while."""
    deadline = time.monotonic() + APART
    while not all(_has(own, f"{key}/{rank}") for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL)


def within(patience: timedelta, connect: Callable[[], Made]) -> Made:
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
    thread.join(_seconds(patience))
    found = made[0] if made else RuntimeError("no answer")
    if isinstance(found, Exception):
        raise found
    return found


def _check_address(launch: Launch) -> None:
    try:
        socket.getaddrinfo(launch.address, launch.port)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a valid host name"
    else:
        return
    said = f"MASTER_ADDR is {launch.address!r}, which cannot be resolved: {why}"
    if launch.elsewhere:  # rank 0 may well know its own name; if not, the job has ended by now
        time.sleep(APART)
        raise ended(f"rank {launch.rank}: {said}", speaks=True)
    raise ended(said, speaks=launch.rank == 0, pause=APART)


def _connected(launch: Launch, patience: timedelta) -> TCPStore:
    place, late = (launch.address, launch.port), patience + timedelta(seconds=GRACE)
    try:
        return within(late, lambda: TCPStore(*place, None, launch.serves, patience, wait_for_workers=False))
    except RuntimeError as error:
        reason = str(error)
    speaks = launch.rank == 0
    if "EADDRINUSE" in reason or "already in use" in reason:
        said = f"port {launch.port} is taken on {launch.address}; set MASTER_PORT to a free one"
    elif not launch.serves and not launch.waits and not _listens(place):
        said = f"rank 0 did not open {launch.address}:{launch.port} within {_said(patience)}"
        speaks = launch.rank == 1
    else:
        said = f"rank {launch.rank} cannot reach {launch.address}:{launch.port}: {reason.splitlines()[0]}"
    raise ended(said, speaks=speaks)


def _listens(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, GRACE).close()
    except OSError:
        return False
    return True


def _answer(store: Store, launch: Launch, token: str, patience: timedelta) -> str:
    """The name that rank 0 gave to this start."""
    try:
        store.wait([f"answer/{token}"], patience)
        return str(store.get(f"answer/{token}").decode())
    except RuntimeError:
        first = next((rank for rank in range(1, launch.rank) if _has(store, f"hello/{rank}")), launch.rank)
    raise _absent([0], launch, patience, speaks=launch.rank == first)


def _invited(store: Store, own: Store, launch: Launch, name: str, deadline: float) -> list[int]:
    """Rank 0 tells all others the name of this start, until all are here; those that are not."""
    missing, seen = list(range(1, launch.size)), set[bytes]()
    while missing and time.monotonic() < deadline:
        for rank in missing:
            if _has(store, f"hello/{rank}") and (token := store.get(f"hello/{rank}")) not in seen:
                seen.add(token)
                store.set(f"answer/{token.decode()}", name)
        missing = [rank for rank in missing if not _has(own, f"here/{rank}")]
        time.sleep(POLL if missing else 0)
    return missing


def _awaited(own: Store, launch: Launch, deadline: float) -> list[int]:
    """The other ranks wait until all are here, and rank 0 has said so; those that are not."""
    left = timedelta(seconds=max(POLL, deadline - time.monotonic()))
    try:
        own.wait([*(f"here/{rank}" for rank in range(launch.size)), "agreed"], left)
    except RuntimeError:
        missing = [rank for rank in range(launch.size) if rank != launch.rank and not _has(own, f"here/{rank}")]
        return missing or [0]
    return []


def _has(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:  # nobody keeps the store any more
        return False


def _absent(missing: list[int], launch: Launch, patience: timedelta, *, speaks: bool) -> CommError:
    return ended(f"{named(missing)} of {launch.size} did not join within {_said(patience)}", speaks=speaks)


def _seconds(patience: timedelta) -> float:
    return patience.total_seconds()


def _said(patience: timedelta) -> str:
    return f"{_seconds(patience):g} s"
