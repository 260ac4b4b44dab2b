"""How ranks of one machine tell each other how far they are.

Every rank counts what it has done, and the others wait until a count is reached. What was written to shared memory
before something was told is there for whoever has heard it. Where the CPU lets others see stores in the order in which
they were made, counts are shared memory themselves: no system call, unless somebody has fallen asleep. Elsewhere each
count is a byte over a socket, and the kernel keeps the order. Sockets also end with their rank: a lost one is known.
"""

from __future__ import annotations

import abc
import platform
import select
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import final

__all__ = ["ADDED", "WRITTEN", "AbstractSignals", "Bytes", "Flags", "in_order", "signals_of"]

WRITTEN, ADDED = 0, 1  # what is counted
ASLEEP = 2  # where a rank says so
NAP = 0.05  # seconds: who falls asleep just when it is told something may not be woken up

GONE = BlockingIOError, BrokenPipeError, ConnectionResetError  # who has gone is found out when it is waited for


def in_order() -> bool:
    """Does this CPU let others see stores in the order in which they were made?"""
    return platform.machine() in ("x86_64", "AMD64", "i686")


class AbstractSignals(abc.ABC):
    """Of one rank to all others and back; `links` are sockets that never block, by rank."""

    def __init__(self, links: dict[int, socket.socket]) -> None:
        self.links = links

    @abc.abstractmethod
    def tell(self, what: int) -> None:
        """One more of it is done."""

    @abc.abstractmethod
    def behind(self, what: int, count: int) -> list[int]:
        """Who has not told it so many times yet."""

    @abc.abstractmethod
    def sleep(self, ranks: Sequence[int], what: int, count: int, seconds: float) -> None:
        """Until one of these, who were behind, may not be so any more, or a while has passed.

        A rank that is behind and has gone is a RuntimeError.
        """

    def _readable(self, ranks: Collection[int], seconds: float) -> list[int]:
        asked = select.poll()
        by_number = {self.links[rank].fileno(): rank for rank in ranks}
        for number in by_number:
            asked.register(number, select.POLLIN)
        return [by_number[number] for number, _ in asked.poll(1000 * seconds)]

    def _received(self, rank: int) -> bytes | None:
        """What came over the link; b"" if it is closed, None if nothing came."""
        try:
            return self.links[rank].recv(64)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""


@final
class Flags(AbstractSignals):
    """Counts in memory that all can read."""

    def __init__(self, rank: int, links: dict[int, socket.socket], counts: Sequence[memoryview]) -> None:
        """`counts` of all ranks, each of its own in a cache line or more; they start at zero."""
        super().__init__(links)
        self.mine, self.theirs = counts[rank], [(other, counts[other]) for other in links]

    def tell(self, what: int) -> None:
        self.mine[what] += 1
        for rank, theirs in self.theirs:
            if theirs[ASLEEP]:
                with suppress(*GONE):
                    self.links[rank].send(b".")

    def behind(self, what: int, count: int) -> list[int]:
        return [rank for rank, theirs in self.theirs if theirs[what] < count]

    def sleep(self, ranks: Sequence[int], what: int, count: int, seconds: float) -> None:
        with self._asleep():
            if self.behind(what, count) != list(ranks):
                return
            gone = [rank for rank in self._readable(ranks, min(seconds, NAP)) if self._received(rank) == b""]
        for rank in set(gone) & set(self.behind(what, count)):  # it may have told this before it went
            raise RuntimeError(f"rank {rank} closed its connection")

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        self.mine[ASLEEP] = 1
        try:
            yield
        finally:
            self.mine[ASLEEP] = 0


@final
class Bytes(AbstractSignals):
    """Counts of bytes."""

    kinds = b"wa"

    def __init__(self, links: dict[int, socket.socket]) -> None:
        super().__init__(links)
        self.heard = [dict.fromkeys(links, 0) for _ in self.kinds]

    def tell(self, what: int) -> None:
        for link in self.links.values():
            with suppress(*GONE):
                link.send(self.kinds[what : what + 1])

    def behind(self, what: int, count: int) -> list[int]:
        said = self.heard[what]
        for rank, times in said.items():
            if times < count:
                self._hear(rank)
        return [rank for rank, times in said.items() if times < count]

    def sleep(self, ranks: Sequence[int], what: int, count: int, seconds: float) -> None:
        self._readable(ranks, seconds)

    def _hear(self, rank: int) -> None:
        told = self._received(rank)
        if told == b"":
            raise RuntimeError(f"rank {rank} closed its connection")
        for kind, said in zip(self.kinds, self.heard, strict=True):
            said[rank] += (told or b"").count(kind)


def signals_of(rank: int, links: dict[int, socket.socket], counts: Sequence[memoryview]) -> AbstractSignals:
    """The kind that is right on this machine."""
    return Flags(rank, links, counts) if in_order() else Bytes(links)
