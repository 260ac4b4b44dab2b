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
from itertools import chain, pairwise
from socket import socket
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor

from .pending import Pending
from .signals import ADDED, WRITTEN, signals_of
from .standing import AbstractStanding, shaped
from .tree import Branch, Order

__all__ = ["MEMORY", "ROOM", "Near"]

SLOTS = 3  # exchanges that may be under way at once
RING = 2 * SLOTS  # places for them, used in turn: whoever starts one has read what was RING - SLOTS places before
ROOM = 8 << 20  # bytes of an exchange; memory that was never written to takes none
COUNTS = 4096  # bytes in front of the places: what is told, and from there on, how much is in each
SIZES = 8
MEMORY = COUNTS + RING * ROOM  # bytes of a rank
STRIPED = 1 << 16  # bytes from which on each rank adds up a part, and reads the other parts
SPIN = 0.01  # seconds: asked again at once, if each rank has a core: to be woken up takes longer than most exchanges

KINDS = ("sum", "standing sum", "maximum", "broadcast", "gather", "swap")  # of exchanges: all ranks are at the same
STANDING = KINDS.index("standing sum")

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
Total = Callable[[Sequence[Tensor]], Tensor]  # of what all ranks have, in their order


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

    def takes(self, device: torch.device, size: int) -> bool:
        """Are so many bytes few enough, and here?"""
        return device.type == "cpu" and 0 < size <= ROOM

    def sum(self, values: Tensor) -> Pending[Tensor]:
        """Add up the values of all ranks: in the order of ranks, so that all get the same bits."""
        flat = values.view(-1)
        return self._start("sum", [flat], flat.dtype, lambda slots: self.add(slots, flat), values)

    def sums(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Pending[list[Tensor]]:
        """The same of several tensors, as numbers of `dtype`; they are written to and read from where they cross."""
        found: list[Tensor] = []
        return self._start("sum", tensors, dtype, lambda slots: found.extend(self._added(slots, tensors)), found)

    def standing(self, like: Sequence[Tensor], dtype: torch.dtype, order: Order) -> AbstractStanding:
        """The same of tensors of these shapes, again and again: they are written to where they cross from."""
        return _Standing(self, tuple(t.shape for t in like), dtype, order)

    def largest(self, values: Tensor) -> Pending[Tensor]:
        flat = values.view(-1)

        def combine(slots: Slots) -> None:
            flat.copy_(reduce(torch.maximum, slots.values))

        return self._start("maximum", [flat], flat.dtype, combine, values)

    def from_first(self, values: Tensor) -> Pending[Tensor]:
        """However they lie in memory: it need not be alike on all ranks."""
        return self._start("broadcast", [values], values.dtype, lambda slots: _copy(slots.parts[0][0], values), values)

    def gather(self, values: Tensor, came: Tensor) -> Pending[Tensor]:
        flat, lines = values.view(-1), came.view(self.size, -1)
        return self._start("gather", [flat], flat.dtype, lambda slots: _stack(slots.values, lines), came)

    def swap(self, values: Tensor, came: Tensor) -> Pending[Tensor]:
        shape = values.shape  # all that is kept of the values: they have been written

        def combine(slots: Slots) -> None:
            _stack([theirs.view(shape)[self.rank] for theirs in slots.values], came)

        return self._start("swap", [values.view(-1)], values.dtype, combine, came)

    def close(self) -> None:
        """The others hear of it at once."""
        for link in self.links.values():
            link.close()

    def _start(
        self, kind: str, tensors: Sequence[Tensor], dtype: torch.dtype, combine: Combine, result: Result
    ) -> Pending[Result]:
        """Write what is here; the rest happens when somebody waits for it, in the order of the starts."""
        slots = self._slots(self.next_place(), tuple([t.shape for t in tensors]), dtype)
        for place, values in zip(slots.parts[self.rank], tensors, strict=True):
            place.copy_(values)
        number = self.begin(slots, combine, KINDS.index(kind))

        def finish() -> Result:
            self.finish(number)
            return result

        return Pending(finish)

    def next_place(self) -> int:
        """In the ring, of the next exchange, once nobody reads any more what was there."""
        number = self.started
        self.finish(number - SLOTS)
        if self.finished < (read := number - RING + SLOTS + 1):
            self._wait(WRITTEN, read)
        return number % RING

    def begin(self, slots: Slots, combine: Combine, kind: int) -> int:
        """The exchange of what is written to these, and its number, to `finish` it by."""
        self.counts[self.rank][SIZES + slots.number] = slots.size * len(KINDS) + kind
        self.under_way.append((slots, combine))
        self.signals.tell(WRITTEN)
        self.started += 1
        return self.started - 1

    def finish(self, number: int) -> None:
        """All exchanges up to this one."""
        while self.finished <= number:
            self._wait(WRITTEN, self.finished + 1)
            slots, combine = self.under_way.popleft()
            mine = self.counts[self.rank][SIZES + slots.number]
            for rank, counts in enumerate(self.counts):
                if (theirs := counts[SIZES + slots.number]) != mine:
                    raise RuntimeError(f"rank {rank} is at a {_named(theirs)}, rank {self.rank} at a {_named(mine)}")
            combine(slots)
            self.finished += 1

    def _cut(self, number: int, shapes: Shapes, dtype: torch.dtype) -> Slots:
        start, count = COUNTS + number * ROOM, sum(shape.numel() for shape in shapes)
        values = [torch.frombuffer(memory, dtype=dtype, count=count, offset=start) for memory in self.memories]
        return Slots(number, count * dtype.itemsize, shapes, values, [shaped(v, shapes) for v in values])

    def add(self, slots: Slots, out: Tensor) -> None:
        if self.is_striped(slots):
            self.by_stripes(slots.values, slots.values, _in_turn, out)
        else:
            _add(slots.values, out)

    def is_striped(self, slots: Slots) -> bool:
        return self.size > 2 and slots.size >= STRIPED

    def _added(self, slots: Slots, like: Sequence[Tensor]) -> list[Tensor]:
        """In memory of their own, and laid out there as what came: products round by both."""
        if self.is_striped(slots):
            self.add(slots, total := torch.empty_like(slots.values[0]))
            sums = [part.clone() for part in shaped(total, slots.shapes)]
        else:
            sums = [reduce(torch.add, theirs) for theirs in zip(*slots.parts, strict=True)]
        return [
            s.contiguous().to(t.dtype) if t.is_contiguous() else s.to(t.dtype) for s, t in zip(sums, like, strict=True)
        ]

    def by_stripes(self, theirs: Sequence[Tensor], rooms: Sequence[Tensor], total: Total, out: Tensor) -> None:
        """Each rank adds up its part of the values, and then reads the others' parts.

        It has a room for that, where nobody else looks at this part.
        """
        cuts = [out.numel() * rank // self.size for rank in range(self.size + 1)]
        stripes = [slice(a, b) for a, b in pairwise(cuts)]
        mine = stripes[self.rank]
        rooms[self.rank][mine].copy_(total([values[mine] for values in theirs]))
        self.added += 1
        self.signals.tell(ADDED)
        self._wait(ADDED, self.added)
        torch.cat([room[stripe] for room, stripe in zip(rooms, stripes, strict=True)], out=out)

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


@final
class _Standing(AbstractStanding):
    """A place in the ring for each of its sums is known beforehand, and so is where they are added up."""

    def __init__(self, near: Near, shapes: Shapes, dtype: torch.dtype, order: Order) -> None:
        self._near, self._order = near, order
        size = sum(shape.numel() for shape in shapes)
        self._ring = [near._cut(number, shapes * order.most, dtype) for number in range(RING)]
        self._rooms = [[values.narrow(0, 0, size) for values in slots.values] for slots in self._ring]
        lines = [
            [_lines(*theirs, size) for theirs in zip(slots.values, order.owned, strict=True)] for slots in self._ring
        ]
        self._branches = [list(chain.from_iterable(theirs)) for theirs in lines]
        self._places = [[shaped(line, shapes) for line in theirs[near.rank]] for theirs in lines]
        self._total = self._ring[0].values[0].new_empty(size)
        self._sums = shaped(self._total, shapes)

    def places(self) -> Sequence[Sequence[Tensor]]:
        self._slots = self._ring[self._near.next_place()]
        return self._places[self._slots.number]

    def start(self) -> None:
        self._number = self._near.begin(self._slots, self._add, STANDING)

    def wait(self) -> Sequence[Tensor]:
        self._near.finish(self._number)
        return self._sums

    def _add(self, slots: Slots) -> None:
        near, order, branches = self._near, self._order, self._branches[slots.number]
        if order.is_open:
            near.add(slots, self._total)
        elif len(branches) == 2:
            torch.add(*branches, out=self._total)
        elif near.is_striped(slots):
            near.by_stripes(branches, self._rooms[slots.number], order.total, self._total)
        else:
            self._total.copy_(order.total(branches))


def _named(exchange: int) -> str:
    size, kind = divmod(exchange, len(KINDS))
    return f"{KINDS[kind]} of {size} bytes"


def _add(theirs: Sequence[Tensor], out: Tensor) -> None:
    torch.add(theirs[0], theirs[1], out=out)
    for more in theirs[2:]:
        out.add_(more)


def _lines(values: Tensor, owned: Sequence[Branch], size: int) -> Sequence[Tensor]:
    """What a rank has for each of its branches."""
    found: Sequence[Tensor] = values.split(size)[: len(owned)]
    return found


def _in_turn(theirs: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, theirs)


def _copy(found: Tensor, to: Tensor) -> None:
    to.copy_(found)


def _stack(theirs: Sequence[Tensor], out: Tensor) -> None:
    torch.stack(list(theirs), out=out)
