"""Images: idx files, CIFAR batches without unpickling, SVHN by HOG."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.io import savemat

from torch_admm.data import hdf5
from torch_admm.data.sources import Prepared, hog, images, prepare, svhn
from torch_admm.data.sources.batches import load_batch
from torch_admm.errors import DataError

RANDOM = np.random.default_rng(0)


# --- idx


def idx(values: NDArray[Any]) -> bytes:
    return struct.pack(f">HBB{values.ndim}i", 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


PIXELS = RANDOM.integers(0, 256, (30, 28, 28), dtype=np.uint8)
NUMBERS = np.arange(30) % 10
MNIST = {
    "train-images-idx3-ubyte": idx(PIXELS[:20]),
    "train-labels-idx1-ubyte": idx(NUMBERS[:20]),
    "t10k-images-idx3-ubyte": idx(PIXELS[20:]),
    "t10k-labels-idx1-ubyte": idx(NUMBERS[20:]),
}


def mnist(folder: Path, changed: dict[str, bytes] | None = None, zipped: bool = True) -> Prepared:
    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for name, data in {**MNIST, **(changed or {})}.items():
        path, content = (raw / f"{name}.gz", gzip.compress(data)) if zipped else (raw / name, data)
        path.write_bytes(content)
    return prepare(images.MNIST(), folder, offline=True)


@pytest.mark.parametrize("zipped", [True, False])
def test_mnist(tmp_path: Path, zipped: bool) -> None:
    done = mnist(tmp_path, zipped=zipped)
    for path, rows in zip(done.parts, (slice(20), slice(20, 30)), strict=True):
        x, y = hdf5.read(path)
        np.testing.assert_array_equal(x, PIXELS[rows].reshape(-1, 784) / np.float32(255))
        np.testing.assert_array_equal(y, NUMBERS[rows])


def test_fashion_mnist_has_a_folder_and_names_of_its_own(tmp_path: Path) -> None:
    mnist(tmp_path)
    (tmp_path / "MNIST").rename(tmp_path / "FashionMNIST")
    classes = prepare(images.FashionMNIST(), tmp_path, offline=True).train.classes
    assert classes is not None
    assert classes[9] == "Ankle boot"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("train-images-idx3-ubyte", idx(NUMBERS), r"images-idx3-ubyte.gz begins with b'.*'; an idx file of images"),
        ("train-images-idx3-ubyte", MNIST["train-images-idx3-ubyte"][:-900], r"ends in row 18; it announces 20 rows"),
        ("train-images-idx3-ubyte", MNIST["train-images-idx3-ubyte"][:9], r"ends in row 0; it announces 20 rows"),
        ("train-labels-idx1-ubyte", idx(NUMBERS[:7]), r"has 20 images, but there are 7 labels in the file beside it"),
        ("train-labels-idx1-ubyte", idx(np.arange(20)), r"labels-idx1-ubyte.gz, row 19: label 19; 0 to 9 are expected"),
        ("t10k-images-idx3-ubyte", idx(PIXELS[20:, :20]), r"has images of \(20, 28\); \(28, 28\) are expected, as in"),
        ("t10k-labels-idx1-ubyte", b"", r"t10k-labels-idx1-ubyte.gz begins with b''; an idx file of labels"),
    ],
)
def test_bad_idx_files(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        mnist(tmp_path, {name: data})
    assert not list(tmp_path.rglob("*.h5*"))


@pytest.mark.parametrize("cut", [5, 200, -9, -1])
def test_an_idx_file_whose_gzip_is_cut(tmp_path: Path, cut: int) -> None:
    mnist(tmp_path)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: the gzip file is cut off or damaged"):
        prepare(images.MNIST(), tmp_path, offline=True, force=True)


# --- CIFAR


COLOURS = RANDOM.integers(0, 256, (6, 4, 3072), dtype=np.uint8)


def batch(x: Any, labels: Any, protocol: int = 2) -> bytes:
    return pickle.dumps({b"data": x, b"labels": labels, b"batch_label": b"made up"}, protocol)


def python2_batch(x: NDArray[np.uint8], labels: list[int]) -> bytes:
    """As the published files are: texts and bytes of Python 2, numpy's old module names, dtype(align=0)."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    whole = b"J%s" % struct.pack("<i", len(x)) + b"M\x00\x0c\x86"
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    kind += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + whole + kind + b"\x89" + text(x.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}" + text(b"data") + array + b"s" + text(b"labels") + numbers + b"s."


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_batch_is_read_without_numpys_own_unpickling(protocol: int) -> None:
    x, y = load_batch(batch(COLOURS[0], [3, 0, 9, 1], protocol), "batch")
    np.testing.assert_array_equal(x, COLOURS[0])
    np.testing.assert_array_equal(y, [3, 0, 9, 1])


