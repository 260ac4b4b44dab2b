"""How rows come to AnchoredADMM: all of them in chunks, or the shards of a mini-batch by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from .comm import AbstractComm
from .comm.base import FEW_PIECES
from .data import AbstractRows
from .leaves import together
from .precision import LITTLE_SWEEP
from .problem import Problem
from .spans import Looked, Spans, looked_at

__all__ = ["Chunk", "chunk_rows", "chunks", "is_little", "is_one_batch", "part", "shards"]

# of the widest layer: a chunk's temporaries then stay in the last-level cache, next to those of another rank
CHUNK_ENTRIES, INPUT_ENTRIES = 3 << 17, 1 << 21  # inputs that are not copied may be more
ONE_BATCH = 2  # chunks up to which a little sweep takes all rows at once; beyond, memory is slower than more calls


class Chunk(NamedTuple):
    """Some rows, and which of them are looked at when it is time to."""

    x: Tensor
    y: Tensor
    looked: Looked

    @classmethod
    def whole(cls, x: Tensor, y: Tensor) -> Chunk:
        """All are looked at."""
        return cls(x, y, Looked(None, Spans([len(x)])))


def part(problem: Problem, rows: AbstractRows, size: int, comm: AbstractComm) -> AbstractRows:
    """The rows of this rank, for steps of so many of all ranks.

    Leaves of batches are not torn apart, unless `deterministic` asks for shards, or ranks are too many. Nor are shards
    of little sweeps that are too long to be one batch: some are summed as one.
    """
    by_shard = comm.deterministic or comm.is_many
    if by_shard or size < rows.total or is_one_batch(problem, rows, size):
        return comm.part(rows, 1 if by_shard else together(size, comm.shards))
    merged = comm.shards // FEW_PIECES if is_little(problem, rows, size) else 1
    mine = comm.part(rows, merged)
    mine.merged = merged
    return mine


def is_little(problem: Problem, rows: AbstractRows, size: int) -> bool:
    """Is a sweep over all rows, in steps of so many, a short one?"""
    return rows.total <= size <= LITTLE_SWEEP // problem.size


def is_one_batch(problem: Problem, rows: AbstractRows, size: int) -> bool:
    """Is it so short that what is made of its rows about stays in the cache? Then they are taken as a mini-batch."""
    return is_little(problem, rows, size) and rows.total <= ONE_BATCH * chunk_rows(problem)


def chunk_rows(problem: Problem) -> int:
    """Rows of a chunk at most."""
    first = problem.layers[1].map
    widest = max(layer.map.outputs for layer in problem.layers.values())
    rows = max(256, min(CHUNK_ENTRIES // widest, INPUT_ENTRIES // first.inputs))
    return rows if first.prefers_plain(rows) else max(256, CHUNK_ENTRIES // max(widest, first.inputs))


def chunks(piece: AbstractRows, most: int, comm: AbstractComm) -> Iterator[Chunk]:
    """All rows of a piece, at most so many at a time."""
    parts = max(1, -(-piece.count // most))  # of equal size: a few rows left over cost as much as many
    for _, x, y in piece.chunks(max(1, -(-piece.count // parts))):
        yield Chunk.whole(comm.aligned(x), y)


def shards(x: Tensor, y: Tensor, counts: Sequence[int], rows: int | None) -> Iterator[list[Chunk]]:
    """What is here of a mini-batch, so many rows of each shard; some are looked at if it has about `rows` in all."""
    for x_i, y_i, count in zip(x.split(counts), y.split(counts), counts, strict=True):
        chunk = Chunk.whole(x_i, y_i)
        spans = chunk.looked.spans
        yield [chunk if rows is None else chunk._replace(looked=looked_at([count], spans, rows, x.device))]
