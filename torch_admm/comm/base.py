"""What methods and `fit` ask of other ranks; one process, `Solo`, is the trivial case."""

from __future__ import annotations

import abc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor

from ..data import AbstractRows, Chunk
from ..data.shards import share
from ..errors import RankError
from .pending import Pending
from .standing import AbstractStanding, Buffer
from .tree import Branch, Growing, branches, tree_sum

__all__ = ["AbstractComm", "Solo", "pack", "unpack"]

ALIGNMENT = 64  # bytes: products of rows that start elsewhere may round otherwise
USUAL_ALIGNMENT = 16  # on the CPUs at hand this is enough, and most rows start so
WORTH_CUTTING = 256  # rows of a shard: with fewer, a chunk for each costs more than its rows
GATHERED = 8  # ranks up to which all get the branches of all; with more that would be too much to send
ONE_LEAF: Branch = (0, 1)


class AbstractComm(abc.ABC):
    """One process among `size`, as number `rank`. All ranks make the same calls in the same order.

    Sums over all rows are made shard by shard, and those of the shards are added up in a fixed order: any number of
    ranks gives the same bits. With `deterministic` that holds for mini-batches, for little sums and for many ranks too.
    """

    rank: int
    size: int
    deterministic: bool
    bytes_sent: int = 0  # handed over for others, whatever way a backend then sends it

    @abc.abstractmethod
    def sum_later(self, values: Tensor) -> Pending[Tensor]:
        """Start to add up the values of all ranks, in place."""

    @abc.abstractmethod
    def gather_later(self, values: Tensor) -> Pending[Tensor]:
        """Start to collect the values of all ranks, of one shape; the result has one more dimension in front."""

    @abc.abstractmethod
    def largest(self, *values: int) -> list[int]:
        """The largest of each number over all ranks."""

    @abc.abstractmethod
    def from_first_(self, values: Tensor) -> Tensor:
        """The values of rank 0, written over those of the others."""

    def sum_(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return self.sum_later(values).wait()

    def all_true(self, flag: bool) -> bool:
        """Is it true on every rank?"""
        return not self.largest(int(not flag))[0]

    def texts(self, text: str) -> list[str]:
        """What each rank has to say, by rank. Lengths cross first: backends abort where shapes differ."""
        said = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        length = torch.tensor([len(text.encode())])
        lengths: list[int] = self.gather_later(length).wait().flatten().tolist()
        room = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        room.narrow(0, 0, len(said)).copy_(said)
        rows = self.gather_later(room).wait()
        return [bytes(row.narrow(0, 0, n).tolist()).decode() for row, n in zip(rows.unbind(), lengths, strict=True)]

    def same(self, what: Mapping[str, Any]) -> None:
        """A RankError on every rank, naming what differs, unless all ranks say the same."""
        told = [json.loads(text) for text in self.texts(json.dumps(dict(what), default=str))]
        for other, theirs in enumerate(told):
            for name in {**told[0], **theirs}:
                first, second = told[0].get(name), theirs.get(name)
                if first != second:
                    raise RankError(f"ranks differ in {name}: {first} on rank 0, {second} on rank {other}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside succeeds on all ranks or fails on all: nobody is left waiting for one that failed."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        told = self.texts("" if failure is None else f"{failure}" or type(failure).__name__) if self.size > 1 else []
        if failure is not None:
            raise failure
        for other, text in enumerate(told):
            if text:
                raise RankError(f"rank {other}: {text}")

    def cuts(self, rows: AbstractRows) -> bool:
        """Are sums over all of these rows made shard by shard, and those of the shards added up in a fixed order?"""
        worth = rows.total >= WORTH_CUTTING * rows.split.number if rows.cut is None else rows.cut
        return self.deterministic or worth

    def alone(self, rows: AbstractRows) -> bool:
        """Is there nothing to add up but what is here, in whatever order?"""
        return self.size == 1 and not self.cuts(rows)

    def portions(self, rows: AbstractRows, size: int) -> Iterator[tuple[int, Chunk]]:
        """The rows here in chunks, each with the number of the part of `total` that it belongs to."""
        for number, piece in enumerate(self.pieces(rows)):
            offset = piece.first - rows.first
            for taken, x, y in piece.chunks(size):
                where = slice(taken.start + offset, taken.stop + offset)
                yield number, Chunk(where, self.aligned(x), y)

    def pieces(self, rows: AbstractRows) -> Sequence[AbstractRows]:
        """What is summed by itself before anything is added to it: all rows here, or one shard."""
        return [shard for _, shard in rows.shards()] if self.cuts(rows) else [rows]

    def starts(self, rows: AbstractRows) -> list[int]:
        """The first row of each piece, among those of all ranks."""
        return [rows.first + part.start for part in rows.split.local()] if self.cuts(rows) else [rows.first]

    def aligned(self, values: Tensor) -> Tensor:
        """The values where products of them always round alike."""
        return values if self.is_aligned(values) else values.clone()

    def is_aligned(self, values: Tensor) -> bool:
        """Do products of them round as those of any copy would?"""
        if not self.deterministic:
            return values.device.type != "cpu" or not values.data_ptr() % USUAL_ALIGNMENT
        return not values.data_ptr() % ALIGNMENT

    def total(self, parts: Sequence[Tensor], rows: AbstractRows | None) -> Tensor:
        """The sum over the pieces of these rows, of all ranks; `parts` has one tensor a piece, and may be used up.

        Without rows, which is for mini-batches, each rank has one part, and the order of their sum is open.
        """
        (total,) = self.totals_later(([part] for part in parts), parts[0].dtype, rows).wait()
        return total

    def totals_later(
        self, parts: Iterable[Sequence[Tensor]], dtype: torch.dtype, rows: AbstractRows | None
    ) -> Pending[list[Tensor]]:
        """As `total`, but only start it, with several tensors a piece, which cross in one buffer as numbers of `dtype`.

        Parts that are made when they are asked for are added up as they come: few are there at a time.
        """
        if rows is None or not self.cuts(rows):
            (part,) = parts
            return self.sums_later(part, dtype)
        growing = self.growing(rows, dtype)
        for part in parts:
            growing.add(part)
        return self.send(growing)

    def growing(self, rows: AbstractRows, dtype: torch.dtype) -> Growing:
        """To add up the parts of the pieces of these rows as they come; then `send` it."""
        if not self.cuts(rows):
            return Growing(ONE_LEAF, ONE_LEAF, dtype)
        number = rows.split.number
        return Growing((0, number), _held(number, self.size)[self.rank], dtype)

    def send(self, growing: Growing) -> Pending[list[Tensor]]:
        """Start to add up what all ranks have grown; no part is added after that."""
        assert growing.count == growing.stretch[1] - growing.stretch[0], "one part a piece, even of no rows"
        pending, came = self._crossing(growing), growing.came
        return Pending(lambda: [t.to(dtype) for t, dtype in zip(pending.wait(), came, strict=True)])

    def _crossing(self, growing: Growing) -> Pending[list[Tensor]]:
        """Branches are gathered, unless the order is open, or they are too many to send, or two have but one order."""
        tree, dtype = growing.tree, growing.dtype
        if tree == ONE_LEAF or (self.size > GATHERED and not self.deterministic):
            return self.sums_later(growing.total(), dtype)
        owned = _owned(tree, self.size)
        most = max(map(len, owned))
        if most == 1 and self.size <= 2:
            return self.sums_later(growing.total(), dtype)
        pending = self._padded_later([pack(part, dtype) for part in growing.sums], most)

        def finish() -> list[Tensor]:
            came = pending.wait()
            known = {b: came[rank, i] for rank, theirs in enumerate(owned) for i, b in enumerate(theirs)}
            return unpack(tree_sum(tree, known), growing.sums[0])

        return Pending(finish)

    def sums_later(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Pending[list[Tensor]]:
        """Start to add up several tensors over all ranks, in one buffer of `dtype`."""
        pending = self.sum_later(pack(tensors, dtype))
        return Pending(lambda: unpack(pending.wait(), tensors))

    def standing(self, like: Sequence[Tensor], dtype: torch.dtype) -> AbstractStanding:
        """The sum over all ranks of tensors of these shapes, as numbers of `dtype`, to be made again and again."""
        return Buffer(self.sum_later, like, dtype)

    def collect(self, parts: Sequence[Tensor], rows: AbstractRows) -> list[Tensor]:
        """The parts of all pieces of these rows, of all ranks, in order; for small ones."""
        number = rows.split.number if self.cuts(rows) else self.size
        counts = [stop - start for start, stop in _held(number, self.size)]
        came = self._padded_later(parts, max(counts)).wait()
        return [part for theirs, count in zip(came.unbind(), counts, strict=True) for part in theirs.unbind()[:count]]

    def gather_rows(self, values: Tensor, rows: AbstractRows) -> Tensor:
        """What each rank has for its rows, for all of them: each adds its own to zeros, which is exact."""
        place = values.new_zeros(rows.total, *values.shape[1:])
        place.narrow(0, rows.first, len(values)).copy_(values)
        return self.sum_(place)

    def _padded_later(self, parts: Sequence[Tensor], most: int) -> Pending[Tensor]:
        sent = torch.stack(list(parts))
        if len(parts) < most:
            sent = torch.cat([sent, sent.new_zeros(most - len(parts), *sent.shape[1:])])
        return self.gather_later(sent)


@final
class Solo(AbstractComm):
    """One process."""

    rank, size = 0, 1

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def sum_later(self, values: Tensor) -> Pending[Tensor]:
        return Pending(lambda: values)

    def sums_later(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Pending[list[Tensor]]:
        return Pending(lambda: list(tensors))

    def gather_later(self, values: Tensor) -> Pending[Tensor]:
        return Pending(lambda: values.unsqueeze(0))

    def largest(self, *values: int) -> list[int]:
        return list(values)

    def from_first_(self, values: Tensor) -> Tensor:
        return values


def pack(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All values in one vector, to cross at once."""
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors])


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that were packed, in memory of their own: products round by where they start.

    `like` has their shapes and dtypes.
    """
    parts = packed.split([t.numel() for t in like])
    return [part.view(t.shape).to(t.dtype, copy=True) for part, t in zip(parts, like, strict=True)]


@lru_cache
def _held(number: int, ranks: int) -> list[Branch]:
    """Which of so many shards each rank has, as `Shards.part` deals them out."""
    shares = (share(number, rank, ranks) for rank in range(ranks))
    return [(mine.start, mine.stop) for mine in shares]


@lru_cache
def _owned(tree: Branch, ranks: int) -> list[tuple[Branch, ...]]:
    """Which branches each rank has; with thousands of them this takes longer than a sweep, so it is done once."""
    return [branches(tree, held) for held in _held(tree[1], ranks)]
