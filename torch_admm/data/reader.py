"""Reading ahead: work is done in background threads while its results are used, in order and never far ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ahead"]

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
