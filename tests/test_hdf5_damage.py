"""Damaged files: whatever byte is wrong or missing, the very same rows or an error that names the file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from torch import nn

import torch_admm
from tests.files import writer
from torch_admm.cli import main
from torch_admm.data import hdf5, rows_of
from torch_admm.data.layout import FLETCHER_BYTES, VERSION, layout_of
from torch_admm.errors import DataError

FLIPS = 60  # of every class of bytes, and as many of every kind of larger damage: some 1,400
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((300, 3)).astype(np.float32), RANDOM.integers(0, 3, 300)

# Structures of HDF5 by their signatures: what they are for, and so where damage could mislead
STRUCTURES = {
    b"\x89HDF": "superblock",
    b"OHDR": "object header",
    b"OCHK": "object header, continued",
    b"EAHD": "chunk index: header",
    b"EAIB": "chunk index: index block",
    b"EADB": "chunk index: data block",
    b"FRHP": "attributes: heap header",
    b"FHDB": "attributes: heap block",
    b"BTHD": "attributes: tree header",
    b"BTLF": "attributes: tree leaf",
    b"FSHD": "free space: header",
    b"FSSE": "free space: sections",
}


def written(path: Path, **options: Any) -> Path:
    with writer(path, classes=list("abc"), attributes={"seed": 3, "text": "a b"}, **options) as out:
        out.write(X, Y)
    return path


def content(path: Path) -> tuple[Any, ...]:
    """All that can be had from a file."""
    x, y = hdf5.read(path)
    about = hdf5.describe(path)
    numbers = about.mean.tobytes(), about.scale.tobytes(), x.tobytes(), y.tobytes()
    texts = about.classes, about.counts, about.dtype, about.source, dict(about.attributes)
    return about.rows, about.features, *texts, *numbers


def classes_of(path: Path) -> dict[str, list[int]]:
    """Every byte of the file by what it belongs to."""
    data, layout = path.read_bytes(), layout_of(path)
    name = np.full(len(data), "", object)
    for found in re.finditer(b"|".join(map(re.escape, STRUCTURES)), data):
        name[found.start() :] = STRUCTURES[found.group()]  # as far as the next one
    with h5py.File(path) as file:
        start = file["checksums"].id.get_offset()
        name[start : start + file["checksums"].nbytes] = "checksums"
    for column in (layout.x, layout.y):
        for start in column.offsets:
            end = start + column.chunk_bytes
            name[start:end], name[end : end + FLETCHER_BYTES] = f"chunks of {column.name}", "fletcher32"
    leaf = np.flatnonzero(name == "attributes: tree leaf")
    name[leaf[0] + len(data[leaf[0] : leaf[-1] + 1].rstrip(b"\0")) : leaf[-1] + 1] = "unused space"
    return {str(kind): np.flatnonzero(name == kind).tolist() for kind in set(name)}


# What is not looked at: beside fletcher32 there is a checksum of our own, and free space is for those who write
HARMLESS = {"fletcher32", "free space: header", "free space: sections", "unused space"}
KINDS = sorted({*STRUCTURES.values(), "checksums", "chunks of x", "chunks of y"} | HARMLESS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("whole") / "whole.h5")


def noticed(damaged: Path, data: bytes, expected: tuple[Any, ...]) -> bool:
    """If not, nothing may have changed."""
    damaged.write_bytes(data)
    try:
        came = content(damaged)
    except DataError as error:
        if str(damaged) not in str(error):
            raise
        return True
    assert came == expected
    return False


def test_every_byte_has_a_class(whole: Path) -> None:
    classes = classes_of(whole)
    assert set(classes) == set(KINDS)
    assert sum(map(len, classes.values())) == whole.stat().st_size


@pytest.mark.parametrize("kind", KINDS)
def test_flips(whole: Path, tmp_path: Path, kind: str) -> None:
    """Single bits and whole bytes."""
    data, expected = whole.read_bytes(), content(whole)
    random, places = np.random.default_rng(len(kind)), classes_of(whole)[kind]
    for number in range(FLIPS):
        damaged = bytearray(data)
        damaged[random.choice(places)] ^= 1 << random.integers(8) if number % 2 else random.integers(1, 256)
        assert noticed(tmp_path / "damaged.h5", bytes(damaged), expected) == (kind not in HARMLESS)


DAMAGES: dict[str, Callable[[bytes, int, np.random.Generator], bytes]] = {
    "cut": lambda data, at, random: data[:at],
    "zeros": lambda data, at, random: data[:at] + bytes(len(data) - at),  # what a power cut may leave
    "a run of noise": lambda data, at, random: data[:at] + random.bytes(50) + data[at + 50 :],
    "bytes lost": lambda data, at, random: data[:at] + data[at + 1 + int(random.integers(40)) :],
    "bytes too many": lambda data, at, random: data[:at] + random.bytes(1 + int(random.integers(40))) + data[at:],
    "another place's bytes": lambda data, at, random: data[:at] + data[200:264] + data[at + 64 :],
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_larger_damage_at_any_place(whole: Path, tmp_path: Path, kind: str) -> None:
    data, expected = whole.read_bytes(), content(whole)
    random = np.random.default_rng(len(kind))
    for at in random.integers(0, len(data), FLIPS):
        found = noticed(tmp_path / "damaged.h5", DAMAGES[kind](data, int(at), random), expected)
        assert found or kind != "cut"


def test_chunks_that_changed_places(whole: Path, tmp_path: Path) -> None:
    """Each is whole, with its fletcher32, so that HDF5 has nothing to object to."""
    data, column = bytearray(whole.read_bytes()), layout_of(whole).x
    (first, second), size = column.offsets[:2], column.chunk_bytes + FLETCHER_BYTES
    data[first : first + size], data[second : second + size] = data[second : second + size], data[first : first + size]
    swapped = tmp_path / "swapped.h5"
    swapped.write_bytes(data)
    with h5py.File(swapped) as file:
        np.testing.assert_array_equal(file["x"][:32], X[32:64])
    with pytest.raises(DataError, match=r"swapped.h5: rows 0 to 31 are damaged: their checksum does not match"):
        hdf5.read(swapped)


# --- files that HDF5 finds nothing wrong with


def change(path: Path, name: str, value: Any) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs[name] = value


def replace(path: Path, name: str, value: Any) -> None:
    with h5py.File(path, "r+") as file:
        del file[name]
        if value is not None:
            file[name] = value


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another program's": (lambda p: change(p, "format", "rows"), "HDF5, but not rows of torch_admm; torch_admm.data"),
    "a later version": (
        lambda p: change(p, "version", VERSION + 1),
        f"version {VERSION + 1} of the format; this torch",
    ),
    "another source": (lambda p: change(p, "source", "me"), "the header is damaged: its digest does not match"),
    "other rows": (lambda p: change(p, "rows", 299), "the header is damaged"),
    "other classes": (lambda p: change(p, "classes", '["c", "b", "a"]'), "the header is damaged"),
    "no x": (lambda p: replace(p, "x", None), "there is no data set x"),
    "no checksums": (lambda p: replace(p, "checksums", None), "there is no data set checksums"),
    "another x": (lambda p: replace(p, "x", X), "x is not laid out as the header says"),
    "y as floats": (lambda p: replace(p, "y", Y.astype(np.float32)), "y is not laid out as the header says"),
    "a link": (lambda p: replace(p, "x", h5py.SoftLink("/y")), "there is no data set x"),
    "a link elsewhere": (lambda p: replace(p, "x", h5py.ExternalLink("other.h5", "/x")), "there is no data set x"),
    "no HDF5": (lambda p: p.write_text("x,y\n1,2\n", encoding="utf-8"), "not a whole HDF5 file"),
    "nothing": (lambda p: p.write_bytes(b""), "not a whole HDF5 file"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_files_by_others(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "rows.h5")
    alter, message = CHANGES[name]
    alter(path)
    with pytest.raises(DataError, match=f"rows.h5: {message}"):
        hdf5.read(path)


# --- as the user meets it


def test_a_file_that_is_cut_while_it_is_in_use(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.h5")
    rows = rows_of(path, torch_admm.from_module(nn.Linear(3, 3), "cross_entropy"))
    end = layout_of(path).x.offsets[5]
    path.write_bytes(path.read_bytes()[:end])
    for read in (rows.chunks(10), rows.batches(10, 0, 0)):
        with pytest.raises(DataError, match=rf"rows.h5: rows \d+ to \d+ are damaged: the file ends after {end} bytes"):
            list(read)


def test_training_on_a_damaged_file_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "rows.h5")
    data = bytearray(path.read_bytes())
    data[layout_of(path).x.offsets[3]] ^= 1
    path.write_bytes(data)
    saved = tmp_path / "model.pt"
    assert main(["train", "--data", str(path), "--net", "4", "--epochs", "1", "--save", str(saved)]) == 2
    error = capsys.readouterr().err
    assert "rows.h5: rows 96 to 127 are damaged: their checksum does not match" in error
    assert "Traceback" not in error
    assert not saved.exists()
