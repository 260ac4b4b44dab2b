"""Bytes of chunks: reading many by few calls, and checking many by one.

Threads that read in parallel hand Python's lock to each other at every call, which costs as much as copying some
100 kB. So the chunks of a block are read by one call where they lie close together in the file, and checked by one
CRC-32, which is put together from theirs.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

__all__ = ["Column", "checksum", "gather"]

GAP = 4096  # bytes between two pieces that are read, and thrown away, rather than skipped
PIECES = 256  # of one call: half of what systems allow, as each may come with a gap

Array = npt.NDArray[Any]
_gap = bytearray(GAP)  # where they are thrown; all threads may write here, since nobody reads


class Piece(NamedTuple):
    """Bytes of the file, and where they go."""

    offset: int
    view: memoryview


@final
@dataclass(frozen=True, eq=False)
class Column:
    """x or y: what one row is, and of each chunk the place in the file and the checksum."""

    name: str
    dtype: np.dtype[Any]
    width: tuple[int, ...]
    chunk_rows: int
    offsets: list[int]
    checksums: list[int]

    @cached_property
    def chunk_bytes(self) -> int:
        return self.chunk_rows * int(np.prod(self.width, dtype=np.int64)) * self.dtype.itemsize

    def end(self, chunk: int) -> int:
        return self.offsets[chunk] + self.chunk_bytes

    def pieces(self, chunks: Sequence[int], into: Array) -> list[Piece]:
        """What to read for some chunks, one after the other."""
        view, size, offsets = _bytes(into), self.chunk_bytes, self.offsets
        return [Piece(offsets[chunk], view[i * size : (i + 1) * size]) for i, chunk in enumerate(chunks)]

    def damaged(self, chunks: Sequence[int], values: Array) -> bool:
        """Is any of these chunks not as it was written?"""
        expected = 0
        for chunk in chunks:
            expected = self._followed(expected) ^ self.checksums[chunk]
        return checksum(_bytes(values)) != expected

    def _followed(self, before: int) -> int:
        """What the checksum of some bytes adds to that of them and one chunk more."""
        low, second, third, high = self._tables
        return low[before & 255] ^ second[before >> 8 & 255] ^ third[before >> 16 & 255] ^ high[before >> 24]

    @cached_property
    def _tables(self) -> list[list[int]]:
        """CRC-32 is linear: with P(c) = ~crc(zeros, ~c), the checksum of two chunks is P(first) ^ second."""
        zeros, ones = bytes(self.chunk_bytes), 0xFFFFFFFF
        bits = np.array([checksum(zeros, ones ^ 1 << bit) ^ ones for bit in range(32)], np.int64)
        values = np.arange(256)[:, None] >> np.arange(8) & 1
        return [np.bitwise_xor.reduce(values * bits[i : i + 8], 1).tolist() for i in range(0, 32, 8)]


def gather(descriptor: int, pieces: Sequence[Piece]) -> None:
    """Read all pieces; EOFError if the file has not so much."""
    for run in _runs(sorted(pieces, key=itemgetter(0))):
        buffers: list[memoryview] = []
        end = run[0].offset
        for offset, view in run:
            buffers += [memoryview(_gap)[: offset - end], view] if offset > end else [view]
            end = offset + len(view)
        if os.preadv(descriptor, buffers, run[0].offset) < end - run[0].offset:
            for piece in run:
                _fill(descriptor, piece)


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that follow each other closely."""
    run: list[Piece] = []
    for piece in pieces:
        end = run[-1].offset + len(run[-1].view) if run else piece.offset
        if run and (len(run) == PIECES or not 0 <= piece.offset - end <= GAP):
            yield run
            run = []
        run.append(piece)
    yield run


def _fill(descriptor: int, piece: Piece) -> None:
    """One piece, with as many calls as it takes."""
    done = 0
    while done < len(piece.view):
        got = os.preadv(descriptor, [piece.view[done:]], piece.offset + done)
        if got == 0:
            raise EOFError
        done += got


def _bytes(values: Array) -> memoryview:
    return memoryview(values.reshape(-1).view(np.uint8).data)


def _fast_checksum() -> Callable[..., int]:
    with suppress(ImportError):
        from isal import isal_zlib

        fast: Callable[..., int] = isal_zlib.crc32
        return fast
    return zlib.crc32


checksum = _fast_checksum()  # the same CRC-32 either way; isal's is five times as fast
