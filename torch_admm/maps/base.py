"""What every linear map m = W a + b offers to the methods."""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch
from torch import Tensor

from ..gram import Gram

__all__ = ["AbstractLinearMap", "InputSolve"]

InputSolve = Callable[[Tensor, Tensor], Tensor]  # (h(z_l), z_{l+1}) -> a_l, which may overwrite h(z_l)


class AbstractLinearMap(abc.ABC):
    """A linear map whose weights live in the user's module.

    The methods keep the weights of a layer as one tensor [W, b] of shape (outputs, inputs + 1), or W alone without a
    bias; only `read` and `write` touch the module.
    """

    inputs: int
    outputs: int

    @abc.abstractmethod
    def read(self) -> Tensor:
        """A copy of the module's weights."""

    @abc.abstractmethod
    def write(self, W: Tensor) -> None:
        """Write the weights into the module, in place."""

    @abc.abstractmethod
    def forward(self, W: Tensor, a: Tensor, out: Tensor | None = None) -> Tensor:
        """m = W a + b, for rows a. `out` offers memory for the answer."""

    @abc.abstractmethod
    def gram(self, like: Tensor, products: torch.dtype = torch.float64, at_once: int | None = None) -> Gram:
        """An empty sum of [a, 1]'[a, 1]."""

    @abc.abstractmethod
    def cross(self, z: Tensor, a: Tensor, at_once: int | None = None) -> Tensor:
        """z'[a, 1], shaped like the weights; see `gram.product` for `at_once`."""

    def cross_into(self, z: Tensor, a: Tensor, out: Tensor) -> Tensor:
        """The same, written to `out`."""
        return out.copy_(self.cross(z, a))

    def cross_stacked(self, z: Tensor, a: Tensor, out: Tensor) -> None:
        """The same with one more dimension in front; a has its ones."""
        for R, z_i, a_i in zip(out.unbind(), z.unbind(), a.unbind(), strict=True):
            self.cross_into(z_i, a_i, R)

    @abc.abstractmethod
    def solve_input(self, W: Tensor, beta: float, gamma: float) -> InputSolve:
        """Factor argmin_a beta ||z - W a - b||^2 + gamma ||a - h||^2 once; apply it to any rows h, z."""

    @abc.abstractmethod
    def inner(self, extended: Tensor) -> Tensor:
        """The columns of rows [a, 1] that a has: all but the last, of ones, if there is a bias.

        `forward` and `cross` take such rows [a, 1] as well as a, and are faster on them.
        """

    def prefers_plain(self, rows: int) -> bool:
        """Are `forward` and `cross` faster on so many rows as they came than on rows that are first extended?"""
        return False

    @abc.abstractmethod
    def output_factor(self, W: Tensor, beta: float, gamma: float) -> Tensor:
        """beta (beta W W' + gamma I)^-1, which turns residuals of the outputs into a step of the inputs."""

    @abc.abstractmethod
    def pull_back(self, W: Tensor, r: Tensor, out: Tensor) -> Tensor:
        """r W, for rows r of the outputs, in `out`."""

    @abc.abstractmethod
    def pull_back_onto(self, W: Tensor, r: Tensor, m: Tensor, k: float) -> Tensor:
        """m + k r W, in place of m."""
