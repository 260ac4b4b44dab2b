"""Ranks of one machine: what crosses goes through memory that they share.

Each rank has memory of its own that all others can read. It writes what it has there, says so by a byte over a socket,
and reads what the others wrote once they have said so. The sockets also order the writes and the reads, and they end
with their rank: a lost one is known at once. Neither memory nor sockets have a name that a killed process could leave
behind; only the folder in which they meet does, for the moment of meeting.
"""

from __future__ import annotations

import mmap
import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, reduce
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor

from .base import AbstractComm, Pending, unpack

__all__ = ["ROOM", "Near", "meet"]

SLOTS = 3  # exchanges that may be under way at once
RING = 2 * SLOTS  # places for them, used in turn: whoever starts one has read what was RING - SLOTS places before
ROOM = 8 << 20  # bytes of an exchange; memory that was never written to takes none
STRIPED = 1 << 16  # bytes from which on each rank adds up a part, and reads the other parts
SPIN = 0.01  # seconds: asked again at once, if each rank has a core: to be woken up takes longer than most exchanges
HEADER = struct.Struct("<q")  # bytes that follow
ALIGNED = 64  # bytes: where these start
SLOT = ALIGNED + ROOM

WRITTEN, ADDED = b"w", b"a"

Shapes = tuple[torch.Size, ...]
Result = TypeVar("Result")


class Slots(NamedTuple):
    """Where all ranks have what they send in one exchange."""

    start: int
    size: int  # bytes
    values: list[Tensor]  # by rank, all in one vector
    parts: list[list[Tensor]]  # by rank, the same in the shapes it has


Combine = Callable[[Slots], None]


