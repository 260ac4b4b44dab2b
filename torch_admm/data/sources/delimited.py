"""Lines of delimited text, gzipped or not, to arrays, as a stream.

Three stages side by side: one thread decompresses (isal, which checks each member's CRC and length), one parses
(pyarrow, whose numbers are those of `float`), the caller writes. A block in which anything is odd is read again line by
line in Python, which either accepts it or names file, line and column: all messages have their home there.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, cast, final

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..reader import ahead
from .base import needs

__all__ = ["Columns", "Parsed", "Text", "fields_of", "number", "parsed", "records", "texts"]

BLOCK = 4 << 20  # bytes of text parsed together
TOO_LARGE = 2.0**128 - 2.0**103  # from here on a number is rounded to infinity in float32


@final
@dataclass(frozen=True)
class Columns:
    """What the columns of a line are, counted from 0; `classes` None means that the label is a number to predict."""

    columns: int
    label: int
    classes: tuple[str, ...] | None
    dropped: frozenset[int] = frozenset()
    delimiter: str = ","
    header: int = 0  # lines before the first row
    names: tuple[str, ...] = ()

    @cached_property
    def features(self) -> tuple[int, ...]:
        return tuple(j for j in range(self.columns) if j != self.label and j not in self.dropped)

    @cached_property
    def by_number(self) -> dict[float, int]:
        """Classes by value, for files that write 1 as 1.000000000000000000e+00."""
        values = {i: number(text) for i, text in enumerate(self.classes or ())}
        return {value: i for i, value in values.items() if value is not None}

    def class_of(self, text: str) -> int | None:
        known = self.classes or ()
        text = text.strip()
        return known.index(text) if text in known else self.by_number.get(cast(float, number(text)))


class Text(NamedTuple):
    """Whole lines of a file: the number of the first one, from 1, and the share of the file that has been read."""

    data: bytes
    line: int
    done: float


class Parsed(NamedTuple):
    """Rows of a file, and the share of it that has been read."""

    x: NDArray[np.float32]
    y: NDArray[Any]
    done: float


def parsed(path: Path, layout: Columns) -> Iterator[Parsed]:
    """All rows of a file in blocks, decompressed and parsed in threads of their own."""
    blocks = texts(path, layout.header)
    read: Iterator[Any] = ahead(lambda _: next(blocks, None), repeat(None))
    return ahead(lambda text: _parse(text, layout, path), takewhile(bool, read), threads=2)


def texts(path: Path, header: int = 0, size: int = BLOCK) -> Iterator[Text]:
    """A file in blocks of whole lines, without the first `header` of them."""
    line, rest = 1, b""
    with path.open("rb") as raw:
        total = max(1, path.stat().st_size)
        file = _opened(raw)
        while data := _read(file, size, path, line):
            data = rest + data.removeprefix(b"\xef\xbb\xbf") if line == 1 else rest + data
            cut = data.rfind(b"\n") + 1
            if not cut and len(data) > 16 * size:
                raise DataError(f"{path}, line {line} is longer than {len(data):,} bytes; is this a text file?")
            whole, rest = data[:cut], data[cut:]
            yield _text(whole, line, header, raw.tell() / total)
            line += whole.count(b"\n")
    if rest:
        yield _text(rest, line, header, 1.0)


def _text(data: bytes, line: int, header: int, done: float) -> Text:
    while line <= header and data:
        data, line = data.partition(b"\n")[2], line + 1
    return Text(data, line, done)


def _opened(raw: BinaryIO) -> BinaryIO:
    zipped = cast(io.BufferedReader, raw).peek(2)[:2] == b"\x1f\x8b"
    return cast(BinaryIO, needs("isal.igzip").IGzipFile(fileobj=raw)) if zipped else raw


def _read(file: BinaryIO, size: int, path: Path, line: int) -> bytes:
    """OSError from the file itself passes; EOFError, BadGzipFile (an OSError without number) and zlib's are damage."""
    try:
        return file.read(size)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{path}, after line {line - 1}: the gzip file is cut off or damaged ({error})") from None


# --- the fast way


class _OddError(Exception):
    """Something that the slow way will name, or accept."""


def _parse(text: Text, layout: Columns, path: Path) -> Parsed:
    arrow = needs("pyarrow")
    try:
        x, y = _fast(text, layout)
    except (_OddError, arrow.ArrowInvalid):
        x, y = _slow(text, layout, path)
    return Parsed(x, y, text.done)


