"""Writing an HDF5 file of rows: aside, verified, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, final

import numpy as np

from ..arguments import choice, positive_int
from ..errors import DataError
from .disk import Disk
from .layout import FORMAT, HEADER, LIBRARY, VERSION, Array, Layout, Plain, digest, layout_of, require_h5py
from .pieces import checksum

__all__ = ["Writer"]

CHUNK_BYTES = 1 << 20  # of x: large enough to read at full speed, and still in the second-level cache to be checked


@final
class Writer:
    """Takes rows block by block and makes a file of them when the `with` block ends well.

        with Writer("train.h5", features=28, source="HIGGS.csv.gz", classes=["background", "signal"]) as out:
            out.write(x, y)

    Until then there is only `train.h5.part`; after any exception there is neither. With `classes` None the targets are
    floating numbers, else class numbers 0 .. len(classes) - 1. Means, scales and class counts are taken on the way.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        features: int,
        source: str,
        classes: Sequence[str] | None,
        dtype: Literal["float32", "float16"] = "float32",
        attributes: Mapping[str, Plain] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Check the arguments; nothing is written yet."""
        self.path = Path(path)
        self.aside = self.path.with_name(self.path.name + ".part")
        self.features, self.source = positive_int("features", features), _text("source", source)
        self.classes = None if classes is None else [_text(f"classes[{i}]", name) for i, name in enumerate(classes)]
        if self.classes == []:
            raise ValueError("classes is empty; names are expected, or None for floating targets")
        kind = np.dtype(choice("dtype", dtype, ("float32", "float16"))).newbyteorder("<")
        self.attributes = {name: _attribute(name, value) for name, value in (attributes or {}).items()}
        most = max(1, positive_int("chunk_bytes", chunk_bytes) // (self.features * kind.itemsize))
        self.chunk_rows = 1 << (most.bit_length() - 1)  # chunks and what readers ask for then end together
        self._x = np.zeros((self.chunk_rows, self.features), kind)
        self._y = np.zeros(self.chunk_rows, _target_type(self.classes))
        self._checksums: list[tuple[int, int]] = []
        self._moments = _Moments(self.features)
        self._counts = np.zeros(len(self.classes or ()), np.int64)
        self._rows, self._filled = 0, 0  # rows flushed, and rows waiting in the buffers
        self._file: Any = None

    def __enter__(self) -> Writer:
        """Open the file aside."""
        h5py = require_h5py()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._disk = Disk(_locked(self.aside), self.path)
        self._disk.truncate(0)  # what a run that was killed left behind
        self._file = h5py.File(self._disk, "w", libver=LIBRARY)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Finish and rename, or leave nothing."""
        try:
            if error is None:
                self._finish()
        finally:
            self._discard()

    def write(self, x: Array, y: Array) -> None:
        """A block of rows, of any number."""
        x, y = np.asarray(x), np.asarray(y)
        if x.ndim != 2 or x.shape[1] != self.features or x.dtype.kind not in "fiub":
            came = f"x is {x.dtype} of shape {x.shape}"
            raise DataError(f"{self.path}: {came}; numbers of shape (rows, {self.features}) are expected")
        if y.shape != (len(x),):
            raise DataError(f"{self.path}: x has {len(x)} rows but y has shape {y.shape}; ({len(x)},) is expected")
        allowed = "fiub" if self.classes is None else "iub"
        if y.dtype.kind not in allowed:
            expected = "numbers" if self.classes is None else "whole class numbers"
            raise DataError(f"{self.path}: y is an array of {y.dtype}; {expected} are expected")
        done = 0
        while done < len(x):
            count = min(len(x) - done, self.chunk_rows - self._filled)
            self._take(x[done : done + count], y[done : done + count])
            done += count
            if self._filled == self.chunk_rows:
                self._flush()

    def _take(self, x: Array, y: Array) -> None:
        """Into the buffers, checked as they will be stored."""
        rows = slice(self._filled, self._filled + len(x))
        self._check_labels(y)
        with np.errstate(over="ignore"):  # what overflows is refused by name below
            self._x[rows], self._y[rows] = x, y
        self._check_finite(x, self._x[rows], "x")
        if self.classes is None:
            self._check_finite(y[:, None], self._y[rows, None], "y")
        self._filled += len(x)

    def _check_labels(self, y: Array) -> None:
        if self.classes is None:
            return
        bad = (y < 0) | (y >= len(self.classes))
        if bad.any():
            at = int(bad.argmax())
            expected = f"class numbers 0..{len(self.classes) - 1} are expected"
            raise DataError(f"{self.path}: row {self._rows + self._filled + at}: y is {y[at]}; {expected}")

    def _check_finite(self, came: Array, stored: Array, name: str) -> None:
        if np.isfinite(stored).all():
            return
        row, column = (int(i) for i in np.argwhere(~np.isfinite(stored))[0])
        where = f"{self.path}: row {self._rows + self._filled + row}, column {column}"
        raise DataError(f"{where}: {name} is {came[row, column]}; finite values in {stored.dtype.name} are expected")

    def _flush(self) -> None:
        """One chunk to the file; the last one is stored whole too, with zeros after its rows."""
        if self._rows == 0:
            self._create()
        start, count = self._rows, self._filled
        self._x[count:], self._y[count:] = 0, 0
        for name, values in (("x", self._x), ("y", self._y)):
            stored = self._file[name]
            stored.resize(start + count, 0)
            stored[start : start + count] = values[:count]
        self._disk.check()
        self._checksums.append((checksum(self._x), checksum(self._y)))
        self._moments.add(self._x[:count])
        if self.classes is not None:
            self._counts += np.bincount(self._y[:count], minlength=len(self._counts))
        self._rows, self._filled = start + count, 0

    def _create(self) -> None:
        if self._filled < self.chunk_rows:  # the file is less than one chunk
            self.chunk_rows = self._filled
            self._x, self._y = self._x[: self._filled], self._y[: self._filled]
        for name, values in (("x", self._x), ("y", self._y)):
            shape = values.shape[1:]
            self._file.create_dataset(
                name, (0, *shape), values.dtype, chunks=values.shape, maxshape=(None, *shape), fletcher32=True
            )

    def _finish(self) -> None:
        if self._filled:
            self._flush()
        if not self._rows:
            raise DataError(f"{self.path}: no rows were written")
        self._write_header()
        self._file.close()
        self._disk.sync()
        _verify(layout_of(self.aside))
        self.aside.replace(self.path)
        _sync_folder(self.path.parent)

    def _write_header(self) -> None:
        counts = None if self.classes is None else self._counts.tolist()
        values: tuple[Any, ...] = (
            *(FORMAT, VERSION, self.source, self._rows, self.features, self.chunk_rows),
            *(self._x.dtype.name, self._y.dtype.name, json.dumps(self.classes), json.dumps(counts)),
            *(json.dumps(self.attributes), self._moments.mean.tolist(), self._moments.scale().tolist()),
        )
        header = dict(zip(HEADER, values, strict=True))
        checksums = np.array(self._checksums, np.uint32)
        self._file.create_dataset("checksums", data=checksums)
        for name, value in {**header, "digest": digest(header, checksums)}.items():
            # of fixed length: HDF5 keeps texts of variable length in a heap without checksums
            self._file.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value

    def _discard(self) -> None:
        """Whatever is still aside, open or not."""
        self._file.close()
        with suppress(FileNotFoundError):
            self.aside.unlink()
        os.close(self._disk.descriptor)


