"""A sum over all ranks that comes at every step, of tensors of the same shapes: what it takes is made once."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from itertools import chain
from typing import final

import torch
from torch import Tensor

from ..gram import laid_out
from .pending import Pending
from .tree import Order

__all__ = ["AbstractStanding", "Buffer", "Gathered", "branches_of", "shaped"]


class AbstractStanding(abc.ABC):
    """`places` are written to, then it is time to `start`, and to `wait` for the sums.

    All ranks do so in the same order; no other exchange is started between `places` and `start`.
    """

    @abc.abstractmethod
    def places(self) -> Sequence[Sequence[Tensor]]:
        """Where the next sum has what is sent from here, by branch; whatever they hold is to be overwritten."""

    @abc.abstractmethod
    def start(self) -> None:
        """Start to add up what all ranks have written to their places."""

    @abc.abstractmethod
    def wait(self) -> Sequence[Tensor]:
        """The sums, the caller's to use up; they last until the next ones are made."""


@final
class Buffer(AbstractStanding):
    """All tensors lie in one vector, which is added up in place."""

    def __init__(self, sum_later: Callable[[Tensor], Pending[Tensor]], like: Sequence[Tensor], dtype: torch.dtype):
        """`like` gives shapes and device."""
        shapes = [t.shape for t in like]
        self._sum_later = sum_later
        self._values = like[0].new_zeros(sum(shape.numel() for shape in shapes), dtype=dtype)
        self._parts = shaped(self._values, shapes)
        self._places = [self._parts]

    def places(self) -> Sequence[Sequence[Tensor]]:
        return self._places

    def start(self) -> None:
        self._pending = self._sum_later(self._values)

    def wait(self) -> Sequence[Tensor]:
        self._pending.wait()
        return self._parts


@final
class Gathered(AbstractStanding):
    """The branches of all ranks are added up in their order."""

    def __init__(
        self,
        total_later: Callable[[Tensor, Order], Pending[Tensor]],
        like: Sequence[Tensor],
        dtype: torch.dtype,
        order: Order,
        rank: int,
    ):
        """`like` gives shapes and device."""
        shapes = [t.shape for t in like]
        self._total_later, self._order = total_later, order
        self._values = like[0].new_zeros(order.most, sum(shape.numel() for shape in shapes), dtype=dtype)
        self._places = [shaped(line, shapes) for line in self._values.unbind()[: len(order.owned[rank])]]
        self._total = torch.empty_like(self._values[0])
        self._sums = shaped(self._total, shapes)

    def places(self) -> Sequence[Sequence[Tensor]]:
        return self._places

    def start(self) -> None:
        self._pending = self._total_later(self._values, self._order)

    def wait(self) -> Sequence[Tensor]:
        total = self._pending.wait()
        del self._pending  # or it would be there until the next has come
        self._total.copy_(total)
        return self._sums


def branches_of(came: Tensor, order: Order) -> list[Tensor]:
    """What all ranks have of a sum, rank by rank, each for its branches."""
    lines = (theirs.unbind()[: len(own)] for theirs, own in zip(came.unbind(), order.owned, strict=True))
    return list(chain.from_iterable(lines))


def shaped(values: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """One vector as tensors of these shapes, laid out as products mostly have them.

    They cannot be as each rank has them: that may depend on its number of threads.
    """
    parts = values.split([shape.numel() for shape in shapes])
    return [laid_out(part, shape) for part, shape in zip(parts, shapes, strict=True)]
