"""The walk of AnchoredADMM over some rows: forward through the network, then back with a target for every layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from torch import Tensor

from . import steps
from .problem import Problem, Weights

__all__ = ["Walk"]

SMALL_SIDE, EVERY = 16, 4  # up to so many outputs the factor of the a step is taken anew every few steps, and
LONG_STEPS = 16  # every one of the first, which are long; else at refreshes
CACHED = 64  # numbers of rows whose places are kept: the ranks' shares of a batch differ by a few


class Places(NamedTuple):
    """Where a chunk of some number of rows has what is made of it, by layer."""

    a: Weights  # [a_l, 1]
    inner: Weights  # a_l, in there
    m: Weights
    r: Weights
    plain: bool  # is a_0 the rows as they came?


@final
class Walk:
    """Has the factors K_l = beta (beta W_l W_l' + gamma I)^-1 of the a steps, and the memory for one chunk."""

    def __init__(self, problem: Problem, W: Weights, beta: float, gamma: float) -> None:
        """`W` gives shapes, dtype and device."""
        self.problem, self.beta, self.gamma = problem, beta, gamma
        self.K = {l: W_l.new_zeros(len(W_l), len(W_l)) for l, W_l in W.items() if l > 1}
        self._small = [l for l, K in self.K.items() if len(K) <= SMALL_SIDE]
        self._columns = {l: W_l.shape[1] for l, W_l in W.items()}
        self._rooms: dict[tuple[str, int], Tensor] = {}
        self._places: dict[tuple[int, int], Places] = {}
        self._here: Places  # of the chunk under way

    def factor(self, W: Weights, step: int, refresh: bool) -> None:
        """Take K_l for these weights, if it is time to: they change slowly."""
        if not refresh and step >= LONG_STEPS and step % EVERY:
            return
        for l in self.K if refresh else self._small:
            self.K[l] = self.problem.layers[l].map.output_factor(W[l], self.beta, self.gamma)

    def forward(self, W: Weights, x: Tensor, of: int | None = None) -> tuple[Weights, Weights]:
        """a_l = h_l(m_l) as [a_l, 1], and m_l = W_l a_{l-1} + b_l; the next chunk uses their memory again.

        a_0 may be x itself: see `AbstractLinearMap.prefers_plain`. Which of the two it is rounds otherwise, so that a
        rank that has a part `of` so many rows goes by these.
        """
        places = self._here = self.places(x, x.shape[0] if of is None else of)
        a, m, inner = dict(places.a), dict(places.m), places.inner
        if places.plain:
            a[0] = x
        else:
            inner[0].copy_(x)
        for l, layer in self.problem.layers.items():
            m[l] = m_l = layer.map.forward(W[l], a[l - 1], m.get(l))
            if l in a and (a_l := layer.h(m_l, inner[l])) is not inner[l]:
                inner[l].copy_(a_l)
        return a, m

    def back(self, W: Weights, m: Weights, r: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(l, r_l) from l = L, whose residual r is given, to 1, after `forward`; m is used up."""
        layers, places = self.problem.layers, self._here
        for l in range(self.problem.L, 0, -1):
            yield l, r
            if l > 1:
                # d = argmin_d { beta ||r_l - W_l d||^2 + gamma ||d||^2 }, the way to the target a' = a_{l-1} + d
                K = self.K[l]
                pull = _Pull(self, l, W[l], torch.mul(r, K) if K.shape[0] == 1 else torch.mm(r, K))
                # r_{l-1} = argmin_z { gamma ||a' - h(z)||^2 + beta ||z - m_{l-1}||^2 } - m_{l-1}
                h, h_m, room = layers[l - 1].h, places.inner[l - 1], places.r[l - 1]
                r = steps.hidden_residual(h, pull, m[l - 1], h_m, self.beta, self.gamma, room)

    def places(self, rows: Tensor, of: int) -> Places:
        """For so many rows. Views are made once: small steps consist of little else than calls."""
        key = rows.shape[0], of
        found = self._places.get(key)
        if found is None:
            found = self._cut(*key, rows)
            if len(self._places) == CACHED:
                self._places.clear()
            self._places[key] = found
        return found

    def _cut(self, rows: int, of: int, like: Tensor) -> Places:
        layers, columns, L = self.problem.layers, self._columns, self.problem.L
        plain = layers[1].map.prefers_plain(of)
        a = {l: self.room("a", l, rows, columns[l + 1], like) for l in range(1 if plain else 0, L)}
        m, r = ({l: self.room(name, l, rows, layers[l].map.outputs, like) for l in range(1, L)} for name in ("m", "r"))
        return Places(a, {l: layers[l + 1].map.inner(a_l) for l, a_l in a.items()}, m, r, plain)

    def room(self, name: str, l: int, rows: int, columns: int, like: Tensor) -> Tensor:
        """Memory that every batch uses again: first touching new memory costs more than computing what goes there.

        It starts as ones: nobody writes to the last column of [a, 1].
        """
        kept = self._rooms.get((name, l))
        if kept is None or len(kept) < rows:
            kept = self._rooms[name, l] = like.new_ones(rows, columns)
            self._places.clear()  # or those would keep the smaller memory too
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
