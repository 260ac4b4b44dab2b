"""Reading ahead: work is done in background threads while its results are used, in order and never far ahead."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

__all__ = ["AHEAD", "Pool", "ahead"]

THREADS = 2  # one reads or checks about half as fast as a warm file could be copied
AHEAD = 3  # results that wait at most, those under way included

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    work: Callable[[Item], Result], items: Iterable[Item], threads: int = THREADS, most: int = AHEAD
) -> Iterator[Result]:
    """`map(work, items)`, up to `most` results ahead of the consumer.

    An exception of `work` is raised where its result would have come. The threads end with the generator: at its end,
    when it is closed, or when nobody holds it any more.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="torch_admm-rows") as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= most:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@final
class Pool:
    """Memory that is used again once nobody looks at it: the first touch of new memory costs as much as reading."""

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """As np.empty; the memory comes back when the array, and all views and tensors of it, are gone."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        free = self._free.setdefault(size, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = bytearray(size)
        array = np.frombuffer(memory, dtype)  # of a buffer that is no array: all views of it refer to this very one
        weakref.finalize(array, free.append, memory).atexit = False
        return array.reshape(shape)