def _fast(text: Text, layout: Columns) -> tuple[NDArray[np.float32], NDArray[Any]]:
    arrow, reader = needs("pyarrow"), needs("pyarrow.csv")
    names = [str(j) for j in range(layout.columns)]
    types = {names[j]: arrow.float64() for j in layout.features}
    types[names[layout.label]] = arrow.string() if layout.classes else arrow.float64()
    table = reader.read_csv(
        arrow.BufferReader(text.data),
        reader.ReadOptions(column_names=names, block_size=len(text.data) + 1, use_threads=False),
        reader.ParseOptions(delimiter=layout.delimiter, ignore_empty_lines=False),
        reader.ConvertOptions(column_types=types, include_columns=list(types), null_values=[]),
    )
    x = np.empty((len(table), len(layout.features)), np.float32)
    with np.errstate(over="ignore"):
        for j, feature in enumerate(layout.features):
            x[:, j] = table[names[feature]].to_numpy()
        y = _indices(table[names[layout.label]], layout) if layout.classes else table[names[layout.label]].to_numpy()
        y = y if layout.classes else y.astype(np.float32)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise _OddError
    return x, y


def _indices(labels: Any, layout: Columns) -> NDArray[np.int64]:
    coded = labels.combine_chunks().dictionary_encode()
    codes = [layout.class_of(text) for text in coded.dictionary.to_pylist()]
    if None in codes:
        raise _OddError
    indices: NDArray[np.int64] = np.array(codes, np.int64)[coded.indices.to_numpy()]
    return indices


# --- the slow way


def _slow(text: Text, layout: Columns, path: Path) -> tuple[NDArray[np.float32], NDArray[Any]]:
    rows, labels = [], []
    for line, fields in records(text, layout, path):
        rows.append(_numbers(fields, layout.features, layout, path, line))
        labels.append(_label(fields, layout, path, line))
    x = np.array(rows, np.float64).reshape(len(rows), len(layout.features))
    return x.astype(np.float32), np.array(labels, np.int64 if layout.classes else np.float32)


def records(text: Text, layout: Columns, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and fields of every line that is not blank."""
    try:
        lines = text.data.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError as error:
        line = text.line + text.data.count(b"\n", 0, error.start)
        raise DataError(f"{path}, line {line}: byte {text.data[error.start]:#04x} is not UTF-8 text") from None
    for line, content in enumerate(lines, text.line):
        if not content.strip():
            continue
        fields = fields_of(content, layout.delimiter, path, line)
        if len(fields) != layout.columns:
            raise DataError(f"{path}, line {line} has {len(fields)} columns; {layout.columns} are expected")
        yield line, fields


def fields_of(content: str, delimiter: str, path: Path, line: int) -> list[str]:
    try:
        return next(csv.reader([content], delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {line}: {error}; every row must be one line") from None


def number(text: str) -> float | None:
    """The value of a decimal number; None for anything else that `float` would take, 1_000 say."""
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


def _numbers(fields: list[str], columns: Sequence[int], layout: Columns, path: Path, line: int) -> list[float]:
    values = []
    for j in columns:
        value = number(fields[j])
        if value is None:
            _refuse(path, line, j, layout, f"{fields[j]!r} is not a number")
        if not math.isfinite(value):
            _refuse(path, line, j, layout, f"{fields[j]!r} is not finite")
        if abs(value) >= TOO_LARGE:
            _refuse(path, line, j, layout, f"{fields[j]!r} does not fit a 32-bit float")
        values.append(value)
    return values


def _label(fields: list[str], layout: Columns, path: Path, line: int) -> float:
    if layout.classes is None:
        return _numbers(fields, [layout.label], layout, path, line)[0]
    index = layout.class_of(fields[layout.label])
    if index is None:
        shown = ", ".join(layout.classes[:20]) + (", ..." if len(layout.classes) > 20 else "")
        _refuse(path, line, layout.label, layout, f"label {fields[layout.label]!r} is none of the classes {shown}")
    return index


def _refuse(path: Path, line: int, column: int, layout: Columns, what: str) -> NoReturn:
    name = f" ({layout.names[column]})" if layout.names else ""
    raise DataError(f"{path}, line {line}, column {column + 1}{name}: {what}")
