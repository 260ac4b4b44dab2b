"""A rank of a torch.distributed group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CommError
from .base import AbstractComm
from .lost import Process, line, lost
from .near import Near
from .pending import Pending
from .standing import AbstractStanding
from .tree import Order

__all__ = ["Group"]


@final
class _Torch:
    """The collectives of torch.distributed, each in place."""

    def sum(self, values: Tensor) -> Any:
        return dist.all_reduce(values, async_op=True)

    def largest(self, values: Tensor) -> Any:
        return dist.all_reduce(values, op=dist.ReduceOp.MAX, async_op=True)

    def from_first(self, values: Tensor) -> Any:
        return dist.broadcast(values, 0, async_op=True)

    def gather(self, values: Tensor, came: Tensor) -> Any:
        return dist.all_gather(list(came.unbind()), values, async_op=True)

    def swap(self, values: Tensor, came: Tensor) -> Any:
        return dist.all_to_all_single(came, values, async_op=True)


Way = _Torch | Near


@final
class Group(AbstractComm):
    """The default group of torch.distributed, whoever made it."""

    def __init__(
        self,
        *,
        deterministic: bool = False,
        store: Any = None,
        owned: bool = False,
        near: Near | None = None,
        processes: Sequence[Process] = (),
    ) -> None:
        """`store` tells who is missing when somebody is; `owned` groups are taken down then.

        What `near` takes goes that way, which is faster; the rest by torch.distributed. `processes` are those of all.
        """
        self.rank, self.size, self.deterministic = dist.get_rank(), dist.get_world_size(), deterministic
        self.store, self.owned, self.near, self.processes = store, owned, near, processes
        only_gpu = dist.get_backend() == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if only_gpu else torch.device("cpu")

    def sum_later(self, values: Tensor) -> Pending[Tensor]:
        values = values.contiguous()
        return self._later(values, lambda way: way.sum(values), values)

    def sums_later(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Pending[list[Tensor]]:
        near, size = self.near, _size(tensors, dtype)
        if near is None or not near.takes(tensors[0].device, size):
            return super().sums_later(tensors, dtype)
        self.bytes_sent += size
        work: Pending[list[Tensor]] = self._tried(near.sums, tensors, dtype)
        return Pending(lambda: self._tried(work.wait))

    def standing(self, like: Sequence[Tensor], dtype: torch.dtype, order: Order) -> AbstractStanding:
        near, size = self.near, _size(like, dtype) * order.most
        if near is None or not near.takes(like[0].device, size):
            return super().standing(like, dtype, order)
        return _Tried(self, near.standing(like, dtype, order), size)

    def gather_later(self, values: Tensor) -> Pending[Tensor]:
        values = self._sendable(values)
        came = values.new_empty(self.size, *values.shape)
        return self._later(values, lambda way: way.gather(values, came), came)

    def swap_later(self, values: Tensor) -> Pending[Tensor]:
        values = self._sendable(values)
        came = torch.empty_like(values)
        return self._later(values, lambda way: way.swap(values, came), came)

    def largest(self, *values: int) -> list[int]:
        numbers = torch.tensor(values, device=self.device)
        found: list[int] = self._later(numbers, lambda way: way.largest(numbers), numbers).wait().tolist()
        return found

    def from_first_(self, values: Tensor) -> Tensor:
        return self._later(values, lambda way: way.from_first(values), values).wait()

    def _sendable(self, values: Tensor) -> Tensor:
        return values.contiguous().to(self.device if values.device.type == "cpu" else values.device)

    def _later(self, sent: Tensor, start: Callable[[Way], Any], result: Tensor) -> Pending[Tensor]:
        size = sent.numel() * sent.element_size()
        self.bytes_sent += size
        way = self.near if self.near is not None and self.near.takes(sent.device, size) else _Torch()
        work = [self._tried(start, way)]

        def finish() -> Tensor:
            self._tried(lambda: work.pop().wait())  # not even this frame may hold it then
            return result

        return Pending(finish)

    def _tried(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            reason = line(error)
        raise self.explained(reason)  # outside the except clause: nothing may hold the connections any more

    def explained(self, reason: str) -> CommError:
        """Who is missing. Taking the group down first closes connections, so that nobody waits any longer."""
        if self.near is not None:
            self.near.close()
        if self.owned and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()
        return lost(self.store, self.rank, self.size, reason, self.processes)


@final
class _Tried(AbstractStanding):
    """A sum of ranks of one machine, counted, and explained when it fails."""

    def __init__(self, group: Group, near: AbstractStanding, size: int) -> None:
        self._group, self._near, self._size = group, near, size

    def places(self) -> Sequence[Sequence[Tensor]]:
        found: Sequence[Sequence[Tensor]] = self._group._tried(self._near.places)
        return found

    def start(self) -> None:
        self._group.bytes_sent += self._size
        self._group._tried(self._near.start)

    def wait(self) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._group._tried(self._near.wait)
        return found


def _size(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    return sum([t.numel() for t in tensors]) * dtype.itemsize
