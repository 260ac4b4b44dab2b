"""Sources made of delimited text: HIGGS as UCI ships it, and any file of one's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, final

import numpy as np

from ...errors import DataError
from .base import AbstractSource, Block, Contents, Obtain, Part, Remote, option, register
from .delimited import Columns, Parsed, fields_of, number, parsed, records, texts

MOST_CLASSES = 1000  # above it a label column is taken for a number to predict
HIGGS_TEST = 500_000
HEADERS = ("auto", "yes", "no")

HIGGS = Remote(
    "higgs/HIGGS.csv.gz",
    "https://archive.ics.uci.edu/ml/machine-learning-databases/00280/HIGGS.csv.gz",
    "ea302c18164d4e3d916a1e2e83a9a8d07069fa6ebc7771e4c0540d54e593b698",
)


@final
@register
@dataclass(frozen=True)
class Higgs(AbstractSource):
    """The label, 0 or 1, and 28 features a line, without a header."""

    name: ClassVar[str] = "higgs"
    summary: ClassVar[str] = (
        "UCI HIGGS, 11,000,000 x 28 in 2 classes; the last 500,000 rows, or --test FILE, are the test"
    )

    train: str | None = option(None, "file of training rows (default: higgs/HIGGS.csv.gz)", recipe=False)
    test: str | None = option(None, "file of test rows (default: the last rows of the training file)", recipe=False)
    test_rows: int | None = option(None, f"how many last rows are the test (default {HIGGS_TEST:,})", type=int)

    def files(self, folder: Path, obtain: Obtain) -> tuple[Path, ...]:
        _one_kind_of_test(self.test, self.test_rows)
        if self.train is not None:
            return _named(self.train, self.test)
        if not (folder / HIGGS.path).exists() and (pair := _pair(folder / "higgs")):
            return pair
        return (obtain(HIGGS), *_named(self.test))

    def open(self, files: tuple[Path, ...]) -> Contents:
        layout = Columns(columns=29, label=0, classes=("0", "1"))
        return Contents(28, ("background", "signal"), split(files, layout, self.test_rows or HIGGS_TEST))


@final
@register
@dataclass(frozen=True)
class CSV(AbstractSource):
    name: ClassVar[str] = "csv"
    summary: ClassVar[str] = "any delimited file, gzipped or not: --train FILE --label COLUMN"

    train: str | None = option(None, "file of training rows", recipe=False)
    test: str | None = option(None, "file of test rows of the same layout", recipe=False)
    label: str | None = option(None, "column to predict: its name in the header, or its number from 1")
    classes: tuple[str, ...] | None = option(None, "the classes, in order (default: those in the file)", nargs="+")
    regression: bool = option(False, "the label is a number to predict", action="store_true")
    drop: tuple[str, ...] = option((), "columns to leave out, by name or number from 1", nargs="+")
    delimiter: str = option(",", "what stands between columns; \\t for a tab")
    header: str = option("auto", "does line 1 name the columns? auto: if it has text there", choices=HEADERS)
    test_rows: int | None = option(None, "the last rows are the test, so many", type=int)
    test_fraction: float | None = option(None, "the share of rows drawn for the test (default 0.1)", type=float)
    seed: int = option(0, "draws the test rows", type=int)

    def files(self, folder: Path, obtain: Obtain) -> tuple[Path, ...]:
        if self.train is None or self.label is None:
            raise DataError("csv needs --train FILE and --label COLUMN")
        if self.regression and self.classes:
            raise DataError("--classes and --regression exclude each other")
        _one_kind_of_test(self.test, self.test_rows, self.test_fraction)
        if self.test_fraction is not None and not 0 < self.test_fraction < 1:
            raise DataError(f"--test-fraction is {self.test_fraction}; a number between 0 and 1 is expected")
        return _named(self.train, self.test)

    def open(self, files: tuple[Path, ...]) -> Contents:
        layout = self.layout(files[0])
        for other in files[1:]:
            if self.layout(other) != layout:
                raise DataError(f"{other}, line 1: its columns are not those of {files[0]}")
        if not self.regression:
            layout = replace(layout, classes=self.classes or _distinct(files, layout))
        drawn = None if self.test_rows or len(files) > 1 else self.test_fraction or 0.1
        blocks = split(files, layout, self.test_rows) if drawn is None else draw(files[0], layout, drawn, self.seed)
        return Contents(len(layout.features), layout.classes, blocks)

    def layout(self, path: Path) -> Columns:
        """From the first line: unless told, it is a header if any column but the label has no number there."""
        assert self.label is not None
        delimiter = self.delimiter.replace("\\t", "\t")
        if len(delimiter) != 1:
            raise DataError(f"--delimiter is {self.delimiter!r}; one character is expected")
        first = _first(path, delimiter)
        dropped = {_column(path, first, name, "--drop") for name in self.drop}
        label = _column(path, first, self.label, "--label")
        seen = [text for j, text in enumerate(first) if j != label and j not in dropped]
        if not seen:
            raise DataError(f"{path}, line 1 leaves no column beside the label; is --delimiter {delimiter!r} right?")
        header = {"yes": True, "no": False}.get(self.header, any(number(text) is None for text in seen))
        names = tuple(first) if header else ()
        return Columns(len(first), label, None, frozenset(dropped), delimiter, int(header), names)


def split(files: tuple[Path, ...], layout: Columns, last: int | None) -> Iterator[Block]:
    """The rows of a training and a test file; of one file alone, the `last` rows are the test."""
    if len(files) == 1:
        yield from tail(files[0], layout, last or 0)
        return
    sizes = [path.stat().st_size for path in files]
    before = 0
    parts: tuple[Part, Part] = ("train", "test")
    for part, path, size in zip(parts, files, sizes, strict=True):
        for x, y, done in parsed(path, layout):
            yield Block(part, x, y, (before + done * size) / sum(sizes))
        before += size


def tail(path: Path, layout: Columns, last: int) -> Iterator[Block]:
    """One pass with the newest `last` rows in memory: nobody knows which they are before the file ends."""
    held: deque[Parsed] = deque()
    count = 0
    for block in parsed(path, layout):
        held.append(block)
        count += len(block.y)
        while count - len(held[0].y) >= last:
            oldest = held.popleft()
            count -= len(oldest.y)
            yield Block("train", oldest.x, oldest.y, block.done)
    if count < last:
        raise DataError(f"{path} has {count:,} rows; {last:,} for the test (--test-rows) leave none to train on")
    for x, y, done in held:
        extra = max(0, count - last)
        if extra:
            yield Block("train", x[:extra], y[:extra], done)
        yield Block("test", x[extra:], y[extra:], done)
        count -= extra


def draw(path: Path, layout: Columns, fraction: float, seed: int) -> Iterator[Block]:
    """Every row goes to the test with probability `fraction`: by seed and row, whatever the blocks."""
    random = np.random.default_rng(seed)
    for x, y, done in parsed(path, layout):
        chosen = random.random(len(y)) < fraction
        yield Block("train", x[~chosen], y[~chosen], done)
        yield Block("test", x[chosen], y[chosen], done)


def _distinct(files: tuple[Path, ...], layout: Columns) -> tuple[str, ...]:
    """All labels in the files, by value if they are numbers, else by alphabet."""
    found: dict[str | float, str] = {}
    for path in files:
        for text in texts(path, layout.header):
            for _, fields in records(text, layout, path):
                label = fields[layout.label].strip()
                value = number(label)
                found.setdefault(label if value is None else value, label)
            if len(found) > MOST_CLASSES:
                raise DataError(
                    f"{path}: column {layout.label + 1} has more than {MOST_CLASSES:,} different values; "
                    f"--regression if it is a number to predict, else --classes"
                )
    keys = sorted(found, key=lambda key: (isinstance(key, str), key))
    return tuple(found[key] for key in keys)


def _first(path: Path, delimiter: str) -> list[str]:
    for text in texts(path, size=1 << 16):
        content = text.data.decode(errors="replace").splitlines()[0] if text.data else ""
        if content.strip():
            return [name.strip() for name in fields_of(content, delimiter, path, 1)]
        if text.data:
            break
    raise DataError(f"{path}, line 1 is empty; a header or a row is expected")


def _column(path: Path, first: list[str], name: str, argument: str) -> int:
    if name.isdecimal() and 1 <= int(name) <= len(first):  # first: a row without header may hold the very number
        return int(name) - 1
    if name in first:
        return first.index(name)
    raise DataError(f"{argument} is {name!r}; {path} has the columns {', '.join(first)}, or 1 to {len(first)}")


def _one_kind_of_test(*given: object) -> None:
    if sum(value is not None for value in given) > 1:
        raise DataError("--test, --test-rows and --test-fraction exclude each other")
    for value in given:
        if isinstance(value, int) and value < 1:
            raise DataError(f"--test-rows is {value}; a whole number of at least 1 is expected")


def _named(*names: str | None) -> tuple[Path, ...]:
    paths = tuple(Path(name) for name in names if name is not None)
    if missing := [path for path in paths if not path.is_file()]:
        raise DataError(f"{missing[0]} does not exist, or is no file")
    return paths


def _pair(folder: Path) -> tuple[Path, ...]:
    """HIGGS_train*.csv.gz and HIGGS_test*.csv.gz, where there is one of each."""
    found = [sorted(folder.glob(f"HIGGS_{part}*.csv*")) for part in ("train", "test")]
    if any(len(paths) > 1 for paths in found):
        raise DataError(f"{folder} has several files HIGGS_train* or HIGGS_test*; name two by --train and --test")
    return tuple(path for paths in found for path in paths) if all(found) else ()
