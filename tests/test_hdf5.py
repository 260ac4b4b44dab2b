"""HDF5 files of rows: what is written is what is read, by threads that end, and whole or not at all."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Timer, current_thread, main_thread
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import torch_admm
from torch_admm.data import hdf5, rows_of
from torch_admm.data.layout import Layout, layout_of
from torch_admm.data.reader import AHEAD, Pool, ahead
from torch_admm.errors import DataError

Array = npt.NDArray[Any]
CHUNK = 12 * 32  # bytes: 32 rows of 3 float32 numbers
PROBLEM = torch_admm.from_module(nn.Linear(3, 4), "cross_entropy")


def some(count: int, seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    return random.standard_normal((count, 3)).astype(np.float32), random.integers(0, 4, count)


def writer(path: Path, **options: Any) -> hdf5.Writer:
    settings: dict[str, Any] = {"features": 3, "source": "test", "classes": list("abcd"), "chunk_bytes": CHUNK}
    return hdf5.Writer(path, **{**settings, **options})


def written(path: Path, count: int, **options: Any) -> Path:
    with writer(path, **options) as out:
        out.write(*some(count))
    return path


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torch_admm-rows")]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


# --- what is written is what is read


@pytest.mark.parametrize("count", [1, 31, 32, 33, 300])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_round_trip(tmp_path: Path, count: int, dtype: Any) -> None:
    x, y = some(count)
    path = written(tmp_path / "rows.h5", count, dtype=dtype, attributes={"seed": 3, "scale": 0.5, "by": "me"})
    stored = x.astype(dtype).astype(np.float32)
    read_x, read_y = hdf5.read(path)
    np.testing.assert_array_equal(read_x, stored)
    np.testing.assert_array_equal(read_y, y)
    about = hdf5.describe(path)
    assert (about.rows, about.features, about.dtype, about.source) == (count, 3, dtype, "test")
    assert (about.classes, about.counts) == (tuple("abcd"), tuple(np.bincount(y, minlength=4)))
    assert about.attributes == {"seed": 3, "scale": 0.5, "by": "me"}
    np.testing.assert_allclose(about.mean, stored.mean(0, np.float64), rtol=0, atol=1e-12)
    spread = stored.std(0, dtype=np.float64) if count > 1 else 1
    np.testing.assert_allclose(about.scale, spread, rtol=1e-12)


def test_rows_may_come_in_blocks_of_any_size(tmp_path: Path) -> None:
    x, y = some(300)
    with writer(tmp_path / "blocks.h5") as out:
        for start, stop in ((0, 0), (0, 1), (1, 40), (40, 240), (240, 300)):
            out.write(x[start:stop], y[start:stop])
    whole = written(tmp_path / "whole.h5", 300)
    assert (tmp_path / "blocks.h5").read_bytes() == whole.read_bytes()


def test_numbers_as_targets(tmp_path: Path) -> None:
    x, y = some(100)
    with writer(tmp_path / "rows.h5", classes=None) as out:
        out.write(x, y + 0.25)
    about, targets = hdf5.describe(tmp_path / "rows.h5"), hdf5.read(tmp_path / "rows.h5")[1]
    assert (about.classes, about.counts) == (None, None)
    assert targets.dtype == np.float32
    np.testing.assert_array_equal(targets, y + 0.25)


def test_any_hdf5_program_reads_it(tmp_path: Path) -> None:
    x, y = some(300)
    with h5py.File(written(tmp_path / "rows.h5", 300)) as file:
        np.testing.assert_array_equal(file["x"], x)
        np.testing.assert_array_equal(file["y"], y)
        assert (file["x"].chunks, file["y"].dtype, file.attrs["source"]) == ((32, 3), np.uint8, b"test")
        assert file["x"].fletcher32
        assert file["y"].fletcher32


def test_a_feature_that_never_changes_has_scale_1(tmp_path: Path) -> None:
    x, y = some(100)
    x[:, 1] = 7
    with writer(tmp_path / "rows.h5") as out:
        out.write(x, y)
    about = hdf5.describe(tmp_path / "rows.h5")
    assert (about.mean[1], about.scale[1]) == (7, 1)


@pytest.mark.parametrize("size", [7, 32, 64, 1000])
def test_chunks_are_the_rows_in_order(tmp_path: Path, size: int) -> None:
    x, y = some(300)
    rows = rows_of(written(tmp_path / "rows.h5", 300), PROBLEM)
    chunks = list(rows.chunks(size))
    assert [c.rows for c in chunks] == [slice(i, min(i + size, 300)) for i in range(0, 300, size)]
    np.testing.assert_array_equal(torch.cat([c.x for c in chunks]), x)
    np.testing.assert_array_equal(torch.cat([c.y for c in chunks]), y)


def test_a_float64_model_takes_it_too(tmp_path: Path) -> None:
    problem = torch_admm.from_module(nn.Linear(3, 4, dtype=torch.float64), "cross_entropy")
    rows = rows_of(written(tmp_path / "rows.h5", 100), problem)
    for x, _ in rows.batches(10, 0, 0):
        assert x.dtype == torch.float64


# --- shuffling


def test_windows_of_chunks_are_shuffled_and_so_are_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of 100 rows: its 25 chunks in a random order, and within each, which is a window here, the rows."""
    monkeypatch.setattr(hdf5, "WINDOW_BYTES", 12 * 4)
    rows = rows_of(written(tmp_path / "rows.h5", 2400, chunk_bytes=12 * 4), PROBLEM)
    place = {row.tobytes(): i for i, row in enumerate(some(2400)[0])}
    firsts = [place[batch[0].numpy().tobytes()] for batch, _ in rows.batches(24, 0, 0)]  # a row of every shard
    windows = [firsts[i : i + 4] for i in range(0, 100, 4)]
    assert {len({row // 4 for row in window}) for window in windows} == {1}
    assert sum(window == sorted(window) for window in windows) < 5
    order = [window[0] // 4 for window in windows]
    assert sorted(order) == list(range(25)) != order


def test_read_ahead_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the file: of each of 24 shards a window in use and one to come, and a few."""
    reads: list[int] = []
    real = Layout.read

    def counted(self: Layout, descriptor: int, chunks: Any, x: Array, y: Array) -> None:
        reads.extend(chunks)
        real(self, descriptor, chunks, x, y)

    monkeypatch.setattr(Layout, "read", counted)
    monkeypatch.setattr(hdf5, "WINDOW_BYTES", 2 * CHUNK)
    monkeypatch.setattr(hdf5, "MERGED_BYTES", CHUNK)
    monkeypatch.setattr(hdf5, "BLOCK_BYTES", 4 * CHUNK)
    rows = rows_of(written(tmp_path / "rows.h5", 32 * 480), PROBLEM)
    reads.clear()  # those of the writer
    batches: Any = rows.batches(24, 0, 0)
    next(batches)
    assert len(reads) <= 2 * (24 + 24 + AHEAD)
    batches.close()
    reads.clear()
    chunks: Any = rows.chunks(128)
    next(chunks)
    assert len(reads) <= 4 * (AHEAD + 1)
    chunks.close()


# --- reading in the background


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


# --- bad rows


def bad(x: Any = None, y: Any = None) -> tuple[Array, Array]:
    """The second block of 40 rows, with something wrong."""
    good_x, good_y = some(40)
    return good_x if x is None else x, good_y if y is None else y


def with_one(values: Array, row: int, value: Any) -> Array:
    values = values.astype(np.result_type(values, type(value)))
    values[row] = value
    return values


BAD: dict[str, tuple[dict[str, Any], tuple[Array, Array], str]] = {
    "NaN": ({}, bad(x=with_one(some(40)[0], 5, np.nan)), r"row 45, column 0: x is nan; finite values in float32"),
    "too large": (
        {},
        bad(x=with_one(some(40)[0], 5, 1e39)),
        r"row 45, column 0: x is 1e\+39; finite values in float32",
    ),
    "too large for float16": (
        {"dtype": "float16"},
        bad(x=with_one(some(40)[0], 39, 70000.0)),
        r"row 79, column 0: x is 70000.0; finite values in float16 are expected",
    ),
    "a label beyond the classes": ({}, bad(y=with_one(some(40)[1], 7, 4)), r"row 47: y is 4; class numbers 0..3 are"),
    "a negative label": ({}, bad(y=with_one(some(40)[1], 7, -1)), r"row 47: y is -1; class numbers 0..3 are"),
    "half a label": ({}, bad(y=some(40)[1] + 0.5), r"y is an array of float64; whole class numbers are expected"),
    "a target that is NaN": (
        {"classes": None},
        bad(y=with_one(some(40)[1], 7, np.nan)),
        r"row 47, column 0: y is nan; finite values in float32",
    ),
    "too few features": (
        {},
        bad(x=some(40)[0][:, :2]),
        r"x is float32 of shape \(40, 2\); numbers of shape \(rows, 3\)",
    ),
    "texts": ({}, bad(x=some(40)[0].astype(str)), r"x is <U32 of shape \(40, 3\); numbers of shape \(rows, 3\)"),
    "too few targets": ({}, bad(y=some(39)[1]), r"x has 40 rows but y has shape \(39,\); \(40,\) is expected"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    options, block, message = BAD[name]
    good = some(40)

    def two_blocks() -> None:
        with writer(tmp_path / "rows.h5", **options) as out:
            out.write(*good)
            out.write(*block)

    with pytest.raises(DataError, match=f"rows.h5: {message}"):
        two_blocks()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": 0}, r"features is 0; a whole number of at least 1"),
        ({"source": ""}, r"source is ''; a text that is not empty"),
        ({"classes": []}, r"classes is empty; names are expected, or None for floating targets"),
        ({"classes": ["a", 3]}, r"classes\[1\] is 3; a text that is not empty"),
        ({"dtype": "float64"}, r"dtype is 'float64'; one of 'float32', 'float16'"),
        ({"attributes": {"a": [1]}}, r"attributes\['a'\] is \[1\]; a text or a number"),
        ({"chunk_bytes": 0}, r"chunk_bytes is 0; a whole number of at least 1"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        writer(tmp_path / "rows.h5", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_rows_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.h5: no rows were written"), writer(tmp_path / "rows.h5"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_files_that_do_not_fit_the_model(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.h5", 100)
    with pytest.raises(DataError, match=r"data: \S+rows.h5 has 3 features; 5 are expected, the inputs of the first"):
        rows_of(path, torch_admm.from_module(nn.Linear(5, 4), "cross_entropy"))
    rows = rows_of(path, torch_admm.from_module(nn.Linear(3, 2), "cross_entropy"))
    labels = some(100)[1]
    first = int((labels >= 2).argmax())
    with pytest.raises(DataError, match=rf"rows.h5: y\[{first}\] is {labels[first]}: expected class labels 0..1"):
        list(rows.chunks(100))
    with pytest.raises(DataError, match=r"rows.h5: y\[\d+\] is [23]: expected class labels 0..1"):
        list(rows.batches(100, 0, 0))
    with pytest.raises(FileNotFoundError, match=r"nowhere.h5"):
        rows_of(tmp_path / "nowhere.h5", PROBLEM)


# --- whole or not at all


def test_until_it_is_whole_a_file_has_another_name(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.h5", 100)
    before = path.read_bytes()
    with writer(path) as out:
        out.write(*some(200, seed=1))
        assert path.read_bytes() == before
        with pytest.raises(DataError, match=r"rows.h5.part: another process is writing it"), writer(path):
            pass
    assert hdf5.describe(path).rows == 200
    assert [p.name for p in tmp_path.iterdir()] == ["rows.h5"]


def test_every_write_may_be_the_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up after so many writes; HDF5 itself would crash when the process ends."""
    real, left = os.pwrite, [0]

    def full(descriptor: int, data: Any, offset: int) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    failures = 0
    while True:
        left[0] = failures
        try:
            written(tmp_path / "rows.h5", 100)
            break
        except OSError as error:
            failures += 1
            message = str(error)
        assert "could not be written: No space left on device" in message
        assert "rows.h5" in message
        assert list(tmp_path.iterdir()) == []
    assert failures > 5
    np.testing.assert_array_equal(hdf5.read(tmp_path / "rows.h5")[0], some(100)[0])


def test_a_disk_that_forgets_is_found_out_before_the_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def forgetful(descriptor: int, data: Any, offset: int) -> int:
        return real(descriptor, bytes(len(data)) if len(data) == CHUNK + 4 else data, offset)

    monkeypatch.setattr(os, "pwrite", forgetful)
    with pytest.raises(DataError, match=r"rows.h5.part: rows 0 to 31 are damaged: their checksum does not match"):
        written(tmp_path / "rows.h5", 100)
    assert list(tmp_path.iterdir()) == []
