"""What a network says before its first steps, and how it is made to say it: around zero, and loudly enough.

Fresh weights know nothing, so the mean of their outputs means nothing: it is taken out. After a step they know in
which direction, but whisper: all residuals are nearly equal, and hard rows count no more than easy ones. A factor that
the loss decides makes up for that, and for fresh weights of any size.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from .problem import Problem, Weights
from .spans import Spans

__all__ = ["Voice"]

GAINS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)  # of the outputs
TRIED = {0: (1.0, 0.0), 1: (*GAINS, 0.0), 12: (*GAINS, 0.0)}  # before which step; 0 is to say nothing
SILENCE = 0.05  # of the loss of saying nothing: what does not change the loss by more makes no difference
AUDIENCE = 32  # rows that can tell


@final
class Voice:
    """Adds up, over the rows that are looked at, their number, the losses of the gains and the outputs themselves."""

    def __init__(self, problem: Problem, change: bool) -> None:
        """With `change` the last layer may be changed, before the first steps."""
        self.problem, self.change = problem, change
        self.nothing = torch.zeros(2 + len(GAINS) + problem.outputs, dtype=torch.float64, device=problem.device)
        self.sums: Tensor | None = None

    def hear(self, m: Tensor, y: Tensor, step: int, spans: Spans) -> None:
        """Take rows of outputs and targets into the sums."""
        gains = self._gains(step)
        z, ys = (torch.cat([m * gain for gain in gains]), torch.cat([y] * len(gains))) if len(gains) > 1 else (m, y)
        sums = self.nothing.repeat(len(spans.counts), 1)
        sums.select(1, 0).copy_(torch.tensor(spans.counts))
        sums.narrow(1, 1, len(gains)).copy_(spans.sums(self.problem.loss(z, ys).double().view(len(gains), -1).T))
        if step == 0:
            sums.narrow(1, 2 + len(GAINS), m.shape[1]).copy_(spans.sums(m.double()))
        self.sums = sums if self.sums is None else self.sums + sums

    def take(self, leaves: int = 1) -> Tensor:
        """The sums of each leaf so far, which start anew."""
        sums, self.sums = self.sums, None
        return self.nothing.repeat(leaves, 1) if sums is None else sums

    def adjust(self, heard: Tensor, step: int, W: Weights, mean: Weights, V: Weights) -> None:
        """Change the last layer of weights, average and momentum by what all ranks have heard."""
        rows, *losses = heard.narrow(0, 0, 1 + len(self._gains(step))).tolist()
        if step not in TRIED or not self.change or rows < AUDIENCE:
            return
        last, linear = self.problem.L, self.problem.layers[self.problem.L].map
        if step == 0 and W[last].shape[1] > linear.inputs and knows_nothing(*losses):
            for part in (W, mean):
                part[last].select(1, linear.inputs).sub_(heard.narrow(0, 2 + len(GAINS), linear.outputs) / rows)
        elif step > 0:
            for part in (W, mean, V):
                part[last].mul_(least_gain(losses))

    def _gains(self, step: int) -> tuple[float, ...]:
        return TRIED.get(step, GAINS[:1]) if self.change else GAINS[:1]


def knows_nothing(now: float, nothing: float) -> bool:
    """Is the loss as good as that of no output?"""
    return now > (1 - SILENCE) * nothing


def least_gain(losses: list[float]) -> float:
    """The smallest gain that is about as good as the best; the last loss is that of no output."""
    *louder, nothing = losses
    enough = min(louder) + SILENCE * nothing
    return next((gain for gain, loss in zip(GAINS, louder, strict=True) if loss <= enough), 1.0)
