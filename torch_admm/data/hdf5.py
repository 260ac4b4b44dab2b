"""HDF5 files of rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from .layout import Array, Description, Layout, describe, layout_of
from .reader import ahead
from .writer import Writer

__all__ = ["Description", "Writer", "describe", "read"]


def read(path: str | os.PathLike[str]) -> tuple[Array, Array]:
    """All rows in memory and checked: x as float32; y as int64 class numbers, or float32."""
    layout = layout_of(path)
    x, y = (np.empty((layout.chunks * layout.chunk_rows, *c.width), c.dtype) for c in (layout.x, layout.y))
    with opened(layout) as descriptor:

        def fetch(chunk: int) -> None:
            rows = slice(chunk * layout.chunk_rows, (chunk + 1) * layout.chunk_rows)
            layout.read(descriptor, layout.x, chunk, x[rows])
            layout.read(descriptor, layout.y, chunk, y[rows])

        for _ in ahead(fetch, range(layout.chunks)):
            pass
    count, target = layout.description.rows, np.float32 if layout.description.classes is None else np.int64
    return x[:count].astype(np.float32, copy=False), y[:count].astype(target, copy=False)


@contextmanager
def opened(layout: Layout) -> Iterator[int]:
    """A descriptor, for as long as reading goes on."""
    descriptor = os.open(layout.description.path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
