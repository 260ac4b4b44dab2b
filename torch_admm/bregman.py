"""BregmanADMM: Algorithm 1 of Taylor et al. (ICML 2016), as printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from . import state as states
from . import steps
from .arguments import choice, per_layer, positive, positive_int
from .comm.base import FEW_PIECES
from .data import AbstractRows, take
from .gram import Factor
from .losses import loss_of
from .method import AbstractMethod
from .pages import room
from .precision import LITTLE_SWEEP
from .problem import Problem, Weights
from .random import gaussian
from .sums import Sums, gram_of, summed_at_once

__all__ = ["BregmanADMM"]

CHUNK_ENTRIES = 1 << 19  # of the widest layer: a chunk's temporaries then stay in the last-level cache


@final
class BregmanADMM(AbstractMethod):
    """The paper's method: per-sample variables a_l and z_l, and a multiplier lam on the output only.

    - `loss`: a name, a torch criterion or an AbstractLoss; the paper's is "hinge".
    - `beta`, `gamma`: penalties, one number or one a layer (beta: L, gamma: L - 1).
    - `warm_start`: the first sweeps, in which lam stays zero.
    - `dual_step`: lam += dual_step 2 beta (z_L - m_L). The paper prints 1/2; 1 is the exact Bregman update.
    - `multiplier`: "paper" shows lam to the z_L step only; "consistent" to the W_L and a_{L-1} steps too (z_L + lam /
      (2 beta) in place of z_L); "none" keeps lam at zero.
    - `init`: "gaussian" draws a and z; "model" takes them from the model's own forward pass.
    - `ridge`: None takes the pseudo-inverse in the weight steps; a number adds ridge x the mean diagonal of the Gram.
    - `chunk_rows`: rows worked on at once, which bounds the working memory; None chooses.
    - `state_dtype`: of the stored a, z and lam (float32, bfloat16, float64); None takes that of the data.
    """

    by_row: ClassVar[tuple[str, ...]] = ("a", "z", "lam")

    def __init__(
        self,
        loss: Any = "hinge",
        *,
        beta: float | Sequence[float] = 1.0,
        gamma: float | Sequence[float] = 10.0,
        warm_start: int = 10,
        dual_step: float = 0.5,
        multiplier: Literal["paper", "consistent", "none"] = "paper",
        init: Literal["gaussian", "model"] = "gaussian",
        ridge: float | None = None,
        chunk_rows: int | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        """Check the settings; those given per layer are matched with the model by `init`."""
        self.loss = loss_of(loss)
        self._beta, self._gamma = _floats("beta", beta), _floats("gamma", gamma)
        self.warm_start = positive_int("warm_start", warm_start, least=0)
        self.dual_step = positive("dual_step", dual_step)
        self.multiplier = choice("multiplier", multiplier, ("paper", "consistent", "none"))
        self._init = choice("init", init, ("gaussian", "model"))
        self.ridge = None if ridge is None else positive("ridge", ridge)
        self.chunk_rows = None if chunk_rows is None else positive_int("chunk_rows", chunk_rows)
        stored = (None, torch.float32, torch.float64, torch.bfloat16)
        self.state_dtype = choice("state_dtype", state_dtype, stored)

    def part(self, problem: Problem, rows: AbstractRows, batch_size: int | None) -> AbstractRows:
        """Of few rows, some shards are summed as one.

        Double precision would not do: where a Gram is of low rank, weights show how its sums were rounded.
        """
        comm = self.comm
        few = rows.total * problem.size <= LITTLE_SWEEP and not (comm.is_many or comm.deterministic)
        merged = comm.shards // FEW_PIECES if few else 1
        mine = comm.part(rows, merged)
        mine.merged = merged
        return mine

    @torch.no_grad()
    def init(self, problem: Problem, rows: AbstractRows, *, batch_size: int | None = None, seed: int = 0) -> None:
        """Allocate and draw a, z, lam; factor the Gram matrix of the data, which never changes."""
        if batch_size is not None:
            raise ValueError(f"batch_size is {batch_size}, but BregmanADMM works on all rows at once; leave it None")
        L = problem.L
        self.beta = per_layer("beta", self._beta, L)
        self.gamma = per_layer("gamma", self._gamma, L - 1)
        self.problem, self.rows, self.sweeps = problem, rows, 0
        widest = max(layer.map.outputs for layer in problem.layers.values())
        at_once = summed_at_once(rows.total)
        size, shard = max(256, CHUNK_ENTRIES // widest // at_once * at_once), -(-rows.total // rows.split.number)
        size = shard if size < shard < 1.5 * size else size  # a few rows left over would cost as much as many
        self.size = min(self.chunk_rows or size, max(1, rows.count))
        # the output step makes nothing as wide as a hidden layer, unless it has to convert one
        converts = self.state_dtype not in (None, problem.dtype)
        self.output_size = self.size if converts else self.size * max(1, min(16, widest // problem.outputs))
        self.a = {l: self._allocate(l) for l in range(1, L)}
        self.z = {l: self._allocate(l) for l in range(1, L + 1)}
        self.lam = torch.zeros_like(self.z[L])
        self.W = problem.read()
        self.sums = {l: self._empty_sums(l) for l in problem.layers}
        self._buffer = torch.empty(self.size * widest, dtype=problem.dtype, device=problem.device)
        (self._draw if self._init == "gaussian" else self._run_forward)(seed)
        self._add_all(1)

    def step(self) -> None:
        """One sweep of Algorithm 1."""
        self.sweep()

    @torch.no_grad()
    def sweep(self) -> None:
        """Algorithm 1, one pass of its loop; m_l stands for W_l a_{l-1} + b_l."""
        L, W, a, z, beta, gamma = self.problem.L, self.W, self.a, self.z, self.beta, self.gamma
        layers, loss, sums = self.problem.layers, self.loss, self.sums

        for l in range(1, L):
            solve = layers[l + 1].map.solve_input(W[l + 1], beta[l + 1], gamma[l])  # while sums are on their way
            # W_l <- z_l a_{l-1}^+
            W[l] = sums[l].solve()
            for part, (rows, x, _) in self.comm.portions(self.rows, self.size):
                # a_l <- (beta W_{l+1}'W_{l+1} + gamma I)^-1 (beta W_{l+1}'z_{l+1} + gamma h_l(z_l))
                a_rows, z_rows, z_next = take(a[l], rows), take(z[l], rows), self._target(l + 1, rows)
                h_z = layers[l].h(self._load(z[l], rows), self._offer(a_rows))
                a_l = self._store(a_rows, steps.activation_step(solve, z_next, h_z))
                # z_l <- argmin_z gamma ||a_l - h_l(z)||^2 + beta ||z - m_l||^2
                m = layers[l].map.forward(W[l], self._input(l, rows, x), self._scratch(z_rows))
                z_l = steps.hidden_step(layers[l].h, a_l, m, beta[l], gamma[l], self._offer(z_rows))
                z_l = self._store(z_rows, z_l)
                # sums for W_{l+1}, and for W_1 of the next sweep, while these rows are in the cache
                sums[l + 1].add(a_l, z_next, part)
                if l == 1:
                    sums[1].add(x, z_l, part)
            sums[l + 1].send()
            if l == 1:
                sums[1].send()

        # W_L <- z_L a_{L-1}^+
        W[L] = sums[L].solve()
        self.sweeps += 1
        for part, (rows, x, y) in self.comm.portions(self.rows, self.output_size):
            # z_L <- argmin_z loss(z, y) + <lam, z> + beta ||z - m_L||^2
            m = layers[L].map.forward(W[L], self._input(L, rows, x))
            lam = self._load(self.lam, rows)
            z_L = self._store(take(z[L], rows), steps.output_step(loss, m, y, lam, beta[L]))
            # lam <- lam + beta (z_L - m_L)
            if self.multiplier != "none" and self.sweeps > self.warm_start:
                self._store(take(self.lam, rows), steps.multiplier_step(lam, z_L, m, beta[L], self.dual_step))
            if L == 1:
                sums[1].add(x, self._target(1, rows), part)
        if L == 1:
            sums[1].send()

    def weights(self) -> Weights:
        """The current W."""
        return self.W

    @torch.no_grad()
    def measures(self) -> dict[str, float]:
        """Root mean squares of z_l - m_l (`residual_z`), a_l - h_l(z_l) (`residual_a`) and of lam, over all layers."""
        nothing = torch.zeros(3, dtype=torch.float64, device=self.problem.device)
        squares = [nothing.clone() for _ in self.comm.starts(self.rows)]
        for part, (rows, x, _) in self.comm.portions(self.rows, self.size):
            z_m, a_h, lam = squares[part].unbind()
            lam += self._load(self.lam, rows).double().square().sum()
            for l, layer in self.problem.layers.items():
                z_l = self._load(self.z[l], rows)
                z_m += (z_l - layer.map.forward(self.W[l], self._input(l, rows, x))).square().sum()
                if l < self.problem.L:
                    a_h += (self._load(self.a[l], rows) - layer.h(z_l)).square().sum()
        widths = [layer.map.outputs for layer in self.problem.layers.values()]
        entries = sum(widths), max(1, sum(widths[:-1])), widths[-1]
        names = "residual_z", "residual_a", "multiplier"
        total = self.comm.total(squares, self.comm.order(self.rows), nothing).tolist()
        return {k: (v / (n * self.rows.total)) ** 0.5 for k, v, n in zip(names, total, entries, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """W, a, z, lam and the number of sweeps."""
        return {
            "W": dict(self.W),
            "a": dict(self.a),
            "z": dict(self.z),
            "lam": self.lam,
            "sweeps": self.sweeps,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state into this run; shapes must be those of this problem and these rows."""
        self.check_state(state)
        states.copy_back(self._parts(), state | {"lam": {0: state["lam"]}})
        self.sweeps = int(state["sweeps"])
        self.sums = {l: self._empty_sums(l, self.sums[l].factor) for l in self.sums}
        self._add_all(1)

    def check_state(self, state: dict[str, Any]) -> None:
        """Could `load_state_dict` take it up? Nothing changes, and no other rank is asked."""
        given = state | ({"lam": {0: state["lam"]}} if "lam" in state else {})
        states.check(given, self._parts(), ["sweeps"], "BregmanADMM")
        states.check_number(state, "sweeps", self.sweeps)

    def _parts(self) -> states.Parts:
        return {"W": self.W, "a": self.a, "z": self.z, "lam": {0: self.lam}}

    def _target(self, l: int, rows: slice) -> Tensor:
        """z_l as the W_l and a_{l-1} steps see it: in the scaled form of the multiplier if it is "consistent"."""
        z = self._load(self.z[l], rows)
        if l < self.problem.L or self.multiplier != "consistent":
            return z
        return z + self._load(self.lam, rows) / (2 * self.beta[l])

    def _input(self, l: int, rows: slice, x: Tensor) -> Tensor:
        return x if l == 1 else self._load(self.a[l - 1], rows)

    def _empty_sums(self, l: int, factor: Factor | None = None) -> Sums:
        if l == 1 and factor is None:
            factor = self._factor_data()
        linear, W = self.problem.layers[l].map, self.W[l]
        return Sums(linear, W, ridge=self.ridge, rows=self.rows, comm=self.comm, factor=factor)

    def _add_all(self, l: int) -> None:
        """As a sweep would: the same rows at a time give the same bits."""
        for part, (rows, x, _) in self.comm.portions(self.rows, self.size if self.problem.L > 1 else self.output_size):
            self.sums[l].add(self._input(l, rows, x), self._target(l, rows), part)
        self.sums[l].send()

    def _factor_data(self) -> Factor:
        linear, W = self.problem.layers[1].map, self.W[1]
        size = min(self.size, max(1, CHUNK_ENTRIES // self.problem.inputs))  # each is converted to float64
        return gram_of(linear, W, self.rows, size, self.comm).factor(self.ridge)

    def _draw(self, seed: int) -> None:
        """Gaussian a and z; the W from them are what the first a steps see."""
        L = self.problem.L
        for _, (rows, _, _) in self.comm.portions(self.rows, self.size):
            numbers = slice(self.rows.first + rows.start, self.rows.first + rows.stop)
            for stream, state in enumerate([*self.a.values(), *self.z.values()]):
                self._store(take(state, rows), gaussian(numbers, state.shape[1], seed, stream, self.W[L]))
        for l in range(1, L + 1):
            self._add_all(l)
            self.W[l] = self.sums[l].solve()

    def _run_forward(self, seed: int) -> None:
        """a and z at the model's own forward pass; the seed has no part in it."""
        for _, (rows, x, _) in self.comm.portions(self.rows, self.size):
            a = x
            for l, layer in self.problem.layers.items():
                m = layer.map.forward(self.W[l], a)
                self._store(take(self.z[l], rows), m)
                if l < self.problem.L:
                    a = layer.h(m)
                    self._store(take(self.a[l], rows), a)

    def _allocate(self, l: int) -> Tensor:
        shape = self.rows.count, self.problem.layers[l].map.outputs
        return room(shape, self.state_dtype or self.problem.dtype, self.problem.device)

    def _load(self, state: Tensor, rows: slice) -> Tensor:
        return self.comm.aligned(take(state, rows).to(self.problem.dtype))

    def _store(self, state: Tensor, value: Tensor) -> Tensor:
        """Keep `value` in these rows of the state, and give it back as the state holds it."""
        if value is not state:
            state.copy_(value)
        return self.comm.aligned(state.to(self.problem.dtype))

    def _offer(self, state: Tensor) -> Tensor | None:
        """Rows of the state, for a step to write its answer into, if they are of the working dtype."""
        return state if state.dtype == self.problem.dtype and self.comm.is_aligned(state) else None

    def _scratch(self, like: Tensor) -> Tensor:
        """Memory for a chunk of m that stays in the cache; what is allocated anew costs a page fault every 4 KiB."""
        return self._buffer.narrow(0, 0, like.numel()).view(like.shape)


def _floats(name: str, value: float | Sequence[float]) -> float | list[float]:
    """Penalties, checked: 1 and 1.0 are the same one."""
    given = per_layer(name, value, None)
    return list(given.values()) if isinstance(value, Sequence) else float(value)
