"""Gaussian numbers that depend on (seed, stream, row, column) only.

Counter-based, so the same rows get the same values whatever the chunk size, the number of processes or the device; a
`torch.Generator` gives none of the three. The mixing function is the public-domain finaliser of MurmurHash3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["gaussian"]

BITS = 24  # of the uniform numbers: what float32 holds


def gaussian(rows: slice, columns: int, seed: int, stream: int, like: Tensor) -> Tensor:
    """Standard normal values for `rows` x `columns`, in the dtype and device of `like` (Box-Muller)."""
    radius = _uniform(rows, columns, seed, 2 * stream, like)
    angle = _uniform(rows, columns, seed, 2 * stream + 1, like)
    radius = radius.log_().mul_(-2).sqrt_()
    return radius.mul_(angle.mul_(2 * math.pi).cos_())


def _uniform(rows: slice, columns: int, seed: int, stream: int, like: Tensor) -> Tensor:
    """Uniform in (0, 1]."""
    key = _mix_int(_mix_int(_mix_int(seed >> 32) ^ seed) ^ stream)
    row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=like.device)
    column = torch.arange(columns, dtype=torch.int32, device=like.device)
    row = _mix(_mix((row >> 32).to(torch.int32) ^ _signed(key)) ^ (row & 0xFFFFFFFF).to(torch.int32))
    bits = _mix(row.unsqueeze(1) ^ _mix(column ^ _signed(_mix_int(key))))
    bits = (bits >> (32 - BITS)) & ((1 << BITS) - 1)
    return (bits.to(like.dtype) + 1) / (1 << BITS)


def _mix(x: Tensor) -> Tensor:
    x = x ^ ((x >> 16) & 0xFFFF)  # int32 shifts bring in the sign; the mask takes it out again
    x = x * _signed(0x85EBCA6B)
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * _signed(0xC2B2AE35)
    return x ^ ((x >> 16) & 0xFFFF)


def _mix_int(x: int) -> int:
    x &= 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ x >> 16


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
