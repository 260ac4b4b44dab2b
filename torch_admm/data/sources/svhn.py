"""Street View House Numbers: chosen digits, as HOG features made by several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..reader import ahead
from . import hog
from .base import AbstractSource, Block, Contents, Obtain, Part, Remote, needs, option, register

__all__ = ["SVHN", "features_of"]

BLOCK = 512  # images that a worker gets at a time

URL = "http://ufldl.stanford.edu/housenumbers/"
SUMS = {
    "train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
    "extra_32x32.mat": "a133a4beb38a00fcdda90c9489e0c04f900b660ce8a316a5e854838379a71eb3",
    "test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
}


@final
@register
@dataclass(frozen=True)
class SVHN(AbstractSource):
    name: ClassVar[str] = "svhn"
    summary: ClassVar[str] = "house numbers: 32 x 32 crops of two digits (0 and 2), as 648 HOG features"

    train: str | None = option(None, "file of training images (default: svhn/train_32x32.mat)", recipe=False)
    test: str | None = option(None, "file of test images (default: svhn/test_32x32.mat)", recipe=False)
    digits: tuple[int, ...] = option((0, 2), "the digits to tell apart, in order (default: 0 2)", type=int, nargs="+")
    extra: bool = option(False, "train on extra_32x32.mat, too (takes 4 GB of memory)", action="store_true")
    workers: int | None = option(None, "processes for the features (default: one a core)", recipe=False, type=int)

    def files(self, folder: Path, obtain: Obtain) -> tuple[Path, ...]:
        if len(set(self.digits)) != len(self.digits) or len(self.digits) < 2 or not set(self.digits) <= set(range(10)):
            raise DataError(
                f"--digits are {' '.join(map(str, self.digits))}; two or more different ones of 0 to 9 are expected"
            )
        if self.workers is not None and self.workers < 1:
            raise DataError(f"--workers is {self.workers}; a whole number of at least 1 is expected")
        names = ["train", "extra", "test"] if self.extra else ["train", "test"]
        given = {"train": self.train, "test": self.test}
        return tuple(_file(part, given.get(part), folder, obtain) for part in names)

    def open(self, files: tuple[Path, ...]) -> Contents:
        return Contents(hog.FEATURES, tuple(map(str, self.digits)), self.blocks(files))

    def blocks(self, files: tuple[Path, ...]) -> Iterator[Block]:
        count = self.workers or cores()
        with workers(count) as features:
            yield from ahead(partial(_finished, features), self.tasks(files), threads=count, most=count + 2)

    def tasks(self, files: tuple[Path, ...]) -> Iterator[_Task]:
        sizes = [path.stat().st_size for path in files]
        for i, path in enumerate(files):
            crops, labels = read(path, self.digits)
            part: Part = "test" if i == len(files) - 1 else "train"
            for start in range(0, len(labels), BLOCK):
                some = slice(start, start + BLOCK)
                share = min(1.0, (start + BLOCK) / len(labels))
                yield _Task(part, crops[some], labels[some], (sum(sizes[:i]) + share * sizes[i]) / sum(sizes))


class _Task(NamedTuple):
    part: Part
    crops: NDArray[np.uint8]
    labels: NDArray[np.int64]
    done: float


Features = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


def _finished(features: Features, task: _Task) -> Block:
    return Block(task.part, features(task.crops), task.labels, task.done)


@contextmanager
def workers(count: int) -> Iterator[Features]:
    """A function from crops to features that `count` threads may call at once, each served by a process."""
    needs("skimage.feature")
    if count == 1:
        yield hog.features
        return
    with ExitStack() as stack:
        idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for _ in range(count):
            idle.put(stack.enter_context(_worker()))
        yield partial(_ask, idle)


@contextmanager
def _worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, hog.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _ask(idle: SimpleQueue[subprocess.Popen[bytes]], crops: NDArray[np.uint8]) -> NDArray[np.float32]:
    process = idle.get()
    assert process.stdin is not None
    assert process.stdout is not None
    rows = None
    with suppress(BrokenPipeError):
        hog.to_worker(process.stdin, crops)
        rows = hog.from_worker(process.stdout, len(crops))
    idle.put(process)
    if rows is None:
        raise DataError(f"svhn: a worker ended with code {process.wait()}; --workers 1 works without any")
    return rows


def features_of(crops: NDArray[np.uint8], count: int) -> NDArray[np.float32]:
    """HOG features by `count` workers."""
    with workers(count) as features:
        parts = (crops[i : i + BLOCK] for i in range(0, len(crops), BLOCK))
        return np.concatenate(list(ahead(features, parts, threads=count, most=count + 2)))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read(path: Path, digits: tuple[int, ...]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The crops (n, 32, 32, 3) of some digits, in the order of the file, and which of `digits` each one is."""
    x, y = _matrices(path)
    labels = y.ravel() % 10  # the file says 10 for 0
    if missing := [digit for digit in digits if digit not in labels]:
        raise DataError(f"{path} has no image of digit {missing[0]}")
    chosen = np.flatnonzero(np.isin(labels, digits))
    codes = np.argmax(labels[chosen, None] == np.array(digits), axis=1)
    return np.moveaxis(x, 3, 0)[chosen], codes


def _matrices(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """X (32, 32, 3, n) and y (n, 1) of a .mat file, checked."""
    try:
        found = needs("scipy.io").loadmat(path, variable_names=["X", "y"])
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # damage shows as any of a dozen exceptions
        raise DataError(f"{path} is cut off, damaged or no .mat file of version 5 to 7 ({_short(error)})") from None
    x, y = found.get("X"), found.get("y")
    if x is None or y is None or x.dtype != np.uint8 or x.shape[:3] != (32, 32, 3) or x.ndim != 4:
        raise DataError(
            f"{path}: X of 32 x 32 x 3 x n bytes and y are expected, as in the SVHN files of cropped digits"
        )
    if y.size != x.shape[3] or y.size == 0:
        raise DataError(f"{path} has {x.shape[3]:,} images but {y.size:,} labels")
    bad = np.flatnonzero(~np.isin(y.ravel(), np.arange(11)))
    if len(bad):
        raise DataError(f"{path}, row {bad[0]}: label {y.ravel()[bad[0]]}; 1 to 10 are expected, 10 for digit 0")
    return x, y.astype(np.int64)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _file(part: str, given: str | None, folder: Path, obtain: Obtain) -> Path:
    """The file named; else the one as published, in torchvision's places; else the only one of that layout."""
    if given is not None:
        if not Path(given).is_file():
            raise DataError(f"{given} does not exist, or is no file")
        return Path(given)
    name = f"{part}_32x32.mat"
    for place in (folder / "svhn" / name, folder / name):
        if place.exists():
            return place
    alike = sorted((folder / "svhn").glob(f"{part}_*_32x32.mat"))
    if len(alike) > 1:
        raise DataError(f"{folder / 'svhn'} has {len(alike)} files {part}_*_32x32.mat; name one by --{part}")
    return alike[0] if alike else obtain(Remote(f"svhn/{name}", URL + name, SUMS[name]))
