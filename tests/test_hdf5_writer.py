"""Writing HDF5 files of rows: a bad row is named, and a file is whole or not there at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.files import CHUNK, Array, some, writer, written
from torch_admm.data import hdf5
from torch_admm.errors import DataError

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
