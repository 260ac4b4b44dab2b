"""Pieces of a file read by few calls: whatever lies between them, what comes is what is there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from torch_admm.data.pieces import GAP, PIECES, Piece, gather

SIZE = 64  # bytes of a piece


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A descriptor of a megabyte of random bytes."""
    (tmp_path / "bytes").write_bytes(np.random.default_rng(0).bytes(1 << 20))
    descriptor = os.open(tmp_path / "bytes", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def gathered(file: int, offsets: Sequence[int]) -> list[bytes]:
    rooms = [bytearray(SIZE) for _ in offsets]
    gather(file, [Piece(offset, memoryview(room)) for offset, room in zip(offsets, rooms, strict=True)])
    return [bytes(room) for room in rooms]


LAYOUTS: dict[str, list[int]] = {
    "one after the other": [i * SIZE for i in range(100)],
    "backwards": [i * SIZE for i in range(100, 0, -1)],
    **{
        f"{gap} bytes apart": [i * (SIZE + gap) for i in range(100)]
        for gap in (1, GAP - 1, GAP, GAP + 1, 2 * GAP - SIZE, 2 * GAP)
    },
    "more than one call may have": [i * SIZE for i in range(9 * PIECES)],
    "as many, with gaps": [i * (SIZE + 1) for i in range(9 * PIECES)],
    "twice the same": [0, 0, SIZE, SIZE],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_are_what_is_there(file: int, name: str) -> None:
    offsets = LAYOUTS[name]
    assert gathered(file, offsets) == [os.pread(file, SIZE, offset) for offset in offsets]


def test_a_call_that_reads_less_than_it_was_asked_for(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems may do that; the rest is asked for again."""
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:5]], offset))
    assert gathered(file, [0, SIZE, 9 * SIZE]) == [os.pread(file, SIZE, offset) for offset in (0, SIZE, 9 * SIZE)]


def test_beyond_the_end_of_the_file(file: int) -> None:
    with pytest.raises(EOFError):
        gathered(file, [0, (1 << 20) - SIZE + 1])
