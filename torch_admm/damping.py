"""Both sides of the weight steps of AnchoredADMM: second moments of the inputs and of the residuals of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, final

from torch import Tensor

from .gram import with_ones
from .moments import AbstractMoment, moment
from .problem import Weights
from .spans import Spans

__all__ = ["Damping"]


@final
class Damping:
    """D_l = (C_l + rho' s' I)^-1 R_l (G_l + rho s I)^-1, up to scale, for the sums R_l of all layers.

    G_l is the second moment of [a_{l-1}, 1] and C_l that of r_l, s and s' their mean diagonals.
    """

    inputs: dict[int, AbstractMoment]
    residuals: dict[int, AbstractMoment]

    def __init__(self, W: Weights, rho: float | None, rho_residual: float) -> None:
        """Know nothing yet; `W` gives shapes, dtype and device."""
        self.W, self.rho, self.rho_residual = W, rho, rho_residual
        self.reset()

    def reset(self) -> None:
        """Forget all that was seen."""
        self.inputs = {l: moment(W.shape[1], self.rho, W) for l, W in self.W.items()}
        self.residuals = {l: moment(W.shape[0], self.rho_residual, W) for l, W in self.W.items()}

    def __call__(self, R: Weights) -> Weights:
        """D, from R, which is used up."""
        return {l: self.residuals[l].left(self.inputs[l].right(R_l)) for l, R_l in R.items()}

    def look(self, l: int, inputs: Tensor, residuals: Tensor, spans: Spans) -> None:
        """Take rows of a layer's inputs, as they are or with a one at the end, and residuals into the next refresh."""
        whole = inputs.shape[1] == self.W[l].shape[1]
        self.inputs[l].look(inputs if whole else with_ones(inputs), spans)
        self.residuals[l].look(residuals, spans)

    def take(self, leaves: int = 1) -> list[Tensor]:
        """The sums over the rows of each leaf looked at since the last time; those of other ranks may be added."""
        return [t for part in self._all() for t in part.take(leaves)]

    def refresh(self, seen: Sequence[Tensor], rows: float) -> None:
        """Take sums over so many rows, as `take` gives them, into the moments."""
        sums = iter(seen)
        for part in self._all():
            part.refresh(list(islice(sums, part.sums)), rows)

    def state_dict(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Of both sides, by layer."""
        return {
            "inputs": {l: part.state_dict() for l, part in self.inputs.items()},
            "residuals": {l: part.state_dict() for l, part in self.residuals.items()},
        }

    def check(self, state: dict[str, Any]) -> None:
        """Is it the state of layers of the same sizes?"""
        for name, parts in {"inputs": self.inputs, "residuals": self.residuals}.items():
            for l, part in parts.items():
                part.check(state[name].get(l), f"{name}[{l}]")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that was checked."""
        for l in self.W:
            self.inputs[l].load_state_dict(state["inputs"][l])
            self.residuals[l].load_state_dict(state["residuals"][l])

    def _all(self) -> list[AbstractMoment]:
        return [*self.inputs.values(), *self.residuals.values()]
