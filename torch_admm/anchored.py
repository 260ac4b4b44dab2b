"""AnchoredADMM: every sweep starts from the network's own forward pass, so nothing is kept per sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from . import anchored_state, feed
from .activations import GOLDEN
from .arguments import choice, fraction, non_negative, positive, positive_int
from .bound import BoundADMM
from .comm import Order
from .damping import Damping
from .data import AbstractRows, Ahead
from .data.shards import Shards
from .feed import Chunk
from .guard import Guard
from .leaves import Leaves, together
from .losses import loss_of
from .method import AbstractMethod
from .motion import Motion
from .problem import Problem, Weights, from_module
from .scaling import Scaling, looked, measured
from .spans import Looked
from .voice import Voice
from .walk import Walk

__all__ = ["AnchoredADMM"]

EARLY = (1, 12)  # batches at which moments are refreshed too, while they know little
SMALL_NET = 16_384  # weights up to which mini-batches may be twice as large

RUN = ("comm", "problem", "rows", "split", "seed", "size")  # what a run is made of, beside its settings and its state

Cross = Callable[[int, Tensor, Tensor], None]  # takes l, r_l and a_{l-1} into the sums R_l


@final
class AnchoredADMM(AbstractMethod):
    """The fast method, for full batches and mini-batches alike; docs/anchored.md says how each default was chosen.

    - `loss`: a name, a torch criterion or an AbstractLoss.
    - `batch_size`: rows of a mini-batch; "auto" takes 512, more for small nets, fewer for few rows; "full" takes all
      rows every time.
    - `eta`: relative length of a step (of [W, b] as a whole); None takes 0.05, and more for large batches.
    - `half_life`: steps after which that has halved: eta / (1 + k / half_life).
    - `head_start`: the first steps are longer, by eta head_start / (1 + k / 10)^2.
    - `momentum`: on the weight steps; at the k-th, k / (k + 3) of it, since the first directions soon are out of date.
    - `rho`, `rho_residual`: ridge of the two sides of a weight step, relative to the mean diagonal. A `rho` of None is
      0.5 for inputs whose second moment is known in full, 4 for those of which only the leading directions are.
    - `beta`, `gamma`: the penalties of the split problem; at gamma = 1.618 beta ReLU's step takes the fewest passes.
    - `amplify`: take the mean out of the outputs of a model that knows nothing, and let it say louder what the first
      step has found, by a factor that the loss decides.
    - `refresh`: batches between two looks at the second moments.
    - `average`: hand back an exponential average of the weights.
    - `weight_decay`: every step also shrinks W (not b) by its own length times this.
    - `standardise`: shift and scale the inputs, and fold that into the first layer of the model, which goes on taking
      raw inputs. None does so if they look raw (root mean squares beyond 10, or all below 0.1). With `bind`, the first
      batch is what is measured.
    """

    W: Weights
    V: Weights
    mean: Weights
    guard: Guard
    scaling: Scaling | None
    _kept: tuple[Tensor, Tensor, Sequence[int]] | None  # all rows, if that takes next to no memory
    split: Shards | None = None  # of the rows of batches; None if they are somebody else's, or there are pieces instead

    def __init__(
        self,
        loss: Any,
        *,
        batch_size: int | Literal["auto", "full"] = "auto",
        eta: float | None = None,
        half_life: float = 200.0,
        head_start: float = 2.0,
        momentum: float = 0.5,
        rho: float | None = None,
        rho_residual: float = 1.0,
        beta: float = 1.0,
        gamma: float = GOLDEN,
        amplify: bool = True,
        refresh: int = 40,
        average: bool = True,
        weight_decay: float = 0.0,
        standardise: bool | None = None,
    ) -> None:
        """Check the settings."""
        self.loss = loss_of(loss)
        self.batch_size: int | str = (
            choice("batch_size", batch_size, ("auto", "full"))
            if isinstance(batch_size, str)
            else positive_int("batch_size", batch_size)
        )
        self.eta = None if eta is None else positive("eta", eta)
        self.half_life, self.head_start = positive("half_life", half_life), non_negative("head_start", head_start)
        self.momentum = fraction("momentum", momentum)
        self.rho = None if rho is None else positive("rho", rho)
        self.rho_residual = positive("rho_residual", rho_residual)
        self.beta, self.gamma = positive("beta", beta), positive("gamma", gamma)
        self.amplify = choice("amplify", amplify, (True, False))
        self.refresh = positive_int("refresh", refresh)
        self.average = choice("average", average, (True, False))
        self.weight_decay = fraction("weight_decay", weight_decay)
        self.standardise = choice("standardise", standardise, (None, True, False))

    def bind(self, model: nn.Module) -> BoundADMM:
        """Train `model` from a loop of your own: `for x, y in loader: bound.step(x, y)`."""
        with torch.inference_mode(False), torch.no_grad():
            problem, self.split = from_module(model, self.loss), None
            self._start(problem)
        return BoundADMM(self, problem)

    def batch_size_for(self, rows: int, weights: int) -> int:
        """Rows of a mini-batch for so many rows, and weights of the net: at least 40 steps an epoch, if rows suffice.

        A step has costs of its own, which count more where the net is small.
        """
        if isinstance(self.batch_size, int):
            return min(self.batch_size, rows)
        if self.batch_size == "full":
            return rows
        most = 1024 if weights <= SMALL_NET else 512
        return min(rows, max(32, min(most, 1 << (rows // 40).bit_length() >> 1)))

    @torch.no_grad()
    def init(self, problem: Problem, rows: AbstractRows, *, batch_size: int | None = None, seed: int = 0) -> None:
        """Start from the model's own weights."""
        self.rows, self.seed, self.size = rows, seed, self._step_rows(problem, rows, batch_size)
        in_batches = self.size < rows.total or feed.is_one_batch(problem, rows, self.size)
        self.split = rows.split if in_batches and not self.comm.deterministic else None
        if self.split is not None and len(rows.split.here) == rows.split.number:  # nobody else has any
            several = self.size < rows.total and torch.get_num_threads() > 1  # no bits are promised: one leaf is faster
            number = rows.split.number
            self.split = replace(rows.split, together=number if several else together(self.size, number))
        self._start(problem)
        self.scale(rows)

    def is_little(self, problem: Problem, rows: AbstractRows, batch_size: int | None) -> bool:
        """See `precision`."""
        return feed.is_little(problem, rows, self._step_rows(problem, rows, batch_size))

    def part(self, problem: Problem, rows: AbstractRows, batch_size: int | None) -> AbstractRows:
        """See `feed`."""
        return feed.part(problem, rows, self._step_rows(problem, rows, batch_size), self.comm)

    def _step_rows(self, problem: Problem, rows: AbstractRows, batch_size: int | None) -> int:
        size = rows.batch_size if batch_size is None else batch_size
        return self.batch_size_for(rows.total, problem.size) if size is None else min(size, rows.total)

    @torch.no_grad()
    def step(self) -> None:
        """One epoch of mini-batches, or one sweep over all rows."""
        comm, rows = self.comm, self.rows
        if self.size >= rows.total and self.split is not None:
            self.sweep_batch(*self._all_rows(), self.size, of_all=True)
        elif self.size >= rows.total:
            pieces = (feed.chunks(piece, self.chunk, comm) for piece in comm.pieces(rows))
            self.sweep(pieces, rows.total, comm.order(rows), torch.float64)
        elif self.split is None:
            for x, y, counts in self._batches():
                mine = [counts[i] for i in rows.split.here]
                self.sweep(feed.shards(x, y, mine, self.size if self.looks() else None), self.size, comm.order(rows))
        else:
            batches = Ahead(self._batches())
            for batch in batches:
                self.sweep_batch(*batch, self.size, batches.fetch)
        self.epoch += 1
        self._guard()

    def sweep(
        self, pieces: Iterable[Iterable[Chunk]], rows: int, order: Order, kept: torch.dtype | None = None
    ) -> None:
        """One step of all weights, from the sums over pieces of all ranks in this order; `rows` is their usual number.

        Sums are kept as `kept`. The caller has turned gradients off.
        """
        look, looked = self._begin(), list[list[Chunk]]()
        parts = (self._sums(chunks, kept, looked if look else None) for chunks in pieces)
        dtype, (first, last) = torch.float64 if look else kept or self.dtype, order.held[self.comm.rank]
        like = self._sums((), kept, [] if look else None) if first == last else ()  # no piece is here
        total = self.comm.totals_later(parts, dtype, order, like).wait()
        R = {l: R_l if R_l.dtype == self.dtype else R_l.to(self.dtype) for l, R_l in zip(self.W, total, strict=False)}

        def of_first() -> Tensor:
            return self.comm.total(
                [self._first_losses(chunks)[0] for chunks in looked], order, self._first_losses(())[0]
            )

        if not look or self._refresh(R, total[len(R) :], of_first, of_all=kept is not None):
            self._move(R, rows)

    def sweep_batch(
        self,
        x: Tensor,
        y: Tensor,
        counts: Sequence[int],
        rows: int,
        meanwhile: Callable[[], None] = lambda: None,
        *,
        of_all: bool = False,
    ) -> None:
        """The same from what is here of a mini-batch, of which `counts` has how many rows it has of each shard.

        While sums cross, something else can be done `meanwhile`. A batch `of_all` rows is looked at as a whole.
        """
        look, leaves = self._begin(), self.leaves
        x, y = (x, y) if of_all else leaves.begin(x, y, counts)
        some = self._looked(counts, rows, of_all) if look else None
        if len(x):
            self._walk(x, y, rows, some, leaves.cross)
        else:
            leaves.nothing()
        leaves.start()
        if self.comm.size > 1:
            meanwhile()
        R = dict(zip(self.W, leaves.wait(), strict=True))

        def of_first() -> Tensor:
            chunks = [Chunk(x, y, some)] if some is not None and len(x) and not of_all else []  # of all it is known
            return leaves.totals([self._first_losses(chunks, len(leaves.spans.counts))])[0]

        seen = [] if some is None else leaves.totals(self._seen(len(leaves.spans.counts)))
        if some is None or self._refresh(R, seen, of_first, of_all=of_all):
            self._move(R, rows)

    def _looked(self, counts: Sequence[int], rows: int, of_all: bool) -> Looked:
        leaves = self.leaves
        return Looked(None, leaves.spans) if of_all else leaves.looked_at(counts, rows, self.problem.device)

    def _all_rows(self) -> tuple[Tensor, Tensor, Sequence[int]]:
        """Those here, as they should lie, and how many there are of each shard, of all ranks."""
        if self._kept is not None:
            return self._kept
        rows, everywhere = self.rows, range(self.rows.split.number)
        counts = [shard.stop - shard.start for shard in replace(rows.split, here=everywhere).local()]
        _, x, y = next(rows.chunks(max(1, rows.count)), (None, rows.like, rows.like))
        found = *self.leaves.begin(x.contiguous(), y, counts), counts  # as copies of some are
        self._kept = found if rows.resident else None
        return found

    def _begin(self) -> bool:
        """Is this a step that looks at moments?"""
        look = self.looks()
        self.walk.factor(self.W, self.steps, look)
        return look

    def _walk(self, x: Tensor, y: Tensor, rows: int, some: Looked | None, cross: Cross) -> None:
        """Forward and back over some of so many rows."""
        # forward: a_l = h_l(m_l), m_l = W_l a_{l-1} + b_l
        a, m = self.walk.forward(self.W, self._input(x), rows)
        # output: r_L = argmin_z { loss(z, y) + beta ||z - m_L||^2 } - m_L
        m_L = m[self.problem.L]
        r = self.prox(m_L, y).sub_(m_L)
        if some is not None:
            self.voice.hear(some.of(m_L), some.of(y), self.steps, some.spans)
        # back: r_{l-1} from r_l, by the target of a_{l-1}
        for l, r_l in self.walk.back(self.W, m, r):
            # sums of the weight step: R_l = sum r_l' [a_{l-1}, 1]
            cross(l, r_l, a[l - 1])
            if some is not None:
                self.damping.look(l, some.of(a[l - 1]), some.of(r_l), some.spans)

    def _move(self, R: Weights, rows: int) -> None:
        """The weight step, from sums over so many rows, which are used up."""
        # D_l = (C_l + rho' s' I)^-1 R_l (G_l + rho s I)^-1, up to scale
        D = self.damping(R)
        # V_l = mu_k V_l + D_l;  W_l += eta_k max(||W_l||, ||W_l at the start||) V_l / ||V_l||
        k = self.steps
        self.motion.step(D, self.momentum * k / (k + 3), self._length(rows), self.weight_decay)
        self.steps += 1
        if self.average:
            self.motion.average(1 - min(0.99, (k + 2) / (k + 11)))

    def _sums(
        self, chunks: Iterable[Chunk], kept: torch.dtype | None, looked: list[list[Chunk]] | None
    ) -> list[Tensor]:
        """R_l of all layers over one piece, then, if it is time to look, what was seen on the way.

        What was looked at is noted in `looked`, but for chunks of which others follow: they may not stay in memory.
        """
        R: Weights = {}

        def add(l: int, r: Tensor, a: Tensor) -> None:
            R_l = self.problem.layers[l].map.cross(r, a)
            R_l = R_l if kept is None else R_l.to(kept)
            R[l] = R[l].add_(R_l) if l in R else R_l

        noted: list[Chunk] = []
        for x, y, some in chunks:
            self._walk(x, y, len(x), None if looked is None else some, add)
            noted += [Chunk(x, y, some)] if kept is None else []
        sums = [R[l] if l in R else torch.zeros_like(W, dtype=kept) for l, W in self.W.items()]
        if looked is None:
            return sums
        looked.append(noted)
        return [*sums, *(t.squeeze(0) for t in self._seen())]

    def _seen(self, leaves: int = 1) -> list[Tensor]:
        return [self.voice.take(leaves), *self.damping.take(leaves)]

    def _batches(self) -> Iterator[tuple[Tensor, Tensor, Sequence[int]]]:
        """What is here of every mini-batch, and how many rows it has of each shard."""
        order = self.size, self.seed, self.epoch
        for (x, y), counts in zip(self.rows.batches(*order), self.rows.batch_counts(*order), strict=True):
            yield x, y, counts

    def looks(self) -> bool:
        """Is the next step one that refreshes the second moments?"""
        return self.steps % self.refresh == 0 or self.steps in EARLY

    def weights(self) -> Weights:
        """The average of W, or W itself with average=False, as the model takes them; copies."""
        return {l: W.clone() for l, W in self.current().items()}

    def current(self) -> Weights:
        """As `weights`, but what the next sweep writes to."""
        W = self.mean if self.average else self.W
        return W if self.scaling is None else {**W, 1: self.scaling.fold(W[1])}

    def measures(self) -> dict[str, float]:
        """`step_length`, relative to the weights, and how many times steps were taken back so far (`rollbacks`)."""
        return {"step_length": self._length(self.size), "rollbacks": float(self.rollbacks)}

    def state_dict(self) -> dict[str, Any]:
        """Weights, momentum, average, moments, what a roll-back goes back to, and counters; copies."""
        return anchored_state.of(self)

    def check_state(self, state: dict[str, Any]) -> None:
        anchored_state.check(self, state)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state into this run; shapes must be those of this problem."""
        anchored_state.load(self, state)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which would tear apart what lies in one block of memory: a run is what it can be made of."""
        names = {*inspect.signature(type(self)).parameters, *RUN}
        given = {name: value for name, value in self.__dict__.items() if name in names}
        return given | ({"state": self.state_dict()} if "problem" in given else {})

    def __setstate__(self, given: dict[str, Any]) -> None:
        state = given.pop("state", None)
        self.__dict__.update(given)
        if state is not None:
            self._start(self.problem)
            self.load_state_dict(state)

    def _start(self, problem: Problem) -> None:
        self.problem, self.dtype, self.motion = problem, problem.dtype, Motion(problem)
        self.W, self.V, self.mean = self.motion.W, self.motion.V, self.motion.mean
        self.steps, self.epoch, self.rollbacks, self.shorter = 0, 0, 0, 1.0
        self.scaling = None
        self.damping = Damping(self.W, self.rho, self.rho_residual)
        self.walk, self.prox = Walk(problem, self.W, self.beta, self.gamma), self.loss.prepared(self.beta, self.W[1])
        self.leaves, self._kept = Leaves(problem, self.W, self.comm, self.split), None
        self.chunk = feed.chunk_rows(problem)
        self.voice, self.guard = Voice(problem, self.amplify), Guard(self.W, self.mean)

    def scale(self, rows: AbstractRows) -> None:
        """Standardise, and read the first weights in the unit in which they fit the rows better.

        Fresh weights are meant for inputs of unit size; those of a model that was trained already, for its own.
        """
        linear = self.problem.layers[1].map
        scaling = measured(rows, self.W[1].shape[1] > linear.inputs, self.standardise, self.comm)
        if scaling is None:
            return
        nothing = torch.zeros(2, dtype=torch.float64, device=self.problem.device)
        losses = [nothing.clone() for _ in self.comm.starts(rows)]
        for part, (_, x, y) in looked(rows, [slice(0, min(self.chunk, rows.total))], self.comm):
            outputs = (self.problem.forward(self.W, u) for u in (x, scaling(x)))
            losses[part] += torch.stack([self.loss(z, y).double().sum() for z in outputs])
        as_they_are, as_fresh = self.comm.total(losses, self.comm.order(rows), nothing).tolist()
        if not as_fresh <= as_they_are:
            self.motion.start(1, scaling.unfold(self.W[1]))
        self.scaling = scaling
        self.guard = Guard(self.W, self.mean)

    def _input(self, x: Tensor) -> Tensor:
        return x if self.scaling is None else self.scaling(x)

    def _length(self, rows: int) -> float:
        """eta_k: noise falls with the rows of a step, so that longer steps pay."""
        eta = self.eta or min(0.1, 0.05 * max(1.0, rows / 512) ** 0.4)
        return (
            self.shorter * eta * (1 / (1 + self.steps / self.half_life) + self.head_start / (1 + self.steps / 10) ** 2)
        )

    def _refresh(
        self, R: Weights, seen: Sequence[Tensor], of_first: Callable[[], Tensor], *, of_all: bool = False
    ) -> bool:
        """Take what was looked at into the moments, unless the last steps must be taken back.

        `of_first` gives the loss of the first weights on the same rows.
        """
        rows, now = seen[0].narrow(0, 0, 2).tolist()
        guard, L = self.guard, self.problem.L
        before = (lambda: float(of_first()) / rows) if self.steps else (lambda: now / rows)
        if guard.died(R[1], R[L]) or guard.exploded(now / rows, before, self.W, self.mean, of_all=of_all):
            self._roll_back()
            return False
        self.voice.adjust(seen[0], self.steps, self.W, self.mean, self.V)
        self.damping.refresh(seen[1:], rows)
        return True

    def _first_losses(self, chunks: Sequence[Chunk], leaves: int = 1) -> Tensor:
        """Those of the first weights, leaf by leaf."""
        losses = torch.zeros(leaves, 1, dtype=torch.float64, device=self.problem.device)
        for x, y, some in chunks:
            z = self.problem.forward(self.guard.first_W, self._input(some.of(x)))
            losses += some.spans.sums(self.loss(z, some.of(y)).double().unsqueeze(1))
        return losses

    def _guard(self) -> None:
        """Leave no weight behind that is not finite."""
        if not all(bool(torch.isfinite(W).all()) for W in self.W.values()):
            self._roll_back()

    def _roll_back(self) -> None:
        """Back to the weights of the last look that was fine, without momentum, and half the length from there."""
        kept_W, kept_mean = self.guard.back()
        for l, W in self.W.items():
            W.copy_(kept_W[l])
            self.mean[l].copy_(kept_mean[l])
            self.V[l].zero_()
        self.damping.reset()
        self.walk.factor(self.W, self.steps, True)
        self.shorter *= 0.5
        self.rollbacks += 1
        self.steps += 1
