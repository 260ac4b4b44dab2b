"""Several tensors in one vector: what concerns all takes one call, and a small step is little else than calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import final

from torch import Tensor

from .gram import laid_out

__all__ = ["Block"]

ALIGNMENT = 64  # bytes: products may round by where what they read or write starts


@final
class Block:
    """Where tensors of these shapes lie in a vector, laid out as products like them."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        """`like` gives shapes and dtype."""
        self.shapes = [t.shape for t in like]
        unit = ALIGNMENT // like[0].element_size()
        self.starts = [0, *accumulate(-(-t.numel() // unit) * unit for t in like)]
        self.size = self.starts[-1]

    def cut(self, vector: Tensor) -> list[Tensor]:
        """The tensors in such a vector."""
        pairs = zip(self.starts, self.shapes, strict=False)
        return [laid_out(vector.narrow(0, start, shape.numel()), shape) for start, shape in pairs]

    def cut_lines(self, lines: Tensor) -> list[Tensor]:
        """The same in several such vectors, with one more dimension in front."""
        first = self.cut(lines.new_empty(self.size))
        shapes = [((len(lines), *t.shape), (lines.stride(0), *t.stride())) for t in first]
        return [lines.as_strided(*shape, start) for shape, start in zip(shapes, self.starts, strict=False)]