def test_a_batch_written_by_python_2() -> None:
    x, y = load_batch(python2_batch(COLOURS[0], [3, 0, 9, 1]), "batch")
    np.testing.assert_array_equal(x, COLOURS[0])
    np.testing.assert_array_equal(y, [3, 0, 9, 1])


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(Evil()), r"batch is not a CIFAR batch, or damaged \(DataError: it names \w+.mkdir, which no"),
        (batch(COLOURS[0], [1])[:-40], r"batch is not a CIFAR batch, or damaged"),
        (b"", r"batch is not a CIFAR batch, or damaged \(EOFError"),
        (batch(COLOURS[0], [1]), r"batch does not hold as many labels as images of 3072 bytes"),
        (batch(COLOURS[0].astype(np.int16), [1] * 4), r"batch does not hold as many labels as images"),
        (batch(COLOURS[0], [1, 2, -3, 4]), r"batch, row 2: label -3 is no class"),
        (pickle.dumps([1, 2]), r"batch does not hold"),
    ],
)
def test_bad_batches(data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        load_batch(data, "batch")
    assert not (tmp_path / "evil").exists()


def cifar(folder: Path, labels: list[int], leave_out: str = "") -> Path:
    """The archive, as it is published."""
    path = folder / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for i, name in enumerate(images.CIFAR_BATCHES):
            data = python2_batch(COLOURS[i], labels)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            if name != leave_out:
                archive.addfile(member, io.BytesIO(data))
    return path


def test_cifar10_from_the_archive_and_unpacked(tmp_path: Path) -> None:
    with tarfile.open(cifar(tmp_path, [0, 1, 2, 9])) as archive:
        archive.extractall(tmp_path / "b", filter="data")
    for folder in (tmp_path, tmp_path / "b"):
        done = prepare(images.CIFAR10(), folder, offline=True)
        np.testing.assert_array_equal(hdf5.read(done.parts.test)[0], COLOURS[5] / np.float32(255))
        assert done.train.rows == 20


def test_bad_archives(tmp_path: Path) -> None:
    path = cifar(tmp_path, [0, 1, 2, 10])
    with pytest.raises(DataError, match=r"data_batch_1, row 3: label 10; 0 to 9 are expected"):
        prepare(images.CIFAR10(), tmp_path, offline=True)
    path = cifar(tmp_path, [0, 1, 2, 9], "data_batch_3")
    with pytest.raises(DataError, match=r"cifar-10-python.tar.gz is cut off, damaged or another archive \(.*batch_3"):
        prepare(images.CIFAR10(), tmp_path, offline=True)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"cifar-10-python.tar.gz is cut off, damaged or another archive"):
        prepare(images.CIFAR10(), tmp_path, offline=True)
    assert not list(tmp_path.rglob("*.h5*"))


# --- SVHN


CROPS = RANDOM.integers(0, 256, (32, 32, 3, 24), dtype=np.uint8)
DIGITS = np.tile([10, 2, 7, 10, 1, 2], 4)


def mats(folder: Path, train: Any = None, test: Any = None) -> None:
    for name, content in (("train", train), ("test", test)):
        savemat(folder / f"{name}_32x32.mat", content or {"X": CROPS, "y": DIGITS[:, None].astype(np.uint8)})


@pytest.mark.parametrize("workers", [1, 2])
def test_svhn_features_are_those_of_scikit_image(tmp_path: Path, workers: int) -> None:
    from skimage.color import rgb2gray
    from skimage.feature import hog as reference

    mats(tmp_path)
    done = prepare(svhn.SVHN(workers=workers), tmp_path, offline=True)
    chosen = np.flatnonzero(np.isin(DIGITS, (10, 2)))
    options = {"orientations": 8, "pixels_per_cell": (6, 6), "cells_per_block": (3, 3)}
    x, y = hdf5.read(done.parts.train)
    np.testing.assert_array_equal(
        x, [reference(rgb2gray(np.asfortranarray(CROPS[..., i])), **options).astype(np.float32) for i in chosen]
    )
    np.testing.assert_array_equal(y, DIGITS[chosen] == 2)
    assert done.train.classes == ("0", "2")


