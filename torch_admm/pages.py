"""Room for the state of many rows, in pages that a sweep over all of it does not have to look up one by one."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

__all__ = ["room"]

LARGE = 1 << 25  # bytes from which on it is worth asking for large pages


def room(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.empty`. Ranks that go through gigabytes at once wait for each other's look-ups, with small pages."""
    size = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and size >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype).view(*shape)
    return torch.empty(shape, dtype=dtype, device=device)