@final
class _Moments:
    """Means and sums of squared deviations of each feature, block by block, in float64."""

    def __init__(self, features: int) -> None:
        self.count, self.mean, self.squares = 0, np.zeros(features), np.zeros(features)

    def add(self, x: Array) -> None:
        x = x.astype(np.float64)
        mean = x.mean(0)
        total, apart = self.count + len(x), mean - self.mean
        self.squares += np.square(x - mean).sum(0) + apart**2 * (self.count * len(x) / total)
        self.mean += apart * (len(x) / total)
        self.count = total

    def scale(self) -> Array:
        deviation = np.sqrt(self.squares / self.count)
        return np.where(deviation > 0, deviation, 1.0)


def _verify(layout: Layout) -> None:
    """Read every chunk back."""
    x, y = layout.room(1)
    descriptor = os.open(layout.description.path, os.O_RDONLY)
    try:
        for chunk in range(layout.chunks):
            layout.read(descriptor, [chunk], x, y)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Keep a second writer off the file, where the system has such locks; they end with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise DataError(f"{path}: another process is writing it") from None
    return descriptor


def _sync_folder(path: Path) -> None:
    """So that the new name survives a power cut, where folders can be opened."""
    with suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _target_type(classes: Sequence[str] | None) -> np.dtype[Any]:
    kind = np.dtype(np.float32) if classes is None else np.min_scalar_type(len(classes) - 1)
    little: np.dtype[Any] = kind.newbyteorder("<")
    return little


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{name} is {value!r}; a text that is not empty is expected")
    return value


def _attribute(name: str, value: Any) -> Plain:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"attributes[{name!r}] is {value!r}; a text or a number is expected")
    return value
