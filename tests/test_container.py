"""Files of tensors and plain values: what was written comes back, every flipped bit is noticed, no file does harm."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_admm import container
from torch_admm.errors import CheckpointError

from .helpers import rng, same

CONTENT: dict[Any, Any] = {
    **{"none": None, "flag": True, "number": -3, "large": 2**70, "half": 0.1, "text": "größe", "empty": {}},
    "floats": [float("inf"), -float("inf"), 1e-320],
    "betas": (0.9, (0.999, "x")),
    7: {1: torch.arange(6.0).view(2, 3), "scalar": torch.tensor(2.5, dtype=torch.float64)},
    "odd": [torch.arange(5, dtype=torch.uint8), torch.zeros(0, 4), torch.randn(3, 3, generator=rng(0)).T],
    "kinds": {name: torch.ones(3).to(dtype) for name, dtype in container.DTYPES.items()},
}


def test_gives_back_what_was_written(tmp_path: Path) -> None:
    container.write(tmp_path / "file", CONTENT)
    assert same(container.read(tmp_path / "file"), CONTENT)
    container.write(tmp_path / "nan", [float("nan")])
    assert math.isnan(*container.read(tmp_path / "nan"))


def test_notices_every_flipped_bit_and_every_cut(tmp_path: Path) -> None:
    path = tmp_path / "file"
    container.write(path, {"W": torch.arange(20.0), "sweep": 3})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            container.read(path)
        path.write_bytes(whole[:place])
        with pytest.raises(CheckpointError, match="damaged"):
            container.read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="its checksum does not match"):
        container.read(path)


@pytest.mark.parametrize(
    ("version", "header", "match"),
    [
        (2, b"1", "version 2 of the format; this torch_admm reads version 1"),
        (1, b"{", "its checksum is right, but its content is not that of a checkpoint"),
        (1, b'{"code": []}', "its content is not that of a checkpoint"),
        (1, b'{"tensor": ["float32", [1000000], 0]}', "its content is not that of a checkpoint"),
        (1, b'{"tensor": ["object", [1], 0]}', "its content is not that of a checkpoint"),
        (1, b"[" * 100_000, "its content is not that of a checkpoint"),
        (1, b'{"float": "1"}', "its content is not that of a checkpoint"),
        (1, b'{"dict": [[{"dict": []}, 1]]}', "its content is not that of a checkpoint"),
        (1, b'{"tensor": ["float32", [1], -64]}', "a tensor is where none can be"),
        (1, b'{"tensor": ["float32", [1], 0.0]}', "a tensor is where none can be"),
        (1, b'{"tensor": ["float32", [1], 4]}', "a tensor is where none can be"),
        (1, b'{"tensor": ["float32", [8], 0]}', "a tensor is where none can be"),  # reaches into the checksum
        (1, b'{"tensor": ["float32", [-1], 0]}', "a tensor has a shape that none can have"),
        (1, b'{"tensor": ["float32", 3, 0]}', "a tensor has a shape that none can have"),
        (1, b'{"tensor": ["float32", [1.0], 0]}', "a tensor has a shape that none can have"),
        (1, b'{"tensor": ["float32", [true], 0]}', "a tensor has a shape that none can have"),
        (1, b'{"tensor": ["float32", [%s], 0]}' % b",".join([b"1"] * 65), "a tensor has a shape that none can have"),
        (1, b'{"tensor": ["float32", [1%s], 0]}' % (b"0" * 4000), "a tensor is larger than the file"),
        (1, b'{"tensor": ["float32", [0, 1%s], 0]}' % (b"0" * 30), "its content is not that of a checkpoint"),
    ],
)
def test_refuses_a_made_up_file(version: int, header: bytes, match: str, tmp_path: Path) -> None:
    raw = container.MAGIC + version.to_bytes(4, "little") + len(header).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "file").write_bytes(raw + hashlib.sha256(raw).digest())
    with pytest.raises(CheckpointError, match=match):
        container.read(tmp_path / "file")


@pytest.mark.parametrize(
    ("header", "size", "match"),
    [
        (
            b'[{"tensor": ["uint8", [4096], 0]}, {"tensor": ["uint8", [4096], 0]}]',
            4096,
            "a tensor is where none can be",
        ),
        (b'[{"tensor": ["uint8", [64], 64]}, {"tensor": ["uint8", [64], 0]}]', 128, "a tensor is where none can be"),
        (b'[{"tensor": ["uint8", [64], 0]}, {"tensor": ["uint8", [64], 128]}]', 192, "a tensor is where none can be"),
        (b'[{"tensor": ["uint8", [0], 64]}]', 64, "a tensor is where none can be"),
        (b'[{"tensor": ["uint8", [64], 0]}]', 65, "there is more in the file than its tensors"),
        (b"1", 0, "there is more in the file than its tensors"),
    ],
)
def test_tensors_lie_one_after_the_other_to_the_end(header: bytes, size: int, match: str, tmp_path: Path) -> None:
    """Many that are all of the file would take as many times the memory as soon as they are copied."""
    raw = container.MAGIC + (1).to_bytes(4, "little") + len(header).to_bytes(8, "little") + header
    raw += bytes(-len(raw) % container.ALIGNMENT + size) or b"\0"
    (tmp_path / "file").write_bytes(raw + hashlib.sha256(raw).digest())
    with pytest.raises(CheckpointError, match=match):
        container.read(tmp_path / "file")


def test_refuses_what_is_not_plain(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tensors and plain values, not Random"):
        container.write(tmp_path / "file", {"state": __import__("random").Random()})
    with pytest.raises(CheckpointError, match="nothing: No such file"):
        container.read(tmp_path / "nothing")
    container.write(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match="file: cannot be written: File exists"):
        container.write(tmp_path / "file", 2)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "file: damaged, it is empty"),
        (b"PK\3\4" + bytes(100), "file: not a checkpoint of torch_admm, or its beginning is damaged"),
        (container.MAGIC, "file: damaged, its end is missing"),
        (container.MAGIC + bytes([1, 0, 0, 0]) + b"\xff" * 8 + bytes(99), "file: damaged, its end is missing"),
    ],
)
def test_says_what_else_a_file_is(raw: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(raw)
    with pytest.raises(CheckpointError, match=match):
        container.read(tmp_path / "file")


def test_a_large_file_of_something_else_takes_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 42)  # more than there is; a disk has holes, memory has not
    with pytest.raises(CheckpointError, match="not a checkpoint of torch_admm"):
        container.read(tmp_path / "file")


def test_a_file_larger_than_memory_is_named(tmp_path: Path) -> None:
    header = container.MAGIC + (1).to_bytes(4, "little") + (4).to_bytes(8, "little") + b"null"
    with (tmp_path / "file").open("wb") as file:
        file.write(header)
        file.truncate(1 << 42)
    limited = "import resource, pathlib, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))\n"
    limited += "from torch_admm import container; container.read(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", limited, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "file: there is not enough memory to read it" in done.stderr


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(CheckpointError, match="damaged, it is not a regular file"):
            container.read(tmp_path / name)
