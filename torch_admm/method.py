"""What a training method offers to `fit`, ADMM and baselines alike."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from .comm import AbstractComm, Solo
from .data import AbstractRows
from .losses import AbstractLoss
from .problem import Problem, Weights

__all__ = ["AbstractMethod"]


class AbstractMethod(abc.ABC):
    """Settings, and after `init` the running state of one training run.

    `fit` calls `init` once and then `step` again and again; after each step it takes `weights()` and writes them into
    the model itself. A method never evaluates the model and never reads the clock.

    With several ranks, `rows` are those of this one, and what is summed over rows is summed over ranks by `comm`; all
    ranks then compute the same weights. `rows.total` counts the rows of all.
    """

    loss: AbstractLoss
    comm: AbstractComm = Solo()  # the other ranks: `fit` sets it before `init`
    by_row: ClassVar[tuple[str, ...]] = ()  # entries of `state_dict` with one row a sample of this rank

    def is_little(self, problem: Problem, rows: AbstractRows, batch_size: int | None) -> bool:
        """Are its steps on these rows so short that they cost about as much in double precision? Then `fit` does that.

        Asked before `init`.
        """
        return False

    def part(self, problem: Problem, rows: AbstractRows, batch_size: int | None) -> AbstractRows:
        """The rows of this rank, of those of all. A method that wraps another asks that one."""
        return self.comm.part(rows)

    @abc.abstractmethod
    def init(self, problem: Problem, rows: AbstractRows, *, batch_size: int | None, seed: int) -> None:
        """Start afresh. Settings that do not fit the problem raise a ValueError here."""

    @abc.abstractmethod
    def step(self) -> None:
        """One sweep: every row is used once."""

    @abc.abstractmethod
    def weights(self) -> Weights:
        """The current weights."""

    def measures(self) -> dict[str, float]:
        """What only the method can measure (residuals), taken while the clock stands still."""
        return {}

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that `step` depends on, as tensors and plain numbers. Tensors are not copied, as in torch."""

    def check_state(self, state: dict[str, Any]) -> None:
        """A ValueError if `load_state_dict` could not take it up, as far as one rank can tell; nothing changes."""
        return

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, after `init` on the same problem and rows."""
