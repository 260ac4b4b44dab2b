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
from ..data.shards import SHARDS, Shards, dealt
from ..errors import RankError, told
from .pending import Pending
from .standing import AbstractStanding, Buffer, Gathered, branches_of
from .tree import ONE_LEAF, Growing, Order

__all__ = ["AbstractComm", "Solo", "pack", "unpack"]

ALIGNMENT = 64  # bytes: products of rows that start elsewhere may round otherwise
USUAL_ALIGNMENT = 16  # on the CPUs at hand this is enough, and most rows start so
WORTH_CUTTING = 256  # rows of a shard: with fewer, a chunk for each costs more than its rows
STRIPED = 4 << 20  # bytes that each rank would get: fewer come faster than two exchanges end (benchmarks/sums.py)
FEW_PIECES = 8  # that few rows are summed by: more would cost more than they are worth


class AbstractComm(abc.ABC):
    """One process among `size`, as number `rank`. All ranks make the same calls in the same order.

    Sums over all rows are made shard by shard, those over a mini-batch by some shards together, and then added up in a
    fixed order: any number of ranks up to that of shards gives the same bits. With `deterministic` that holds whatever
    products do with the rows around them.
    """

    rank: int
    size: int
    deterministic: bool
    shards: int = SHARDS  # of all rows: up to so many ranks get the same bits
    bytes_sent: int = 0  # handed over for others, whatever way a backend then sends it

    @abc.abstractmethod
    def sum_later(self, values: Tensor) -> Pending[Tensor]:
        """Start to add up the values of all ranks, in place."""

    @abc.abstractmethod
    def gather_later(self, values: Tensor) -> Pending[Tensor]:
        """Start to collect the values of all ranks, of one shape; the result has one more dimension in front."""

    @abc.abstractmethod
    def swap_later(self, values: Tensor) -> Pending[Tensor]:
        """Start to send line i of the values to rank i; the result has the lines that the ranks had for this one."""

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
        said = [json.loads(text) for text in self.texts(json.dumps(dict(what), default=str))]
        for other, theirs in enumerate(said):
            for name in {**said[0], **theirs}:
                first, second = said[0].get(name), theirs.get(name)
                if repr(first) != repr(second):  # NaN is the same as NaN here
                    raise RankError(f"ranks differ in {name}: {first} on rank 0, {second} on rank {other}")

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside succeeds on all ranks or fails on all: nobody is left waiting for one that failed."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        texts = self.texts("" if failure is None else told(failure)) if self.size > 1 else []
        if failure is not None:
            raise failure
        for other, text in enumerate(texts):
            if text:
                raise RankError(f"rank {other}: {text}")

    @property
    def is_many(self) -> bool:
        """Are there more ranks than shards? Then there are other shards, and sums, than fewer ranks have."""
        return self.size > self.shards

    def part(self, rows: AbstractRows, together: int = 1) -> AbstractRows:
        """The rows of this rank; as many shards as go `together` are on one."""
        return rows.part(self.rank, self.size, together, self.shards)

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
        """What is summed by itself before anything is added to it: all rows here, or one shard, or a few."""
        return [rows.stretch(part) for part in self._parts(rows)] if self.cuts(rows) else [rows]

    def starts(self, rows: AbstractRows) -> list[int]:
        """The first row of each piece, among those of all ranks."""
        return [rows.first + part.start for part in self._parts(rows)] if self.cuts(rows) else [rows.first]

    def _parts(self, rows: AbstractRows) -> list[slice]:
        """The rows here, cut."""
        shards, size = rows.split.local(), self.merged(rows)
        groups = (shards[i : i + size] for i in range(0, len(shards), size))
        return [slice(group[0].start, group[-1].stop) for group in groups]

    def merged(self, rows: AbstractRows) -> int:
        """How many neighbouring shards make one piece."""
        return 1 if self.deterministic else rows.merged

    def aligned(self, values: Tensor) -> Tensor:
        """The values where products of them always round alike."""
        return values if self.is_aligned(values) else values.clone()

    def is_aligned(self, values: Tensor) -> bool:
        """Do products of them round as those of any copy would?"""
        if not self.deterministic:
            return values.device.type != "cpu" or not values.data_ptr() % USUAL_ALIGNMENT
        return not values.data_ptr() % ALIGNMENT

    def order(self, rows: AbstractRows) -> Order:
        """In which the parts of the pieces of these rows are added up."""
        split = rows.split
        if not self.cuts(rows):
            return self.open_order()
        return _order(split.number, self.size, split.together, self.merged(rows))

    def batch_order(self, split: Shards) -> Order:
        """In which the parts of a mini-batch are added up, of shards that go together one each."""
        together = split.together
        return self.open_order() if self.is_many else _order(split.number, self.size, together, together)

    def open_order(self) -> Order:
        """Of one part a rank, added as it comes."""
        return _open(self.size)

    def total(self, parts: Sequence[Tensor], order: Order, like: Tensor | None = None) -> Tensor:
        """The sum of the parts of all ranks, those here may be used up; there may be none, if `like` is like them."""
        like = parts[0] if like is None else like
        if order.is_open:
            (part,) = parts
            return self.sums_later([part], like.dtype).wait()[0]
        growing = self.growing(order, like.dtype, [like])
        for part in parts:
            growing.add([part])
        return self.send(growing).wait()[0]

    def totals_later(
        self, parts: Iterable[Sequence[Tensor]], dtype: torch.dtype, order: Order, like: Sequence[Tensor] = ()
    ) -> Pending[list[Tensor]]:
        """As `total`, but only start it, with several tensors a part, which cross in one buffer as numbers of `dtype`.

        Parts that are made when they are asked for are added up as they come: few are there at a time.
        """
        if order.is_open:
            (part,) = parts
            return self.sums_later(part, dtype)
        growing = self.growing(order, dtype, like)
        for part in parts:
            growing.add(part)
        return self.send(growing)

    def growing(self, order: Order, dtype: torch.dtype, like: Sequence[Tensor] = ()) -> Growing:
        """To add up the parts here as they come, then `send` it; where there may be none, `like` is like them."""
        return Growing(order, self.rank, dtype, like)

    def send(self, growing: Growing) -> Pending[list[Tensor]]:
        """Start to add up what all ranks have grown; no part is added after that."""
        assert growing.count == growing.stretch[1] - growing.stretch[0], "one part a piece, even of no rows"
        pending, came = self._crossing(growing), growing.came
        return Pending(lambda: [t.to(dtype) for t, dtype in zip(pending.wait(), came, strict=True)])

    def adds_up(self, order: Order) -> bool:
        """Does one sum a rank do? If the order is open, or two have one each, or each rank has a shard of its own."""
        return order.is_open or self.is_many or (self.size <= 2 and order.is_one_each)

    def _crossing(self, growing: Growing) -> Pending[list[Tensor]]:
        """Branches are gathered, unless sums will do."""
        order, dtype = growing.order, growing.dtype
        if self.adds_up(order):
            return self.sums_later(growing.total(), dtype)
        like = [t.to(dtype) for t in growing.like] or growing.sums[0]
        lines = _padded([pack(part, dtype) for part in growing.sums], order.most, pack(like, dtype))
        pending = self.total_later(lines, order)
        return Pending(lambda: unpack(pending.wait(), like))

    def total_later(self, lines: Tensor, order: Order) -> Pending[Tensor]:
        """Start to add up the branches of all ranks, those here in a line each, of as many as any rank has."""
        if self.size * lines.numel() * lines.element_size() >= STRIPED:
            return self._striped_later(lines, order)
        pending = self.gather_later(lines)
        return Pending(lambda: order.total(branches_of(pending.wait(), order)))

    def _striped_later(self, lines: Tensor, order: Order) -> Pending[Tensor]:
        """Each rank adds up its part of the values, and then gets those of the others: as little as sums would take."""
        most, count = lines.shape
        width = -(-count // self.size)
        stripes = lines.new_zeros(self.size, most, width)
        for stripe, part in zip(stripes.unbind(), lines.split(width, 1), strict=False):  # the last may have none
            stripe.narrow(1, 0, part.shape[1]).copy_(part)
        pending = self.swap_later(stripes)

        def finish() -> Tensor:
            mine = order.total(branches_of(pending.wait(), order))
            return self.gather_later(mine).wait().view(-1).narrow(0, 0, count)

        return Pending(finish)

    def sums_later(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Pending[list[Tensor]]:
        """Start to add up several tensors over all ranks, in one buffer of `dtype`."""
        pending = self.sum_later(pack(tensors, dtype))
        return Pending(lambda: unpack(pending.wait(), tensors))

    def standing(self, like: Sequence[Tensor], dtype: torch.dtype, order: Order) -> AbstractStanding:
        """The sum over all ranks of tensors of these shapes, as numbers of `dtype`, to be made again and again."""
        if self.adds_up(order):
            return Buffer(self.sum_later, like, dtype)
        return Gathered(self.total_later, like, dtype, order, self.rank)

    def collect(self, parts: Sequence[Tensor], rows: AbstractRows) -> list[Tensor]:
        """The parts of all pieces of these rows, of all ranks, in order; for small ones. Every rank has some."""
        counts = [stop - start for start, stop in self.order(rows).held]
        came = self.gather_later(_padded(parts, max(counts), parts[0])).wait()
        return [part for theirs, count in zip(came.unbind(), counts, strict=True) for part in theirs.unbind()[:count]]

    def gather_rows(self, values: Tensor, rows: AbstractRows) -> Tensor:
        """What each rank has for its rows, for all of them: each adds its own to zeros, which is exact."""
        place = values.new_zeros(rows.total, *values.shape[1:])
        place.narrow(0, rows.first, len(values)).copy_(values)
        return self.sum_(place)


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

    def swap_later(self, values: Tensor) -> Pending[Tensor]:
        return Pending(lambda: values)

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


def _padded(parts: Sequence[Tensor], most: int, like: Tensor) -> Tensor:
    """Stacked, with zeros for those that are missing."""
    return torch.stack([*parts, *[torch.zeros_like(like)] * (most - len(parts))])


@lru_cache
def _order(number: int, ranks: int, together: int, merged: int) -> Order:
    """Of shards as `Shards.part` deals them out, so many of which make one leaf. Made once: ranks may be thousands."""
    held = [(mine.start // merged, mine.stop // merged) for mine in dealt(number, ranks, together)]
    return Order((0, number // merged), held)


@lru_cache
def _open(ranks: int) -> Order:
    return Order(ONE_LEAF, [ONE_LEAF] * ranks, is_open=True)