@final
class Near:
    """The collectives of `Group`, each in place; all ranks make the same calls in the same order."""

    def __init__(self, rank: int, links: dict[int, socket.socket], memories: Sequence[mmap.mmap], seconds: float):
        """`links` to the other ranks, `memories` of all; a rank that says nothing for so many seconds is lost."""
        self.rank, self.size, self.links, self.seconds = rank, len(memories), links, seconds
        self.memories = memories
        self.spin = SPIN if self.size <= len(os.sched_getaffinity(0)) else 0.0
        self.heard = {what: dict.fromkeys(links, 0) for what in (WRITTEN, ADDED)}
        self.started = self.added = self.finished = 0
        self.under_way: deque[tuple[Slots, Combine]] = deque()
        self._slots = lru_cache(maxsize=64)(self._cut)  # the same few sizes come again and again

    def takes(self, device: torch.device, size: int) -> bool:
        """Are so many bytes few enough, and here?"""
        return device.type == "cpu" and 0 < size <= ROOM

    def sum(self, values: Tensor) -> Pending[Tensor]:
        """Add up the values of all ranks: in the order of ranks, so that all get the same bits."""
        flat = values.view(-1)
        return self._start([flat], flat.dtype, lambda slots: self._add(slots, flat), values)

    def sums(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Pending[list[Tensor]]:
        """The same of several tensors, as numbers of `dtype`; they are written to and read from where they cross."""
        found: list[Tensor] = []
        return self._start(tensors, dtype, lambda slots: found.extend(self._added(slots, tensors)), found)

    def largest(self, values: Tensor) -> Pending[Tensor]:
        flat = values.view(-1)
        return self._start([flat], flat.dtype, lambda slots: _copy(reduce(torch.maximum, slots.values), flat), values)

    def from_first(self, values: Tensor) -> Pending[Tensor]:
        flat = values.view(-1)
        return self._start([flat], flat.dtype, lambda slots: _copy(slots.values[0], flat), values)

    def gather(self, values: Tensor, came: Tensor) -> Pending[Tensor]:
        flat, lines = values.view(-1), came.view(self.size, -1)
        return self._start([flat], flat.dtype, lambda slots: _stack(slots.values, lines), came)

    def close(self) -> None:
        """The others hear of it at once."""
        for link in self.links.values():
            link.close()

    def _start(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, combine: Combine, result: Result
    ) -> Pending[Result]:
        """Write what is here; the rest happens when somebody waits for it, in the order of the starts."""
        number = self.started
        self._finish(number - SLOTS)
        self._wait(WRITTEN, number - RING + SLOTS + 1)  # so nobody reads any more what was in this place
        slots = self._slots(number % RING, tuple(t.shape for t in tensors), dtype)
        for place, values in zip(slots.parts[self.rank], tensors, strict=True):
            place.copy_(values)
        HEADER.pack_into(self.memories[self.rank], slots.start, slots.size)
        self.started += 1
        self.under_way.append((slots, combine))
        self._tell(WRITTEN)

        def finish() -> Result:
            self._finish(number)
            return result

        return Pending(finish)

    def _finish(self, number: int) -> None:
        """All exchanges up to this one."""
        while self.finished <= number:
            self._wait(WRITTEN, self.finished + 1)
            slots, combine = self.under_way.popleft()
            for rank, memory in enumerate(self.memories):
                (came,) = HEADER.unpack_from(memory, slots.start)
                if came != slots.size:
                    raise RuntimeError(f"rank {rank} sent {came} bytes, rank {self.rank} {slots.size}")
            combine(slots)
            self.finished += 1

    def _cut(self, slot: int, shapes: Shapes, dtype: torch.dtype) -> Slots:
        start, counts = slot * SLOT, [shape.numel() for shape in shapes]
        size = sum(counts)
        values = [torch.frombuffer(m, dtype=dtype, count=size, offset=start + ALIGNED) for m in self.memories]
        parts = [[part.view(shape) for part, shape in zip(v.split(counts), shapes, strict=True)] for v in values]
        return Slots(start, size * dtype.itemsize, values, parts)

    def _add(self, slots: Slots, out: Tensor) -> None:
        if self.size > 2 and slots.size >= STRIPED:
            self._by_stripes(slots.values, out)
        else:
            _add(slots.values, out)

    def _added(self, slots: Slots, like: Sequence[Tensor]) -> list[Tensor]:
        if self.size > 2 and slots.size >= STRIPED:
            self._by_stripes(slots.values, total := torch.empty_like(slots.values[0]))
            return unpack(total, like)
        return [reduce(torch.add, theirs).to(t.dtype) for *theirs, t in zip(*slots.parts, like, strict=True)]

    def _by_stripes(self, theirs: Sequence[Tensor], values: Tensor) -> None:
        """Each rank adds up its part of the values, where nobody else looks, and then reads the others' parts."""
        cuts = [values.numel() * rank // self.size for rank in range(self.size + 1)]
        parts = [[slot[a:b] for a, b in pairwise(cuts)] for slot in theirs]
        mine = [part[self.rank] for part in parts]
        mine[self.rank].copy_(reduce(torch.add, mine))
        self.added += 1
        self._tell(ADDED)
        self._wait(ADDED, self.added)
        torch.cat([parts[rank][rank] for rank in range(self.size)], out=values)

    def _tell(self, what: bytes) -> None:
        for link in self.links.values():
            with suppress(BrokenPipeError, ConnectionResetError):  # who has gone is found out when it is waited for
                link.send(what)

    def _wait(self, what: bytes, count: int) -> None:
        """Until every rank has said `what` so many times."""
        said, began = self.heard[what], time.monotonic()
        while behind := [rank for rank, times in said.items() if times < count]:
            for rank in behind:
                self._hear(rank)
            waited = time.monotonic() - began
            if waited < self.spin:
                os.sched_yield()
            elif all(said[rank] < count for rank in behind):
                self._sleep(behind, self.seconds - waited)

    def _hear(self, rank: int) -> None:
        try:
            told = self.links[rank].recv(64)
        except BlockingIOError:
            return
        except ConnectionResetError:
            told = b""
        if not told:
            raise RuntimeError(f"rank {rank} closed its connection")
        for what, said in self.heard.items():
            said[rank] += told.count(what)

    def _sleep(self, behind: Sequence[int], seconds: float) -> None:
        asked = select.poll()
        for rank in behind:
            asked.register(self.links[rank], select.POLLIN)
        if seconds <= 0 or not asked.poll(1000 * seconds):
            raise RuntimeError(f"no answer of rank {', '.join(map(str, behind))} within {self.seconds:g} s")


def _add(theirs: Sequence[Tensor], out: Tensor) -> None:
    torch.add(theirs[0], theirs[1], out=out)
    for more in theirs[2:]:
        out.add_(more)


def _copy(found: Tensor, to: Tensor) -> None:
    to.copy_(found)


def _stack(theirs: Sequence[Tensor], out: Tensor) -> None:
    torch.stack(list(theirs), out=out)


def meet(comm: AbstractComm, seconds: float) -> Near | None:
    """Near, if all ranks are on one machine that can do it; they decide together."""
    if len(set(comm.texts(_machine()))) > 1 or not comm.all_true(hasattr(os, "memfd_create")):
        return None
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="torch_admm-") if comm.rank == 0 else ""
        if folder:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        place = Path(comm.texts(folder)[0])
        door = stack.enter_context(socket.socket(socket.AF_UNIX))
        if not comm.all_true(_opened(door, place / str(comm.rank))):
            return None
        found = _linked(comm, door, place, seconds)
        if comm.all_true(found is not None):
            return found
        return None


def _machine() -> str:
    """Tells one from another that happens to have its name."""
    with suppress(OSError):
        return socket.gethostname() + Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return socket.gethostname()


def _opened(door: socket.socket, path: Path) -> bool:
    try:
        door.bind(str(path))
        door.listen(socket.SOMAXCONN)
    except OSError:  # another file system than that of rank 0, or too long a path
        return False
    return True


def _linked(comm: AbstractComm, door: socket.socket, place: Path, seconds: float) -> Near | None:
    """A link with each rank; each way over it goes where the memory of the sender is."""
    links: dict[int, socket.socket] = {}
    memory = os.memfd_create("torch_admm")
    try:
        os.ftruncate(memory, RING * SLOT)
        memories = {comm.rank: mmap.mmap(memory, RING * SLOT)}
        for number in range(comm.size - 1):
            link = _dialled(place / str(number)) if number < comm.rank else _answered(door, seconds)
            socket.send_fds(link, [HEADER.pack(comm.rank)], [memory])
            told, (theirs,), _, _ = socket.recv_fds(link, HEADER.size, 1)
            (rank,) = HEADER.unpack(told)
            links[rank], memories[rank] = link, mmap.mmap(theirs, RING * SLOT)
            os.close(theirs)
            link.setblocking(False)
    except (OSError, ValueError):
        for link in links.values():
            link.close()
        return None
    finally:
        os.close(memory)
    return Near(comm.rank, dict(sorted(links.items())), [memories[rank] for rank in range(comm.size)], seconds)


def _dialled(path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(path))
    return link


def _answered(door: socket.socket, seconds: float) -> socket.socket:
    door.settimeout(seconds)
    link, _ = door.accept()
    link.settimeout(seconds)
    return link
