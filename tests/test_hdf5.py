"""HDF5 files of rows: what is written is what is read, in order or shuffled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

import torch_admm
from tests.files import CHUNK, Array, some, writer, written
from torch_admm.data import hdf5, rows_of
from torch_admm.data.layout import Layout
from torch_admm.data.reader import AHEAD
from torch_admm.errors import DataError

PROBLEM = torch_admm.from_module(nn.Linear(3, 4), "cross_entropy")
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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