def test_svhn_other_digits_the_extra_file_and_other_names(tmp_path: Path) -> None:
    mats(tmp_path)
    (tmp_path / "svhn").mkdir()
    (tmp_path / "train_32x32.mat").rename(tmp_path / "svhn/train_17_32x32.mat")
    (tmp_path / "test_32x32.mat").rename(tmp_path / "svhn/test_17_32x32.mat")
    savemat(tmp_path / "svhn/extra_32x32.mat", {"X": CROPS[..., :6], "y": DIGITS[:6]})
    done = prepare(svhn.SVHN(digits=(7, 1, 2), extra=True, workers=1), tmp_path, offline=True)
    np.testing.assert_array_equal(hdf5.read(done.parts.train)[1], [2, 0, 1, 2] * 5)
    assert done.test.rows == 16
    (tmp_path / "svhn/train_1_32x32.mat").touch()
    with pytest.raises(DataError, match=r"svhn has 2 files train_\*_32x32.mat; name one by --train"):
        prepare(svhn.SVHN(workers=1), tmp_path, offline=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": CROPS}, r"train_32x32.mat: X of 32 x 32 x 3 x n bytes and y are expected"),
        ({"X": CROPS[:16], "y": DIGITS}, r"X of 32 x 32 x 3 x n bytes and y are expected"),
        ({"X": CROPS.astype(float), "y": DIGITS}, r"X of 32 x 32 x 3 x n bytes and y are expected"),
        ({"X": CROPS, "y": DIGITS[:7]}, r"train_32x32.mat has 24 images but 7 labels"),
        ({"X": CROPS, "y": np.where(np.arange(24) == 5, 11, DIGITS)}, r"row 5: label 11; 1 to 10 are expected"),
        ({"X": CROPS, "y": np.ones(24)}, r"train_32x32.mat has no image of digit 0"),
    ],
)
def test_bad_mat_files(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    mats(tmp_path, train=content)
    with pytest.raises(DataError, match=message):
        prepare(svhn.SVHN(workers=1), tmp_path, offline=True)
    assert not list(tmp_path.rglob("*.h5*"))


@pytest.mark.parametrize("cut", [0, 100, 3000, -5])
def test_a_mat_file_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    savemat(tmp_path / "train_32x32.mat", {"y": DIGITS, "X": CROPS}, do_compression=True)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:cut])
    (tmp_path / "test_32x32.mat").write_bytes(path.read_bytes())
    with pytest.raises(DataError, match=r"train_32x32.mat is cut off, damaged or no .mat file|X of 32 x 32"):
        prepare(svhn.SVHN(workers=1), tmp_path, offline=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digits": (1, 1)}, r"--digits are 1 1; two or more different ones of 0 to 9 are expected"),
        ({"digits": (1,)}, r"--digits are 1; two or more"),
        ({"digits": (1, 10)}, r"--digits are 1 10; two or more"),
        ({"workers": 0}, r"--workers is 0; a whole number of at least 1"),
        ({"train": "nowhere.mat"}, r"nowhere.mat does not exist, or is no file"),
        ({}, r"svhn/train_32x32.mat does not exist; get http://\S+/train_32x32.mat and put it there"),
    ],
)
def test_bad_svhn_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(svhn.SVHN(**options), tmp_path, offline=True)


def test_a_worker_that_dies_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import sys; sys.stdin.buffer.read(4); sys.exit(3)", encoding="utf-8")
    monkeypatch.setattr(hog, "__file__", str(tmp_path / "dies.py"))
    with pytest.raises(DataError, match=r"svhn: a worker ended with code 3; --workers 1 works without any"):
        svhn.features_of(np.moveaxis(CROPS, 3, 0), 2)


def test_a_worker_ends_when_nobody_asks_any_more() -> None:
    process = subprocess.Popen([sys.executable, hog.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.communicate(b"", timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
