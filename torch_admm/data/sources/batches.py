"""CIFAR's python batches, which are pickles, read without running anything that they name.

A pickle may name any function of Python and have it called. Here it may name the few that stand for an array of bytes,
and gets stand-ins for them which only keep what they are given; the array is then made from the raw bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError

__all__ = ["Batch", "load_batch"]

ROW = 3 * 32 * 32


class Batch(NamedTuple):
    """Images (rows, 3072), and their labels."""

    x: NDArray[np.uint8]
    y: NDArray[np.uint8]


def load_batch(data: bytes, name: str) -> Batch:
    """The images and labels of one batch; a DataError names the file."""
    try:
        content = _Reader(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # damage shows as any of a dozen exceptions
        raise DataError(f"{name} is not a CIFAR batch, or damaged ({type(error).__name__}: {error})") from None
    found = {_text(k): v for k, v in content.items()} if isinstance(content, dict) else {}
    raw, labels = getattr(found.get("data"), "raw", None), found.get("labels")
    if not isinstance(raw, bytes) or not isinstance(labels, list) or len(raw) != ROW * len(labels) or not labels:
        raise DataError(f"{name} does not hold as many labels as images of {ROW} bytes")
    if bad := [i for i, label in enumerate(labels) if not isinstance(label, int) or not 0 <= label < 256]:
        raise DataError(f"{name}, row {bad[0]}: label {labels[bad[0]]!r} is no class")
    return Batch(np.frombuffer(raw, np.uint8).reshape(-1, ROW), np.array(labels, np.uint8))


def _text(key: object) -> object:
    return key.decode("latin-1") if isinstance(key, bytes) else key


@final
class _Array:
    """Stands in for numpy.ndarray: keeps the bytes."""

    raw: bytes | None = None

    def __setstate__(self, state: Any) -> None:
        kind, raw = state[2], state[4]
        if getattr(kind, "code", None) in ("u1", b"u1") and isinstance(raw, bytes):
            self.raw = raw


@final
class _Type:
    """Stands in for numpy.dtype: keeps the code."""

    def __init__(self, code: Any, *rest: Any) -> None:
        """`rest` says how to align and copy, which bytes do not need."""
        self.code = code

    def __setstate__(self, state: Any) -> None:
        """Byte order, which bytes do not have."""


def _array(*kind: Any) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    return text.encode("latin-1")


STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,  # how Python 3 writes bytes for Python 2
}


@final
class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return STAND_INS.get((module, name)) or self.refuse(module, name)

    def refuse(self, module: str, name: str) -> NoReturn:
        raise DataError(f"it names {module}.{name}, which no batch needs")
