"""A file of tensors and plain values, checksummed, and without pickle: reading it runs no code.

    MAGIC, version (4 bytes), length of the header (8 bytes), header: JSON, tensors: raw bytes, SHA-256 of all before

Numbers are little-endian. Each tensor starts at a multiple of ALIGNMENT bytes. The header has the content as a tree in
which dicts are {"dict": [[key, value], ...]} (keys may be numbers), tuples {"tuple": [...]}, floats that JSON lacks
{"float": "nan"}, and tensors {"tensor": [dtype, shape, place]}. Whatever a later version changes, it starts with MAGIC
and its version, and ends with the checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from .errors import CheckpointError

__all__ = ["VersionError", "read", "write"]

MAGIC, VERSION, ALIGNMENT = b"\x89torch_admm\r\n\x1a\n\0", 1, 64
START, DIGEST = len(MAGIC) + 12, 32  # bytes before the header, and after everything
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
FLOATS = {str(value): value for value in (math.nan, math.inf, -math.inf)}
MOST_DIMS = 64  # of a tensor of torch


@final
class VersionError(CheckpointError):
    """A file that is whole, and that another torch_admm may be able to read."""


def write(path: Path, content: Any) -> None:
    """Write a new file, and see it on the disk before going on; the caller gives it its name when it is whole."""
    assert sys.byteorder == "little", "the file format is little-endian"
    tensors: list[Tensor] = []
    header = json.dumps(_encoded(content, tensors), allow_nan=False).encode()
    digest = hashlib.sha256()
    try:
        with path.open("xb") as file:
            for part in _parts(header, tensors):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error


def read(path: Path) -> Any:
    """The content, if it is as it was written; else a CheckpointError names the file and what is wrong."""
    try:
        raw = _all_of(path)
        if hashlib.sha256(memoryview(raw)[:-DIGEST]).digest() != raw[-DIGEST:]:
            raise CheckpointError(f"{path}: damaged, its checksum does not match")
        version, end = _version_and_end(raw)
        if version != VERSION:
            said = f"version {version} of the format; this torch_admm reads version {VERSION}"
            raise VersionError(f"{path}: {said}")
        return _content(path, raw, end)
    except MemoryError as error:
        raise CheckpointError(f"{path}: there is not enough memory to read it") from error


def _content(path: Path, raw: bytearray, end: int) -> Any:
    try:
        tensors = _Tensors(raw, _aligned(end), end)
        content = _decoded(json.loads(raw[START:end].decode()), tensors)
        tensors.check_end()
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError, OverflowError) as error:
        said = f"its checksum is right, but its content is not that of a checkpoint: {error}"
        raise CheckpointError(f"{path}: {said}") from error
    return content


def _all_of(path: Path) -> bytearray:
    """Read once, into the memory in which tensors then stay: the state of many rows may be most of what there is."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe is to wait for its writer
            raise CheckpointError(f"{path}: damaged, it is not a regular file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(START)
            _check_start(path, start, size)  # before memory is taken for a file that is something else
            raw = bytearray(size)
            raw[:START] = start
            count = START + file.readinto(memoryview(raw)[START:])
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return raw if count == len(raw) else raw[:count]


def _check_start(path: Path, start: bytes, size: int) -> None:
    if not size:
        raise CheckpointError(f"{path}: damaged, it is empty")
    if not start.startswith(MAGIC):
        raise CheckpointError(f"{path}: not a checkpoint of torch_admm, or its beginning is damaged")
    version, end = _version_and_end(start)
    if len(start) < START or size < (end if version == VERSION else START) + DIGEST:
        raise CheckpointError(f"{path}: damaged, its end is missing")


def _version_and_end(start: bytes | bytearray) -> tuple[int, int]:
    """The version, and where the header ends."""
    middle = len(MAGIC) + 4
    version, length = start[len(MAGIC) : middle], start[middle:START]
    return int.from_bytes(version, "little"), START + int.from_bytes(length, "little")


def _parts(header: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield MAGIC + VERSION.to_bytes(4, "little") + len(header).to_bytes(8, "little") + header
    place = START + len(header)
    for tensor in tensors:
        yield bytes(_aligned(place) - place)
        raw = _bytes(tensor).numpy().data
        yield raw
        place = _aligned(place) + len(raw)


def _encoded(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        place = sum(_aligned(_size(t)) for t in tensors)
        tensors.append(value.detach())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), place]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(k, tensors), _encoded(v, tensors)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_encoded(v, tensors) for v in value]}
    if isinstance(value, list):
        return [_encoded(v, tensors) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint holds tensors and plain values, not {type(value).__name__}")


@final
@dataclass
class _Tensors:
    """Those of a file, one after the other: tensors that shared bytes could be far larger together than the file."""

    raw: bytearray
    start: int  # of the first
    end: int  # of all so far

    def next(self, name: str, shape: Any, place: Any) -> Tensor:
        dtype, room = DTYPES[name], len(self.raw) - DIGEST - self.start
        count, at = _count(shape, room), _aligned(self.end)
        size = count * dtype.itemsize
        if type(place) is not int or self.start + place != at or place + size > room:
            raise ValueError("a tensor is where none can be")
        self.end = at + size
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.raw, dtype=dtype, count=count, offset=at).view(shape)

    def check_end(self) -> None:
        if self.end != len(self.raw) - DIGEST:
            raise ValueError("there is more in the file than its tensors")


def _decoded(value: Any, tensors: _Tensors) -> Any:
    """In the order in which `_encoded` went."""
    if isinstance(value, list):
        return [_decoded(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    return KINDS[kind](inner, tensors)


def _dict(inner: Any, tensors: _Tensors) -> dict[Any, Any]:
    return {_decoded(k, tensors): _decoded(v, tensors) for k, v in inner}


def _tuple(inner: Any, tensors: _Tensors) -> tuple[Any, ...]:
    return tuple(_decoded(v, tensors) for v in inner)


def _float(inner: Any, tensors: _Tensors) -> float:
    return FLOATS[inner]


def _tensor(inner: Any, tensors: _Tensors) -> Tensor:
    name, shape, place = inner
    return tensors.next(name, shape, place)


def _count(shape: Any, room: int) -> int:
    """How many numbers a tensor has; only dimensions that could be are multiplied, as others may take minutes."""
    if not isinstance(shape, list) or len(shape) > MOST_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("a tensor has a shape that none can have")
    if 0 in shape:
        return 0
    if max(shape, default=1) > room:
        raise ValueError("a tensor is larger than the file")
    return math.prod(shape)


KINDS = {"dict": _dict, "tuple": _tuple, "float": _float, "tensor": _tensor}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT
