"""How rows come to AnchoredADMM: all of them in chunks, or the shards of a mini-batch by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from .comm import AbstractComm
from .data import AbstractRows
from .problem import Problem
from .spans import Looked, Spans, looked_at

__all__ = ["Chunk", "chunk_rows", "chunks", "shards"]

# of the widest layer: a chunk's temporaries then stay in the last-level cache, next to those of another rank
CHUNK_ENTRIES, INPUT_ENTRIES = 3 << 17, 1 << 21  # inputs that are not copied may be more


class Chunk(NamedTuple):
    """Some rows, and which of them are looked at when it is time to."""

    x: Tensor
    y: Tensor
    looked: Looked

    @classmethod
    def whole(cls, x: Tensor, y: Tensor) -> Chunk:
        """All are looked at."""
        return cls(x, y, Looked(None, Spans([len(x)])))


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
