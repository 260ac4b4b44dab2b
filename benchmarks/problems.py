"""The real data of the benchmarks, from files that the user provides, as (features, labels) for training and testing.

Under the data folder:

- higgs/HIGGS_train_*.csv.gz, HIGGS_test_*.csv.gz: the UCI layout, label first, 28 features; standardised here;
- svhn/train_02_32x32.mat, test_02_32x32.mat: the SVHN layout, digits 0 (stored as 10) and 2. The features are the 648
  of the paper: HOG of the grey image with 8 orientations, 6 x 6 pixels a cell, 3 x 3 cells a block. Needs `images`;
- MNIST/raw/*.gz: the four idx files as published; pixels are divided by 255.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Data", "load"]

Part = tuple[Any, Any]
Data = tuple[Part, Part]


@cache
def load(name: str, folder: Path, cache_dir: Path | None = None) -> Data:
    """Training and test part of a problem; kept in `cache_dir` as npz when there is one, for HOG takes a while."""
    if cache_dir is None:
        return LOADERS[name](folder)
    kept = cache_dir / f"{name}.npz"
    if not kept.exists():
        (x, y), (test_x, test_y) = LOADERS[name](folder)
        cache_dir.mkdir(parents=True, exist_ok=True)
        np.savez(kept, x=x, y=y, test_x=test_x, test_y=test_y)
    with np.load(kept) as arrays:
        return (arrays["x"], arrays["y"]), (arrays["test_x"], arrays["test_y"])


def higgs(folder: Path) -> Data:
    train, test = (
        np.loadtxt(next((folder / "higgs").glob(f"HIGGS_{part}_*.csv.gz")), delimiter=",", dtype=np.float32)
        for part in ("train", "test")
    )
    mean, scale = train[:, 1:].mean(0), train[:, 1:].std(0)
    return tuple(((part[:, 1:] - mean) / scale, part[:, 0].astype(int)) for part in (train, test))  # type: ignore[return-value]


def svhn(folder: Path) -> Data:
    from scipy.io import loadmat
    from skimage.color import rgb2gray
    from skimage.feature import hog

    def part(name: str) -> Part:
        raw = loadmat(folder / "svhn" / f"{name}_02_32x32.mat")
        options = {"orientations": 8, "pixels_per_cell": (6, 6), "cells_per_block": (3, 3)}
        features = [hog(rgb2gray(image), **options) for image in np.moveaxis(raw["X"], 3, 0)]
        return np.stack(features).astype(np.float32), (raw["y"].ravel() == 2).astype(int)

    return part("train"), part("test")


def mnist(folder: Path) -> Data:
    def part(name: str) -> Part:
        images, labels = (
            idx(folder / "MNIST" / "raw" / f"{name}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1")
        )
        return images.reshape(len(images), -1).astype(np.float32) / 255, labels.astype(int)

    return part("train"), part("t10k")


def idx(path: Path) -> Any:
    """An array of bytes: two zeros, the type 8, the number of axes, their lengths as big-endian int32, the entries."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} begins with {raw[:3]!r}; an idx file of unsigned bytes is expected")
    axes = raw[3]
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(np.frombuffer(raw, ">i4", axes, offset=4))


LOADERS: dict[str, Callable[[Path], Data]] = {"higgs": higgs, "svhn": svhn, "mnist": mnist}
