"""Reading ahead: work is done in background threads while its results are used, in order and never far ahead."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

__all__ = ["AHEAD", "Pool", "ahead"]

AHEAD = 3  # results that wait at most, those under way included

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int = 1,
    most: int = AHEAD,
    *,
    helping: bool = False,
) -> Iterator[Result]:
    """`map(work, items)`, up to `most` results ahead of the consumer.

    An exception of `work` is raised where its result would have come. The threads end with the generator: at its end,
    when it is closed, or when nobody holds it any more. With `helping`, who asks for a result that is not there yet
    works too, and does not sleep: waking up takes as long as copying some 100 kB.
    """
    todo, waiting = deque[tuple[Future[Result], Item]](), deque[Future[Result]]()
    with ThreadPoolExecutor(threads, thread_name_prefix="torch_admm-rows") as pool:
        try:
            for item in items:
                waiting.append(Future())
                todo.append((waiting[-1], item))
                pool.submit(_one, work, todo)
                if len(waiting) >= most:
                    yield _first(waiting, partial(_one, work, todo) if helping else None)
            while waiting:
                yield _first(waiting, partial(_one, work, todo) if helping else None)
        finally:
            todo.clear()


def _first(waiting: deque[Future[Result]], help_out: Callable[[], None] | None) -> Result:
    if help_out is not None and not waiting[0].done():
        help_out()
    return waiting.popleft().result()


def _one(work: Callable[[Item], Result], todo: deque[tuple[Future[Result], Item]]) -> None:
    """The next piece of work that nobody has begun, if there is any."""
    try:
        outcome, item = todo.popleft()
    except IndexError:
        return
    try:
        outcome.set_result(work(item))
    except BaseException as error:
        outcome.set_exception(error)
        del outcome  # the error holds this frame: a cycle would leave the threads to the garbage collector
        if not isinstance(error, Exception):
            raise  # somebody wants to stop now, not when this result is asked for


@final
class Pool:
    """Memory that is used again once nobody looks at it: the first touch of new memory costs as much as reading."""

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """As np.empty; the memory comes back when the array, and all views and tensors of it, are gone."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(size, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = bytearray(size)
        array = np.frombuffer(memory, dtype)  # of a buffer that is no array: all views of it refer to this very one
        weakref.finalize(array, free.append, memory).atexit = False
        return array.reshape(shape)
