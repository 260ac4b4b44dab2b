"""Ranks of one machine: what crosses goes through memory that they share.

Each rank has memory of its own that all others can read. It writes what it has there, tells so, and reads what the
others wrote once they have told it (`signals`).
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from itertools import pairwise
from socket import socket
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor

from ..gram import laid_out
from .base import Pending
from .signals import ADDED, WRITTEN, signals_of

__all__ = ["MEMORY", "ROOM", "Near"]

SLOTS = 3  # exchanges that may be under way at once
RING = 2 * SLOTS  # places for them, used in turn: whoever starts one has read what was RING - SLOTS places before
ROOM = 8 << 20  # bytes of an exchange; memory that was never written to takes none
COUNTS = 4096  # bytes in front of the places: what is told, and from there on, how much is in each
SIZES = 8
MEMORY = COUNTS + RING * ROOM  # bytes of a rank
STRIPED = 1 << 16  # bytes from which on each rank adds up a part, and reads the other parts
SPIN = 0.01  # seconds: asked again at once, if each rank has a core: to be woken up takes longer than most exchanges

Shapes = tuple[torch.Size, ...]
Result = TypeVar("Result")


class Slots(NamedTuple):
    """Where all ranks have what they send in one exchange."""

    number: int  # in the ring
    size: int  # bytes
    shapes: Shapes
    values: list[Tensor]  # by rank, all in one vector
    parts: list[list[Tensor]]  # by rank, the same in the shapes it has


Combine = Callable[[Slots], None]


@final
class Near:
    """The collectives of `Group`, each in place; all ranks make the same calls in the same order."""

    def __init__(self, rank: int, links: dict[int, socket], memories: Sequence[mmap.mmap], seconds: float) -> None:
        """`links` to the other ranks, `memories` of all; a rank that says nothing for so many seconds is lost."""
        self.rank, self.size, self.links, self.seconds = rank, len(memories), links, seconds
        self.memories, self.counts = memories, [memoryview(memory)[:COUNTS].cast("q") for memory in memories]
        self.signals = signals_of(rank, links, self.counts)
        self.spin = SPIN if self.size <= len(os.sched_getaffinity(0)) else 0.0
        self.started = self.added = self.finished = 0
        self.under_way: deque[tuple[Slots, Combine]] = deque()
        self._slots = lru_cache(maxsize=64)(self._cut)  # the same few sizes come again and again
        self._totals = lru_cache(maxsize=1)(self._kept)
        self._offered: Slots | None = None

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

    def places(self, like: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Where the next exchange, if it is the sum of tensors of these shapes, has what is sent.

        A sum whose first part was written there lasts until the next of this kind.
        """
        self._offered = self._next(like, dtype)
        return self._offered.parts[self.rank]

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
        number, slots, self._offered = self.started, self._offered, None
        if slots is None or slots.parts[self.rank][0] is not tensors[0]:
            slots = self._next(tensors, dtype)
        for place, values in zip(slots.parts[self.rank], tensors, strict=True):
            if place is not values:
                place.copy_(values)
        self.counts[self.rank][SIZES + slots.number] = slots.size
        self.started += 1
        self.under_way.append((slots, combine))
        self.signals.tell(WRITTEN)

        def finish() -> Result:
            self._finish(number)
            return result

        return Pending(finish)

    def _next(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Slots:
        """The slots of the next exchange, once nobody reads any more what was in their place."""
        number = self.started
        self._finish(number - SLOTS)
        if self.finished < (read := number - RING + SLOTS + 1):
            self._wait(WRITTEN, read)
        return self._slots(number % RING, tuple([t.shape for t in tensors]), dtype)

    def _finish(self, number: int) -> None:
        """All exchanges up to this one."""
        while self.finished <= number:
            self._wait(WRITTEN, self.finished + 1)
            slots, combine = self.under_way.popleft()
            for rank, counts in enumerate(self.counts):
                if (came := counts[SIZES + slots.number]) != slots.size:
                    raise RuntimeError(f"rank {rank} sent {came} bytes, rank {self.rank} {slots.size}")
            combine(slots)
            self.finished += 1

    def _cut(self, number: int, shapes: Shapes, dtype: torch.dtype) -> Slots:
        start, count = COUNTS + number * ROOM, sum(shape.numel() for shape in shapes)
        values = [torch.frombuffer(memory, dtype=dtype, count=count, offset=start) for memory in self.memories]
        return Slots(number, count * dtype.itemsize, shapes, values, [_shaped(v, shapes) for v in values])

    def _add(self, slots: Slots, out: Tensor) -> None:
        if self.size > 2 and slots.size >= STRIPED:
            self._by_stripes(slots.values, out)
        else:
            _add(slots.values, out)

    def _added(self, slots: Slots, like: Sequence[Tensor]) -> list[Tensor]:
        """In memory of their own, and laid out there as what came: products round by both.

        What was written to `places` is added up in memory that the next such sum uses again.
        """
        if like[0] is slots.parts[self.rank][0]:
            total, parts = self._totals(slots.shapes, like[0].dtype)
            self._add(slots, total)
            return parts
        if self.size > 2 and slots.size >= STRIPED:
            self._by_stripes(slots.values, total := torch.empty_like(slots.values[0]))
            sums = [part.clone() for part in _shaped(total, slots.shapes)]
        else:
            sums = [reduce(torch.add, theirs) for theirs in zip(*slots.parts, strict=True)]
        return [
            s.contiguous().to(t.dtype) if t.is_contiguous() else s.to(t.dtype) for s, t in zip(sums, like, strict=True)
        ]

    def _kept(self, shapes: Shapes, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        total = torch.empty(sum(shape.numel() for shape in shapes), dtype=dtype)
        return total, _shaped(total, shapes)

    def _by_stripes(self, theirs: Sequence[Tensor], values: Tensor) -> None:
        """Each rank adds up its part of the values, where nobody else looks, and then reads the others' parts."""
        cuts = [values.numel() * rank // self.size for rank in range(self.size + 1)]
        parts = [[slot[a:b] for a, b in pairwise(cuts)] for slot in theirs]
        mine = [part[self.rank] for part in parts]
        mine[self.rank].copy_(reduce(torch.add, mine))
        self.added += 1
        self.signals.tell(ADDED)
        self._wait(ADDED, self.added)
        torch.cat([parts[rank][rank] for rank in range(self.size)], out=values)

    def _wait(self, what: int, count: int) -> None:
        """Until every rank has told `what` so many times."""
        signals, began = self.signals, 0.0
        while behind := signals.behind(what, count):
            now = time.monotonic()
            began = began or now
            if now - began < self.spin:
                os.sched_yield()
            elif now - began < self.seconds:
                signals.sleep(behind, what, count, self.seconds - (now - began))
            else:
                raise RuntimeError(f"no answer of rank {', '.join(map(str, behind))} within {self.seconds:g} s")


def _shaped(values: Tensor, shapes: Shapes) -> list[Tensor]:
    """One vector as tensors of these shapes, laid out as products mostly have them.

    They cannot be as each rank has them: that may depend on its number of threads.
    """
    parts = values.split([shape.numel() for shape in shapes])
    return [laid_out(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def _add(theirs: Sequence[Tensor], out: Tensor) -> None:
    torch.add(theirs[0], theirs[1], out=out)
    for more in theirs[2:]:
        out.add_(more)


def _copy(found: Tensor, to: Tensor) -> None:
    to.copy_(found)


def _stack(theirs: Sequence[Tensor], out: Tensor) -> None:
    torch.stack(list(theirs), out=out)
