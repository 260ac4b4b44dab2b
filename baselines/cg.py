"""Nonlinear conjugate gradients: an optimiser of torch's kind, and the method of `fit` that uses it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.optim.optimizer import ParamsT

from torch_admm.arguments import fraction, non_negative, positive_int

from .line_search import Point, StrongWolfe
from .searching import AbstractSearchingMethod

__all__ = ["CG", "ConjugateGradients"]

C1 = 1e-4  # of the strong Wolfe conditions
ORTHOGONAL = 0.5  # restart when successive gradients have more in common; Powell's 0.2 keeps nets near steepest descent
DESCENT = 0.01  # restart when a direction goes down less than this share of what steepest descent would


@final
class ConjugateGradients(torch.optim.Optimizer):
    """Polak-Ribiere+ with restarts and a strong Wolfe line search, to be used as torch.optim.LBFGS is.

    The direction is d = -g + max(0, g'(g - g_old) / g_old'g_old) d_old. It starts afresh with d = -g after as many
    iterations as there are parameters, when successive gradients are far from orthogonal (Powell), when d hardly goes
    down, and after a search that found nothing.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        max_iter: int = 20,
        max_evals: int = 25,
        c2: float = 0.1,
        tolerance_grad: float = 1e-7,
    ) -> None:
        """A call of `step` makes up to `max_iter` iterations, of up to `max_evals` evaluations each.

        A search goes on until the slope has fallen to `c2` of what it was: a small one keeps directions nearly
        conjugate. It ends early where no entry of the gradient is larger than `tolerance_grad`, or where nothing goes
        down.
        """
        settings = {
            "max_iter": positive_int("max_iter", max_iter),
            "max_evals": positive_int("max_evals", max_evals),
            "c2": _curvature(c2),
            "tolerance_grad": non_negative("tolerance_grad", tolerance_grad),
        }
        super().__init__(params, settings)
        if len(self.param_groups) != 1:
            raise ValueError(f"params has {len(self.param_groups)} groups; one is expected, as all move together")

    @torch.no_grad()
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        """Go on from here and return the loss before; `closure` gives the loss, its gradient left in the parameters."""
        evaluate = torch.enable_grad()(closure)
        here = first = self._at(evaluate, 0.0)
        for _ in range(self.param_groups[0]["max_iter"]):
            if not self._least < float(here.gradient.abs().max()) < math.inf:
                break
            fresh = not self._memory
            here = self._iterate(evaluate, here)
            if fresh and not here.step:  # not even steepest descent goes down
                break
        return first.value

    @property
    def _params(self) -> list[Tensor]:
        params: list[Tensor] = self.param_groups[0]["params"]
        return params

    @property
    def _least(self) -> float:
        """Gradients up to this size count as zero; squares of still smaller ones would vanish."""
        smallest = float(torch.finfo(self._params[0].dtype).tiny)
        return float(max(self.param_groups[0]["tolerance_grad"], math.sqrt(smallest)))

    @property
    def _memory(self) -> dict[str, Any]:
        """Of the last iteration: direction, gradient where it began, slope there, length of step, count."""
        memory: dict[str, Any] = self.state[self._params[0]]
        return memory

    def _iterate(self, closure: Callable[[], float], here: Point) -> Point:
        """One direction, one search along it; the parameters are left at the point that comes back."""
        direction, slope, count = self._direction(here.gradient)
        start, x = here._replace(step=0.0, slope=slope), parameters_to_vector(self._params)

        def at(step: float) -> Point:
            self._move(x + step * direction)
            return self._at(closure, step, direction)

        limits = {name: self.param_groups[0][name] for name in ("max_evals", "c2")}
        found = StrongWolfe(at, start, c1=C1, precision=torch.finfo(x.dtype).eps, **limits).search(self._guess(slope))
        self._move(x + found.step * direction)
        self._memory.clear()
        if found.step:
            kept = {"direction": direction, "gradient": here.gradient, "slope": slope}
            self._memory.update(kept, length=found.step, count=count)
        return found

    def _direction(self, gradient: Tensor) -> tuple[Tensor, float, int]:
        """The next direction, its slope, and how many have been conjugate since the last restart."""
        memory, square = self._memory, float(gradient @ gradient)
        if memory and memory["count"] < len(gradient):
            overlap = float(gradient @ memory["gradient"])
            last_square = float(memory["gradient"] @ memory["gradient"])
            direction = max(0.0, (square - overlap) / last_square) * memory["direction"] - gradient
            slope = float(gradient @ direction)
            if abs(overlap) < ORTHOGONAL * square and -math.inf < slope < -DESCENT * square:
                return direction, slope, memory["count"] + 1
        return -gradient, -square, 1

    def _guess(self, slope: float) -> float:
        """To first order, as much descent as the last step promised; a step of length one to begin with."""
        if self._memory:
            return float(self._memory["length"] * self._memory["slope"] / slope)
        return float((-slope) ** -0.5)

    def _at(self, closure: Callable[[], float], step: float, direction: Tensor | None = None) -> Point:
        """Evaluate where the parameters are."""
        value = float(closure())
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        gradient = torch.cat([part.reshape(-1) for part in parts])
        return Point(step, value, 0.0 if direction is None else float(gradient @ direction), gradient)

    def _move(self, x: Tensor) -> None:
        for p, part in zip(self._params, x.split([p.numel() for p in self._params]), strict=True):
            p.copy_(part.view_as(p))


@final
class CG(AbstractSearchingMethod):
    """Conjugate gradients with a strong Wolfe search; a sweep is one iteration on all rows, or an epoch of batches."""

    def __init__(
        self,
        loss: Any,
        *,
        max_evals: int = 25,
        c2: float = 0.1,
        batch_size: int | None = None,
        hold: int = 5,
        chunk_rows: int = 4096,
        average: bool = False,
    ) -> None:
        """A search makes up to `max_evals` evaluations, until the slope has fallen to `c2` of what it was.

        With `batch_size`, each batch serves `hold` iterations. Gradients are taken `chunk_rows` rows at a time.
        """
        super().__init__(loss, batch_size=batch_size, hold=hold, chunk_rows=chunk_rows, average=average)
        self.max_evals, self.c2 = positive_int("max_evals", max_evals), _curvature(c2)

    def build(self) -> torch.optim.Optimizer:
        return ConjugateGradients(self.model.parameters(), max_iter=1, max_evals=self.max_evals, c2=self.c2)


def _curvature(c2: Any) -> float:
    if not C1 < fraction("c2", c2) < 1:
        raise ValueError(f"c2 is {c2!r}; a number above {C1:g} and below 1 is expected")
    return float(c2)
