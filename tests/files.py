"""Small HDF5 files of rows, for the tests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_admm.data import hdf5

__all__ = ["CHUNK", "Array", "some", "threads", "writer", "written"]

Array = npt.NDArray[Any]
CHUNK = 12 * 32  # bytes: 32 rows of 3 float32 numbers


def some(count: int, seed: int = 0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    return random.standard_normal((count, 3)).astype(np.float32), random.integers(0, 4, count)


def writer(path: Path, **options: Any) -> hdf5.Writer:
    settings: dict[str, Any] = {"features": 3, "source": "test", "classes": list("abcd"), "chunk_bytes": CHUNK}
    return hdf5.Writer(path, **{**settings, **options})


def written(path: Path, count: int, **options: Any) -> Path:
    with writer(path, **options) as out:
        out.write(*some(count))
    return path


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torch_admm-rows")]
