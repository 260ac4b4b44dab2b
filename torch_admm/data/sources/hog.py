"""The paper's features of house numbers, and a process that makes them.

    hog(gray, orientations=8, pixels_per_cell=(6, 6), cells_per_block=(3, 3)) of each 32 x 32 crop: 648 numbers

Run by its path, this file takes crops from stdin and gives features to stdout until stdin ends, so it ends with its
parent, however that ends. It imports nothing of the package: a worker without torch is there in a third of the time.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules are not to be found by their bare names

import os
import signal
from typing import IO

import numpy as np
from numpy.typing import NDArray

__all__ = ["CROP", "FEATURES", "features", "from_worker", "to_worker"]

CROP = (32, 32, 3)
FEATURES = 648
CROP_BYTES, ROW_BYTES = 32 * 32 * 3, 4 * FEATURES


def features(crops: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Of crops (n, 32, 32, 3) the features (n, 648)."""
    from skimage.color import rgb2gray
    from skimage.feature import hog

    crops = stored(crops).transpose(0, 3, 2, 1)  # rounding depends on the order in memory, so there must be but one
    options = {"orientations": 8, "pixels_per_cell": (6, 6), "cells_per_block": (3, 3)}
    return np.stack([hog(image, **options) for image in rgb2gray(crops)]).astype(np.float32)


def stored(crops: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(n, 3, 32, 32), colour by colour and column by column: the order of the bytes in a .mat file."""
    return np.ascontiguousarray(crops.transpose(0, 3, 2, 1))


def to_worker(stdin: IO[bytes], crops: NDArray[np.uint8]) -> None:
    stdin.write(len(crops).to_bytes(4, "little"))
    stdin.write(stored(crops).tobytes())
    stdin.flush()


def from_worker(stdout: IO[bytes], count: int) -> NDArray[np.float32] | None:
    """None if it ended before it answered."""
    answer = stdout.read(count * ROW_BYTES)
    if len(answer) < count * ROW_BYTES:
        return None
    return np.frombuffer(answer, np.float32).reshape(count, FEATURES)


def serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    features(np.zeros((1, *CROP), np.uint8))  # all imports, while the parent reads its first file
    while head := stdin.read(4):
        count = int.from_bytes(head, "little")
        data = stdin.read(count * CROP_BYTES)
        if len(data) < count * CROP_BYTES:
            return  # the parent is gone
        planes = np.frombuffer(data, np.uint8).reshape(count, *CROP[::-1])
        stdout.write(features(planes.transpose(0, 3, 2, 1)).tobytes())
        stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to deal with
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:  # the parent is gone
        os._exit(1)  # at once: what is left in the buffers has no reader
