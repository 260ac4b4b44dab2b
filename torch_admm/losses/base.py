"""What every loss offers: values, the proximal step of the output layer, labels in and predictions out.

Convention (declared in `steps.py`): penalties carry no 1/2 and losses are summed over rows, so

    prox(v, y, beta) = argmin_z  loss(z, y) + beta ||z - v||^2      (row by row)
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor

__all__ = ["AbstractLoss", "Prox"]

Prox = Callable[[Tensor, Tensor], Tensor]  # of v and y, for one beta


class AbstractLoss(abc.ABC):
    """A loss on the output z of the last layer, z of shape (rows, outputs).

    `y` in `__call__`, `prox` and `score` is always what `encode` returned, or a slice of its rows.

    `__call__` and `prox` are the hot path. They never wait for the device (no `.item()`, no branch on a
    tensor's values; iteration counts depend on settings and dtype only), never write to their arguments,
    and let NaN pass through. `encode` and `score` may wait.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]  # is prox a closed form, or an iteration with a tested bound?
    metric: ClassVar[str]  # what `score` measures; larger is better

    @abc.abstractmethod
    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss of each row, shape (rows,)."""

    @abc.abstractmethod
    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """argmin_z loss(z, y) + beta ||z - v||^2, in the shape, dtype and device of v."""

    def prepared(self, beta: float, like: Tensor) -> Prox:
        """`prox` for this beta and for v of this dtype and device, with what it needs besides made once and for all."""
        return partial(self.prox, beta=beta)

    @abc.abstractmethod
    def encode(self, y: Tensor, outputs: int, like: Tensor) -> Tensor:
        """Check the user's targets and bring them into the form the other methods take.

        `like` gives the dtype and device of z. The result has one entry or line per row, so that it can be
        cut into chunks of rows. Raises a ValueError naming `y`, what came and what is expected.
        """

    @abc.abstractmethod
    def predict(self, z: Tensor) -> Tensor:
        """What a user wants from outputs z: class indices of shape (rows,), or z itself for a regression."""

    @abc.abstractmethod
    def score(self, z: Tensor, y: Tensor) -> float:
        """The metric over all rows (accuracy, r2); larger is better."""
