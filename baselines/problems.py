"""The problems of the comparison: which data, which net, which loss, which targets."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["PROBLEMS", "Data", "Task", "load", "network", "task"]

Pair = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True)
class Task:
    """A net of `widths` on data of this name, until a test accuracy; `seconds` of training do for most methods."""

    data: str
    widths: tuple[int, ...]
    loss: str
    targets: tuple[float, ...]
    seconds: float
    standardise: bool = False  # raw physical units: by mean and scale of the training rows, for all methods alike
    batch: int | Literal["any", "all"] = "any"  # rows of a batch, for all methods alike; "any" leaves it to each
    ratio: float | None = None  # AnchoredADMM ought to be so many times as fast as its best tuned rival
    methods: tuple[str, ...] = ("anchored", "bregman", "sgd", "adam", "lbfgs", "cg")  # that are compared

    @property
    def net(self) -> str:
        return "-".join(map(str, self.widths))

    @property
    def settled(self) -> tuple[str, ...]:
        """Settings that no method may choose here."""
        return {"any": (), "all": ("batch_size", "hold")}.get(str(self.batch), ("batch_size",))

    def batch_size(self, rows: int) -> int | None:
        """For `fit`, where there are so many rows."""
        return {"any": None, "all": rows}[self.batch] if isinstance(self.batch, str) else self.batch


@final
@dataclass(frozen=True)
class Data:
    """Training and test rows in memory, and a fingerprint of them."""

    train: Pair
    test: Pair

    @property
    def fingerprint(self) -> str:
        crc = 0
        for values in (*self.train, *self.test):
            crc = zlib.crc32(values.contiguous().numpy().data, crc)
        return f"{len(self.train[0])}+{len(self.test[0])}x{self.train[0].shape[1]}-{crc:08x}"


ANY_BATCH, FULL_BATCH = ("anchored", "sgd", "adam", "lbfgs", "cg"), ("anchored", "lbfgs", "cg")

PROBLEMS: dict[str, Task] = {
    "higgs": Task("higgs", (28, 300, 1), "logistic", (0.64, 0.70), 2.0, standardise=True, ratio=1.5),
    "svhn": Task("svhn", (648, 100, 50, 1), "logistic", (0.95, 0.97), 2.0, ratio=1.0),
    "mnist": Task("mnist", (784, 256, 10), "cross_entropy", (0.97,), 3.0, ratio=1.0, methods=ANY_BATCH),
    # what many processes would use
    "mnist-4096": Task(
        "mnist", (784, 256, 10), "cross_entropy", (0.97,), 4.0, batch=4096, ratio=2.0, methods=ANY_BATCH
    ),
    "higgs-full": Task(
        "higgs", (28, 300, 1), "logistic", (0.69,), 6.0, True, batch="all", ratio=2.0, methods=FULL_BATCH
    ),
    "fashion-mnist": Task("fashion-mnist", (784, 256, 10), "cross_entropy", (0.87,), 6.0),
    "digits": Task("digits", (64, 64, 10), "cross_entropy", (0.95,), 1.0),
}


def task(name: str) -> Task:
    if name not in PROBLEMS:
        raise ValueError(f"problem is {name!r}; one of {', '.join(PROBLEMS)} is expected")
    return PROBLEMS[name]


def network(widths: tuple[int, ...], seed: int) -> nn.Sequential:
    """ReLU between layers, torch's own initial weights, drawn by the seed."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def load(name: str, folder: Path | None) -> Data:
    """The data of a problem, from prepared files under `folder`; digits come with scikit-learn and need none."""
    wanted = task(name)
    if wanted.data in EMBEDDED:
        return EMBEDDED[wanted.data]()
    if folder is None:
        raise ValueError(
            f"{name} needs --data-dir, the folder of its prepared files: "
            f"python -m torch_admm data prepare {wanted.data} --data-dir DIR"
        )
    return _prepared(wanted, folder)


def _prepared(wanted: Task, folder: Path) -> Data:
    from torch_admm.data import hdf5
    from torch_admm.data.sources import prepared

    parts = prepared(wanted.data, folder)
    train, test = (_tensors(*hdf5.read(path)) for path in (parts.train, parts.test))
    if wanted.standardise:
        about = hdf5.describe(parts.train)
        mean, scale = (torch.as_tensor(np.asarray(v, np.float32)) for v in (about.mean, about.scale))
        for x, _ in (train, test):
            x.sub_(mean).div_(scale)
    return Data(train, test)


def _tensors(x: np.ndarray, y: np.ndarray) -> Pair:
    return torch.as_tensor(x), torch.as_tensor(y).long()


def _digits() -> Data:
    """1,797 images of 8 x 8 pixels, a quarter of them held out, always the same."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('digits need scikit-learn: pip install "torch-admm[compare]"') from error
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    parts = order[: len(order) * 3 // 4], order[len(order) * 3 // 4 :]
    x, y = torch.as_tensor((images / 16).astype(np.float32)), torch.as_tensor(labels).long()
    train, test = ((x[part], y[part]) for part in parts)
    return Data(train, test)


EMBEDDED: dict[str, Callable[[], Data]] = {"digits": _digits}
