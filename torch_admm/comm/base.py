"""What methods and `fit` ask of other ranks; one process, `Solo`, is the trivial case."""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor

from ..data import AbstractRows, Chunk
from ..errors import RankError
from .tree import Branch, branches, stretches, tree_sum

__all__ = ["AbstractComm", "Pending", "Solo", "pack", "unpack"]

Result = TypeVar("Result")

ALIGNMENT = 64  # bytes: products of rows that start elsewhere may round otherwise


@final
class Pending(Generic[Result]):
    """A result that is on its way; local work can go on meanwhile."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        """`finish` waits for it."""
        self._finish: Callable[[], Result] | None = finish
        self._result: Result | None = None

    def wait(self) -> Result:
        """The result, the same on all ranks; asking twice is fine."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        assert self._result is not None
        return self._result


class AbstractComm(abc.ABC):
    """One process among `size`, as number `rank`. All ranks make the same calls in the same order.

    With `deterministic`, sums over rows are made shard by shard, and those of the shards are added up in a fixed order:
    any number of ranks gives the same bits.
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

    @property
    def alone(self) -> bool:
        """Is there nothing to add up but what is here, in whatever order?"""
        return self.size == 1 and not self.deterministic

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

    def portions(self, rows: AbstractRows, size: int) -> Iterator[tuple[int, Chunk]]:
        """The rows here in chunks, each with the number of the part of `total` that it belongs to."""
        for number, piece in enumerate(self.pieces(rows)):
            offset = piece.first - rows.first
            for taken, x, y in piece.chunks(size):
                where = slice(taken.start + offset, taken.stop + offset)
                yield number, Chunk(where, self.aligned(x), y)

    def pieces(self, rows: AbstractRows) -> Sequence[AbstractRows]:
        """What is summed by itself before anything is added to it: all rows here, or one shard."""
        return [shard for _, shard in rows.shards()] if self.deterministic else [rows]

    def starts(self, rows: AbstractRows) -> list[int]:
        """The first row of each piece, among those of all ranks."""
        return [rows.first + part.start for part in rows.split.local()] if self.deterministic else [rows.first]

    def aligned(self, values: Tensor) -> Tensor:
        """The values where products of them always round alike; in the fast mode, as they are."""
        return values if self.is_aligned(values) else values.clone()

    def is_aligned(self, values: Tensor) -> bool:
        """Do products of them round as those of any copy would? In the fast mode nobody asks."""
        return not (self.deterministic and values.data_ptr() % ALIGNMENT)

    def total(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all pieces of all ranks; `parts` has one tensor a piece, and may be used up."""
        return self.total_later(parts).wait()

    def total_later(self, parts: Sequence[Tensor]) -> Pending[Tensor]:
        """As `total`, but only start it."""
        if not self.deterministic:
            return self.sum_later(parts[0])
        held = stretches(self._counts(len(parts)))
        tree, begin = (0, held[-1][1]), held[self.rank][0]
        leaves: dict[Branch, Tensor] = {(begin + i, begin + i + 1): part for i, part in enumerate(parts)}
        if self.size == 1:
            return Pending(lambda: tree_sum(tree, leaves))
        owned = [branches(tree, stretch) for stretch in held]
        sums = [tree_sum(branch, leaves) for branch in owned[self.rank]]
        pending = self._padded_later(sums, max(map(len, owned)))

        def finish() -> Tensor:
            came = pending.wait()
            known = {b: came[rank, i] for rank, theirs in enumerate(owned) for i, b in enumerate(theirs)}
            return tree_sum(tree, known)

        return Pending(finish)

    def totals_later(self, parts: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Pending[list[Tensor]]:
        """As `total_later`, of several tensors a piece, which cross in one buffer as numbers of `dtype`."""
        if not self.deterministic:
            return self.sums_later(parts[0], dtype)
        pending, like = self.total_later([pack(part, dtype) for part in parts]), parts[0]
        return Pending(lambda: unpack(pending.wait(), like))

    def sums_later(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Pending[list[Tensor]]:
        """Start to add up several tensors over all ranks, in one buffer of `dtype`."""
        pending = self.sum_later(pack(tensors, dtype))
        return Pending(lambda: unpack(pending.wait(), tensors))

    def collect(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The parts of all pieces of all ranks, in order; for small ones."""
        counts = self._counts(len(parts)) if self.deterministic else [1] * self.size
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

    def _counts(self, mine: int) -> list[int]:
        """How many pieces each rank has, at least one; shards are dealt out by rank, so this is asked once."""
        if self._pieces is None:
            counts = self.gather_later(torch.tensor([mine])).wait().flatten()
            self._pieces = [int(count) for count in counts]
        assert self._pieces[self.rank] == mine
        return self._pieces

    _pieces: list[int] | None = None


@final
class Solo(AbstractComm):
    """One process."""

    rank, size = 0, 1

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def sum_later(self, values: Tensor) -> Pending[Tensor]:
        return Pending(lambda: values)

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
    """The tensors that were packed; `like` has their shapes and dtypes."""
    parts = packed.split([t.numel() for t in like])
    return [part.view(t.shape).to(t.dtype) for part, t in zip(parts, like, strict=True)]
