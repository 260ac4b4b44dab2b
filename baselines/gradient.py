"""What all gradient methods share: optimisers of torch as methods of `torch_admm.fit`, from the same start and data."""

from __future__ import annotations

import abc
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_admm import AbstractMethod, Problem, from_module, loss_of
from torch_admm.data import AbstractRows
from torch_admm.problem import Weights

from .arguments import switch

__all__ = ["AbstractGradientMethod", "Pair"]

Pair = tuple[Tensor, Tensor]

# torch loads its compiler when the first optimiser is built, more than a second that belongs on nobody's clock
torch.optim.SGD([torch.zeros(1)], lr=1.0)

FUSED_ON = ("cpu", "cuda")
LONGEST_MEMORY = 0.99  # what the average keeps of itself at most: it then looks back over about a hundred updates


class AbstractGradientMethod(AbstractMethod):
    """Trains a private copy of the model with a torch optimiser; `fit` writes its weights into the user's.

    With `average`, `weights()` gives an exponential average of the parameters in place of the last ones. After the
    k-th update it keeps min(0.99, (1 + k) / (10 + k)) of itself: a short memory while the weights still move far.
    With several ranks each has its own rows of a batch, and gradients are summed: all take the same steps. Where they
    are summed `by_pieces`, in a fixed order, any number of ranks gives the same bits.
    """

    optimiser: torch.optim.Optimizer

    def __init__(self, loss: Any, *, average: bool) -> None:
        """`average` trains the same and gives averaged weights."""
        self.loss = loss_of(loss)
        self.average = switch("average", average)

    def init(self, problem: Problem, rows: AbstractRows, *, batch_size: int | None, seed: int) -> None:
        """Start from the model's own weights."""
        self.model = copy.deepcopy(problem.model).requires_grad_(True)
        for p in self.model.parameters():  # summed gradients lie row by row, and fused steps take both to lie alike
            p.data = p.data.contiguous()
        self.problem = from_module(self.model, problem.loss)
        self.rows, self.seed, self.epoch, self.updates = rows, seed, 0, 0
        self.batch_size = batch_size
        self.optimiser = self.build()
        self.averaged = from_module(copy.deepcopy(self.model), self.loss) if self.average else self.problem

    @abc.abstractmethod
    def build(self) -> torch.optim.Optimizer:
        """The torch optimiser of `self.model`."""

    @property
    def by_pieces(self) -> bool:
        """Are gradients made for each piece of the rows by itself? A deterministic run does so shard by shard."""
        return self.comm.deterministic

    @property
    def can_fuse(self) -> bool:
        """Has torch its one-kernel step for these parameters? It is the fastest, and what a rival deserves."""
        return self.problem.device.type in FUSED_ON

    def batches(self, size: int) -> Iterator[Sequence[Pair]]:
        """What is here of every mini-batch of this epoch, piece by piece."""
        order = size, self.seed, self.epoch
        if not self.by_pieces:
            yield from ([pair] for pair in self.rows.batches(*order))
            return
        here, size = self.rows.split.here, self.comm.merged(self.rows)
        for (x, y), counts in zip(self.rows.batches(*order), self.rows.batch_counts(*order), strict=True):
            mine = [sum(counts[i : i + size]) for i in here[::size]]
            yield list(zip(x.split(mine), y.split(mine), strict=True))

    def mean_gradient(self, pieces: Sequence[Iterable[Pair]], dtype: torch.dtype) -> float:
        """The mean loss over the rows of all ranks, its gradient left in the parameters. It crosses as `dtype`."""
        order = self.comm.order(self.rows) if self.by_pieces else self.comm.open_order()
        sums = map(self._sums, pieces)
        *gradients, numbers = self.comm.totals_later(sums, dtype, order, like=self._no_sums()).wait()
        loss, count = numbers.tolist()
        torch._foreach_div_(gradients, count)
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            p.grad = gradient
        return float(loss / count)

    def _sums(self, chunks: Iterable[Pair]) -> list[Tensor]:
        """The gradient of the sum of losses, then that sum and the number of rows, of which there may be none."""
        parameters = list(self.model.parameters())
        *gradients, numbers = self._no_sums()
        for x, y in (pair for pair in chunks if len(pair[0])):
            loss = self.loss(self.model(self.comm.aligned(x)), y).sum()
            torch._foreach_add_(gradients, torch.autograd.grad(loss, parameters))
            numbers += torch.stack([loss.detach(), torch.full_like(loss, len(x))])
        return [*gradients, numbers]

    def _no_sums(self) -> list[Tensor]:
        numbers = torch.zeros(2, dtype=torch.float64, device=self.problem.device)
        return [*(torch.zeros_like(p) for p in self.model.parameters()), numbers]

    def updated(self) -> None:
        """To be called after each update of the parameters."""
        self.updates += 1
        if self.average:
            self._update_average()

    @torch.no_grad()
    def _update_average(self) -> None:
        """Not by torch's AveragedModel: it leaves out the start and waits for the device at every batch."""
        keep = min(LONGEST_MEMORY, (1 + self.updates) / (10 + self.updates))
        mean, last = self.averaged.model, self.model
        torch._foreach_lerp_(list(mean.parameters()), list(last.parameters()), 1 - keep)

    def weights(self) -> Weights:
        return self.averaged.read()

    def state_dict(self) -> dict[str, Any]:
        average = {"average": self.averaged.model.state_dict()} if self.average else {}
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "epoch": self.epoch,
            "updates": self.updates,
            **average,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.average and "average" not in state:
            raise ValueError(f"state has no 'average'; one of {type(self).__name__} with average=True is expected")
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(copy.deepcopy(state["optimiser"]))  # torch would go on writing into `state`
        self.epoch, self.updates = int(state["epoch"]), int(state["updates"])
        if self.average:
            self.averaged.model.load_state_dict(state["average"])
