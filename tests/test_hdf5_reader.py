"""Reading HDF5 files in the background: never far ahead, by threads that end, from memory used again."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Timer, current_thread, main_thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_admm
from tests.files import threads, written
from torch_admm.data import hdf5, rows_of
from torch_admm.data.layout import layout_of
from torch_admm.data.reader import Pool, ahead

PROBLEM = torch_admm.from_module(nn.Linear(3, 4), "cross_entropy")
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_threads_end_when_the_consumer_stops_early(tmp_path: Path) -> None:
    rows = rows_of(written(tmp_path / "rows.h5", 3000), PROBLEM)
    reads: list[Any] = [rows.chunks(10), rows.batches(10, 0, 0)]
    for read in reads:
        next(read)
        assert len(threads()) == 1
        read.close()
        assert threads() == []
    for _ in rows.batches(10, 0, 0):
        break  # nobody holds the generator any more
    assert threads() == []


@pytest.mark.parametrize("helping", [False, True])
def test_ahead_is_map_in_order_and_never_far_ahead(helping: bool) -> None:
    started: list[int] = []

    def work(i: int) -> int:
        started.append(i)
        return i * i

    results = ahead(work, range(100), threads=2, most=5, helping=helping)
    for number, result in enumerate(results):
        assert result == number**2
        assert max(started) <= number + 5
    assert sorted(started) == list(range(100))


def test_who_waits_helps_once_and_with_what_nobody_has_begun() -> None:
    """The thread sleeps on its first item; the consumer does the one after it, and no more."""
    begun, awake, done = Event(), Event(), list[tuple[int, bool]]()

    def work(i: int) -> int:
        if i == 0:
            begun.set()
            awake.wait()
        done.append((i, current_thread() is main_thread()))
        if i == 1:
            awake.set()
        return i

    def items() -> Iterator[int]:
        yield 0
        begun.wait()
        yield from range(1, 4)

    results = ahead(work, items(), most=4, helping=True)
    assert next(results) == 0
    assert done[0] == (1, True)
    assert (0, False) in done
    assert list(results) == [1, 2, 3]
    assert sorted(i for i, _ in done) == [0, 1, 2, 3]


@pytest.mark.parametrize("helping", [False, True])
def test_an_error_in_a_thread_comes_where_its_result_would(helping: bool) -> None:
    results = ahead(lambda i: 1 // (3 - i), range(100), threads=2, most=5, helping=helping)
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert threads() == []


@pytest.mark.parametrize("helping", [False, True])
def test_an_error_leaves_no_cycle_behind(helping: bool) -> None:
    """The collector might come in a thread that is just starting, where no other thread can be waited for."""
    gc.collect()
    gc.disable()
    try:
        read = ahead(int, range(9))
        results = ahead(lambda i: 1 // i, read, helping=helping)
        gone = weakref.ref(read)
        with suppress(ZeroDivisionError):
            next(results)
        del read, results
        assert gone() is None
        assert threads() == []
    finally:
        gc.enable()


def test_an_interrupt_of_who_helps_comes_at_once() -> None:
    begun, awake = Event(), Event()

    def work(i: int) -> None:
        if i == 1:
            raise KeyboardInterrupt
        begun.set()
        awake.wait()

    def items() -> Iterator[int]:
        yield 0
        begun.wait()
        yield 1
        Timer(0.05, awake.set).start()  # what has begun goes on to its end

    with pytest.raises(KeyboardInterrupt):
        next(ahead(work, items(), helping=True))
    assert threads() == []


def test_memory_comes_back_when_nobody_looks_at_it() -> None:
    pool = Pool()
    first = pool.empty((4, 2), np.dtype(np.float32))
    first[:] = 1
    tensor = torch.from_numpy(first)[1:]
    address = first.ctypes.data
    del first
    assert pool.empty((4, 2), np.dtype(np.float32)).ctypes.data != address
    del tensor
    addresses = {pool.empty((4, 2), np.dtype(np.float32)).ctypes.data for _ in range(2)}
    assert address in addresses


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are looked up in /proc")
def test_the_file_is_open_only_while_somebody_reads(tmp_path: Path) -> None:
    """So that every process opens its own, whether it was forked or not."""
    path = written(tmp_path / "rows.h5", 300)

    def is_open() -> bool:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return str(path) in [os.readlink(link) for link in links if link.is_symlink()]

    rows = rows_of(path, PROBLEM)
    assert not is_open()
    read: Any = rows.batches(10, 0, 0)
    next(read)
    assert is_open()
    read.close()
    assert not is_open()


def test_a_layout_goes_to_other_processes(tmp_path: Path) -> None:
    layout = layout_of(written(tmp_path / "rows.h5", 300))
    other = pickle.loads(pickle.dumps(layout))
    batches = [list(hdf5.HDF5Rows(each, PROBLEM).batches(50, 0, 0)) for each in (layout, other)]
    for (x, y), (other_x, other_y) in zip(*batches, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)
