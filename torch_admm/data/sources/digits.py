"""Handwritten digits of 8 x 8 pixels, embedded in scikit-learn: no file, no network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from .base import AbstractSource, Block, Contents, Obtain, needs, option, register


@final
@register
@dataclass(frozen=True)
class Digits(AbstractSource):
    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = (
        "1,797 digits of 8 x 8 pixels in 10 classes, embedded in scikit-learn; a quarter is the test"
    )

    seed: int = option(0, "draws the test rows", type=int)

    def files(self, folder: Path, obtain: Obtain) -> tuple[Path, ...]:
        needs("sklearn.datasets")
        return ()

    def open(self, files: tuple[Path, ...]) -> Contents:
        images, labels = needs("sklearn.datasets").load_digits(return_X_y=True)
        pixels = (images / 16).astype(np.float32)
        return Contents(pixels.shape[1], tuple("0123456789"), self.blocks(pixels, labels))

    def blocks(self, pixels: NDArray[np.float32], labels: NDArray[Any]) -> Iterator[Block]:
        order = np.random.default_rng(self.seed).permutation(len(pixels))
        kept = len(order) * 3 // 4
        yield Block("train", pixels[order[:kept]], labels[order[:kept]], 0.75)
        yield Block("test", pixels[order[kept:]], labels[order[kept:]], 1.0)
