"""The walk of AnchoredADMM over some rows: forward through the network, then back with a target for every layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from torch import Tensor

from . import steps
from .moments import row_major
from .problem import Problem, Weights

__all__ = ["Walk"]

EXACT_SIDE = 16  # up to so many outputs the factor of the a step is taken anew every batch, else at refreshes


@final
class Walk:
    """Has the factors K_l = beta (beta W_l W_l' + gamma I)^-1 of the a steps, and the memory for one chunk."""

    def __init__(self, problem: Problem, W: Weights, beta: float, gamma: float) -> None:
        """`W` gives shapes, dtype and device."""
        self.problem, self.beta, self.gamma = problem, beta, gamma
        self.K = {l: W_l.new_zeros(len(W_l), len(W_l)) for l, W_l in W.items() if l > 1}
        self._rooms: dict[tuple[str, int], Tensor] = {}

    def factor(self, W: Weights, refresh: bool) -> None:
        """Take K_l for these weights; large ones at refreshes only, since they change slowly."""
        for l in self.K:
            if refresh or len(self.K[l]) <= EXACT_SIDE:
                K = self.problem.layers[l].map.output_factor(W[l], self.beta, self.gamma)
                self.K[l] = row_major(K, W[l].dtype)

    def forward(self, W: Weights, x: Tensor) -> tuple[Weights, Weights]:
        """a_l = h_l(m_l) as [a_l, 1], and m_l = W_l a_{l-1} + b_l; the next chunk uses their memory again.

        a_0 may be x itself: see `AbstractLinearMap.prefers_plain`.
        """
        layers, rows = self.problem.layers, len(x)
        a: Weights = {}
        m: Weights = {}
        for l, layer in layers.items():
            if l == 1 and layer.map.prefers_plain(rows):
                a[0] = x
            else:
                z, h = (m[l - 1], layers[l - 1].h) if l > 1 else (x, None)
                a[l - 1] = layer.map.extend(z, h, self.room("a", l, rows, W[l].shape[1], W[l]))
            out = self.room("m", l, rows, len(W[l]), W[l]) if l < self.problem.L else None
            m[l] = layer.map.forward(W[l], a[l - 1], out)
        return a, m

    def back(self, W: Weights, a: Weights, m: Weights, r: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(l, r_l) from l = L, whose residual r is given, to 1; m is used up."""
        layers = self.problem.layers
        for l in range(self.problem.L, 0, -1):
            yield l, r
            if l > 1:
                # d = argmin_d { beta ||r_l - W_l d||^2 + gamma ||d||^2 }, the way to the target a' = a_{l-1} + d
                pull = _Pull(self, l, W[l], r @ self.K[l])
                # r_{l-1} = argmin_z { gamma ||a' - h(z)||^2 + beta ||z - m_{l-1}||^2 } - m_{l-1}
                inputs = layers[l].map.inputs
                h_m, room = a[l - 1].narrow(1, 0, inputs), self.room("r", l, len(r), inputs, W[l])
                r = steps.hidden_residual(layers[l - 1].h, pull, m[l - 1], h_m, self.beta, self.gamma, room)

    def room(self, name: str, l: int, rows: int, columns: int, like: Tensor) -> Tensor:
        """Memory that every batch uses again: first touching new memory costs more than computing what goes there.

        It starts as ones: nobody writes to the last column of [a, 1].
        """
        kept = self._rooms.get((name, l))
        if kept is None or len(kept) < rows:
            kept = self._rooms[name, l] = like.new_ones(rows, columns)
        return kept if len(kept) == rows else kept.narrow(0, 0, rows)


@final
class _Pull:
    """d = r K_l W_l, for a layer and rows of its residual."""

    def __init__(self, walk: Walk, l: int, W: Tensor, rK: Tensor) -> None:
        self.walk, self.l, self.W, self.rK = walk, l, W, rK
        self.map = walk.problem.layers[l].map

    def __call__(self) -> Tensor:
        return self.map.pull_back(self.W, self.rK, self.walk.room("d", self.l, len(self.rK), self.map.inputs, self.W))

    def onto(self, m: Tensor, k: float) -> Tensor:
        return self.map.pull_back_onto(self.W, self.rK, m, k)
