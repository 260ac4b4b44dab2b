"""Sources of small images: MNIST and Fashion-MNIST (idx files), CIFAR-10 (python batches); pixels divided by 255."""

from __future__ import annotations

import gzip
import math
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from .base import AbstractSource, Block, Contents, Obtain, Part, Remote, register
from .batches import Batch, load_batch

BLOCK = 8192
Bytes = NDArray[np.uint8]

MNIST_SUMS = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
FASHION_SUMS = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
CIFAR = Remote(
    "cifar-10-python.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
)
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_FOLDER = "cifar-10-batches-py"
CIFAR_BATCHES: Mapping[str, Part] = {**{f"data_batch_{i}": "train" for i in range(1, 6)}, "test_batch": "test"}


class AbstractIdx(AbstractSource):
    """Four idx files in torchvision's layout, gzipped as published or not."""

    folder: ClassVar[str]
    url: ClassVar[str]
    sums: ClassVar[Mapping[str, str]]
    classes: ClassVar[tuple[str, ...]]

    def files(self, folder: Path, obtain: Obtain) -> tuple[Path, ...]:
        plain = [folder / self.folder / name.removesuffix(".gz") for name in self.sums]
        if all(path.exists() for path in plain) and not any(
            path.with_name(path.name + ".gz").exists() for path in plain
        ):
            return tuple(plain)
        return tuple(obtain(Remote(f"{self.folder}/{name}", self.url + name, s)) for name, s in self.sums.items())

    def open(self, files: tuple[Path, ...]) -> Contents:
        train, test = ((images(files[i]), labels(files[i + 1], len(self.classes))) for i in (0, 2))
        for (x, y), path in ((train, files[0]), (test, files[2])):
            if len(x) != len(y):
                raise DataError(f"{path} has {len(x):,} images, but there are {len(y):,} labels in the file beside it")
            if x.shape[1:] != train[0].shape[1:]:
                raise DataError(
                    f"{path} has images of {x.shape[1:]}; {train[0].shape[1:]} are expected, as in {files[0]}"
                )
        features = math.prod(train[0].shape[1:])
        return Contents(features, self.classes, pixels({"train": [train], "test": [test]}))


@final
@register
@dataclass(frozen=True)
class MNIST(AbstractIdx):
    name: ClassVar[str] = "mnist"
    summary: ClassVar[str] = "60,000 + 10,000 digits of 28 x 28 pixels in 10 classes"
    folder = "MNIST/raw"
    url = "https://ossci-datasets.s3.amazonaws.com/mnist/"
    sums = MNIST_SUMS
    classes = tuple("0123456789")


@final
@register
@dataclass(frozen=True)
class FashionMNIST(AbstractIdx):
    name: ClassVar[str] = "fashion-mnist"
    summary: ClassVar[str] = "60,000 + 10,000 pieces of clothing, 28 x 28 pixels in 10 classes"
    folder = "FashionMNIST/raw"
    url = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    sums = FASHION_SUMS
    classes = (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    )


@final
@register
@dataclass(frozen=True)
class CIFAR10(AbstractSource):
    """The folder that torchvision unpacks, or the archive it comes from; rows are the red, green and blue planes."""

    name: ClassVar[str] = "cifar10"
    summary: ClassVar[str] = "50,000 + 10,000 photographs of 32 x 32 x 3 pixels in 10 classes"
    classes: ClassVar[tuple[str, ...]] = CIFAR_CLASSES

    def files(self, folder: Path, obtain: Obtain) -> tuple[Path, ...]:
        paths = tuple(folder / CIFAR_FOLDER / name for name in CIFAR_BATCHES)
        return paths if all(path.exists() for path in paths) else (obtain(CIFAR),)

    def open(self, files: tuple[Path, ...]) -> Contents:
        parts: dict[Part, list[tuple[Bytes, Bytes]]] = {"train": [], "test": []}
        for name, (x, y) in _batches(files):
            if y.max(initial=0) >= len(self.classes):
                raise DataError(
                    f"{name}, row {int(y.argmax())}: label {y.max()}; 0 to {len(self.classes) - 1} are expected"
                )
            parts[CIFAR_BATCHES[Path(name).name]].append((x, y))
        return Contents(3072, self.classes, pixels(parts))


def _batches(files: tuple[Path, ...]) -> Iterator[tuple[str, Batch]]:
    if len(files) > 1:
        yield from ((str(path), load_batch(path.read_bytes(), str(path))) for path in files)
        return
    try:
        with tarfile.open(files[0]) as archive:
            for name in CIFAR_BATCHES:
                file = archive.extractfile(f"{CIFAR_FOLDER}/{name}")
                assert file is not None, name
                yield f"{files[0]}/{name}", load_batch(file.read(), f"{files[0]}/{name}")
    except (tarfile.TarError, EOFError, KeyError, AssertionError, zlib.error) as error:
        raise DataError(f"{files[0]} is cut off, damaged or another archive ({error})") from None


def pixels(parts: Mapping[Part, list[tuple[Bytes, Any]]]) -> Iterator[Block]:
    """Images as rows of numbers from 0 to 1."""
    total = sum(len(y) for batches in parts.values() for _, y in batches)
    done = 0
    for part, batches in parts.items():
        for x, y in batches:
            for start in range(0, len(y), BLOCK):
                some = slice(start, start + BLOCK)
                done += len(y[some])
                rows = x[some].reshape(len(y[some]), -1).astype(np.float32) / np.float32(255)
                yield Block(part, rows, y[some].astype(np.int64), done / total)


def images(path: Path) -> Bytes:
    return idx(path, 3, "images of two axes")


def labels(path: Path, classes: int) -> Bytes:
    values = idx(path, 1, "labels")
    if values.max(initial=0) >= classes:
        raise DataError(f"{path}, row {int(values.argmax())}: label {values.max()}; 0 to {classes - 1} are expected")
    return values


def idx(path: Path, axes: int, what: str) -> Bytes:
    """An array of bytes: two zeros, the type 8, the number of axes, their lengths as big-endian int32, the entries."""
    raw = _unzipped(path)
    if raw[:4] != bytes([0, 0, 8, axes]):
        raise DataError(f"{path} begins with {raw[:4]!r}; an idx file of {what} is expected")
    shape = np.frombuffer(raw[: 4 + 4 * axes].ljust(4 + 4 * axes, b"\0"), ">i4", axes, offset=4).tolist()
    entries, size = len(raw) - 4 - 4 * axes, math.prod(shape[1:])
    if entries != shape[0] * size or not shape[0]:
        raise DataError(f"{path} ends in row {max(0, entries) // max(1, size):,}; it announces {shape[0]:,} rows")
    values: Bytes = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)
    return values


def _unzipped(path: Path) -> bytes:
    raw = path.read_bytes()
    try:
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is cut off or damaged ({error})") from None
