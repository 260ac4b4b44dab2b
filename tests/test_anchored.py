"""AnchoredADMM: a sweep against its mathematics; chunks and batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers import Fn, blobs, net, rng, started
from torch_admm import AnchoredADMM, fit
from torch_admm.gram import with_ones
from torch_admm.maps import Dense

F64 = torch.float64
Weights = dict[int, Tensor]
SETTINGS: dict[str, Any] = {
    "eta": 0.05,
    "half_life": 7.0,
    "head_start": 0.4,
    "momentum": 0.6,
    "rho": 0.7,
    "rho_residual": 1.6,
    "beta": 0.8,
    "gamma": 1.7,
    "standardise": False,
}
ENTRYWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": lambda z, y: (z - y).square(),
    "logistic": lambda z, y: functional.softplus(z) - y * z,
}
FUNCTIONS: dict[type[nn.Module], Fn] = {nn.ReLU: torch.relu, nn.Tanh: torch.tanh}


# --- one sweep, straight from the mathematics


def length(k: int) -> float:
    """Of step k, relative to the weights, by the settings above."""
    return 0.05 * (1 / (1 + k / 7.0) + 0.4 / (1 + k / 10) ** 2)


def argmin(cost: Fn, around: Tensor, reach: float = 8.0) -> Tensor:
    """The cheapest z of every entry: the best point of a grid, then of ever finer grids around it."""
    z = around.unsqueeze(-1)
    for points in (40_001, *[41] * 7):  # the first tells two minima apart that cost almost the same
        grid = z + torch.linspace(-reach, reach, points, dtype=F64)
        z = grid.gather(-1, cost(grid).argmin(-1, keepdim=True))
        reach *= 4 / (points - 1)
    return z.squeeze(-1)


class Naive:
    """Sweeps over all rows in the textbook way; D is not scaled, since the relative step removes any scale."""

    def __init__(self, method: AnchoredADMM, act: type[nn.Module], bias: bool) -> None:
        self.method, self.h, self.bias = method, FUNCTIONS[act], bias
        self.W = {l: W.clone() for l, W in method.W.items()}
        self.start = {l: W.norm() for l, W in self.W.items()}
        self.V = {l: torch.zeros_like(W) for l, W in self.W.items()}
        self.G: dict[int, list[Tensor]] = {l: [] for l in self.W}
        self.C: dict[int, list[Tensor]] = {l: [] for l in self.W}
        self.steps, self.centred, self.louder = 0, False, 1.0

    def ones(self, a: Tensor) -> Tensor:
        return with_ones(a) if self.bias else a

    def residuals(self, x: Tensor, y: Tensor) -> tuple[Weights, Weights]:
        """a_0 .. a_{L-1} and r_1 .. r_L."""
        beta, gamma, L, cost = self.method.beta, self.method.gamma, len(self.W), ENTRYWISE[self.method.loss.name]
        a, m = {0: x}, {}
        for l in self.W:
            m[l] = self.ones(a[l - 1]) @ self.W[l].T
            a[l] = self.h(m[l])
        r = {
            L: argmin(lambda z: cost(z, y.unsqueeze(-1)) + beta * (z - m[L].unsqueeze(-1)).square(), m[L]) - m[L],
        }
        for l in range(L, 1, -1):
            matrix = self.W[l][:, : a[l - 1].shape[1]]
            side = math.sqrt(gamma) * torch.eye(matrix.shape[1], dtype=F64)
            stacked = torch.cat([math.sqrt(beta) * matrix, side])
            right = torch.cat([math.sqrt(beta) * r[l].T, torch.zeros(len(side), len(x), dtype=F64)])
            target = (a[l - 1] + torch.linalg.lstsq(stacked, right).solution.T).unsqueeze(-1)
            centre = m[l - 1].unsqueeze(-1)

            def hidden(z: Tensor, target: Tensor = target, centre: Tensor = centre) -> Tensor:
                return gamma * (target - self.h(z)).square() + beta * (z - centre).square()

            r[l - 1] = argmin(hidden, m[l - 1]) - m[l - 1]
        return a, r

    def knows_nothing(self, z: Tensor, y: Tensor) -> bool:
        """Is the loss of z at least 0.95 times that of z = 0?"""
        cost = ENTRYWISE[self.method.loss.name]
        return bool(cost(z, y).sum() > 0.95 * cost(torch.zeros_like(z), y).sum())

    def gain(self, z: Tensor, y: Tensor) -> float:
        """The least of the gains on the outputs z whose loss is within a twentieth of that of z = 0 of the best."""
        cost = ENTRYWISE[self.method.loss.name]
        gains = 0, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64
        losses = {k: float(cost(k * z, y).sum()) for k in gains}
        best = min(loss for k, loss in losses.items() if k >= 1)
        return min(k for k, loss in losses.items() if k >= 1 and loss <= best + 0.05 * losses[0])

    def sweep(self, x: Tensor, y: Tensor, look: bool) -> None:
        a, r = self.residuals(x, y)
        eta, L = length(self.steps), len(self.W)
        z = self.ones(a[L - 1]) @ self.W[L].T
        if self.steps == 0 and self.bias and self.knows_nothing(z, y):
            self.centred = True
            self.W[L] = torch.cat([self.W[L][:, :-1], self.W[L][:, -1:] - z.mean(0).unsqueeze(1)], 1)
        if self.steps == 1:
            self.louder = self.gain(z, y)
            self.W[L], self.V[L] = self.louder * self.W[L], self.louder * self.V[L]
        for l, W in self.W.items():
            inputs = self.ones(a[l - 1])  # those of the forward pass: before the last layer was changed
            if look:
                self.G[l].append(inputs.T @ inputs / len(x))
                self.C[l].append(r[l].T @ r[l] / len(x))
            G, C = (torch.stack(seen).mean(0) for seen in (self.G[l], self.C[l]))
            right = SETTINGS["rho"] * G.diagonal().mean() * torch.eye(len(G), dtype=F64)
            left = self.method.rho_residual * C.diagonal().mean() * torch.eye(len(C), dtype=F64)
            D = left @ torch.linalg.inv(C + left) @ (r[l].T @ inputs) @ torch.linalg.inv(G + right) @ right
            self.V[l] = self.method.momentum * self.steps / (self.steps + 3) * self.V[l] + D
            size = torch.maximum(W.norm(), self.start[l])
            self.W[l] = W + eta * size * self.V[l] / self.V[l].norm()
        self.steps += 1


@pytest.mark.parametrize("refresh", [1, 5])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize(("loss", "widths"), [("squared", (3, 5, 2)), ("logistic", (3, 5, 4, 1))])
def test_sweeps_are_the_naive_ones(
    loss: str, widths: tuple[int, ...], act: type[nn.Module], bias: bool, refresh: int
) -> None:
    """Seven sweeps, of which with refresh=5 some look at the moments and some do not."""
    x = torch.randn(43, 3, generator=rng(1), dtype=F64)
    y = torch.randn(43, widths[-1], generator=rng(2), dtype=F64) * 0.3 + 2 * x[:, :1]
    y = (y > 0).double() if loss == "logistic" else y
    method = AnchoredADMM(loss, batch_size="full", refresh=refresh, average=False, **SETTINGS)
    _, rows = started(method, net(*widths, act=act, bias=bias, dtype=F64), (x, y))
    naive = Naive(method, act, bias)
    looks = []
    for _ in range(7):
        looks.append(method.looks())
        naive.sweep(rows.x, rows.y, looks[-1])
        method.step()
        for l, W in method.weights().items():
            torch.testing.assert_close(W, naive.W[l], rtol=1e-6, atol=1e-7)
    assert naive.centred == bias
    assert naive.louder > 1
    assert looks[0]
    assert all(looks) == (refresh == 1)


@pytest.mark.parametrize("bias", [True, False])
def test_rows_as_they_came_give_the_sums_of_extended_ones(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of wide inputs only, so this is all that the narrow nets of the other tests leave out; at looks and between."""
    x = torch.randn(90, 30, generator=rng(1), dtype=F64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    plain, extended = (AnchoredADMM("logistic", batch_size="full") for _ in range(2))
    started(plain, net(30, 5, 1, bias=bias, dtype=F64), (x, y))
    started(extended, net(30, 5, 1, bias=bias, dtype=F64), (x, y))
    assert plain.problem.layers[1].map.prefers_plain(len(x))
    for _ in range(4):
        plain.step()
    monkeypatch.setattr(Dense, "prefers_plain", lambda self, rows: False)
    for _ in range(4):
        extended.step()
    for l, W in plain.weights().items():
        torch.testing.assert_close(W, extended.weights()[l], rtol=1e-9, atol=1e-9)


def test_a_sweep_of_a_linear_model_by_hand() -> None:
    """1-1 without bias, x = 1, 2, y = 3, 6, W = 1, squared error, beta = 1: r = (1, 2), and W grows by eta |W|."""
    model = nn.Linear(1, 1, bias=False, dtype=F64)
    nn.init.ones_(model.weight)
    x = torch.tensor([[1.0], [2.0]], dtype=F64)
    fit(
        model,
        (x, 3 * x),
        AnchoredADMM("squared", eta=0.2, head_start=0.25, standardise=False, average=False),
        max_sweeps=1,
        sinks=(),
    )
    assert float(model.weight.detach()) == pytest.approx(1.25, rel=1e-12)


def test_the_average_is_one_of_the_weights() -> None:
    """After every step the average moves by the same part of its way to W in all layers; the part shrinks.

    On so few rows that no output is made louder: a gain is one of the average too.
    """
    method, plain = (AnchoredADMM("squared", batch_size="full", average=on, **SETTINGS) for on in (True, False))
    x, y = blobs(30, 4, 2, F64)
    for each in (method, plain):
        started(each, net(4, 6, 1, dtype=F64), (x, y.double()))
    parts = []
    for _ in range(6):
        before = {l: W.clone() for l, W in method.weights().items()}
        method.step()
        plain.step()
        now, W = method.weights(), plain.weights()
        moves = torch.cat([(now[l] - before[l]).flatten() for l in W])
        ways = torch.cat([(W[l] - before[l]).flatten() for l in W])
        parts.append(float(moves @ ways / (ways @ ways)))
        torch.testing.assert_close(moves, parts[-1] * ways, rtol=1e-9, atol=1e-12)
    assert all(0 < later < earlier <= 1 for earlier, later in pairwise(parts))


def test_the_length_falls_as_documented() -> None:
    method = AnchoredADMM("squared", batch_size="full", **SETTINGS)
    x, y = blobs(40, 4, 2, F64)
    started(method, net(4, 3, 1, dtype=F64), (x, y.double()))
    for k in range(4):
        assert method.measures()["step_length"] == pytest.approx(length(k))
        method.step()


def test_the_length_falls_by_steps_not_epochs() -> None:
    method = AnchoredADMM("logistic", batch_size=10, eta=0.2, half_life=5.0, head_start=3.0)
    started(method, net(4, 3, 1), blobs(40))
    method.step()
    assert method.measures()["step_length"] == pytest.approx(0.2 / (1 + 4 / 5.0) + 0.6 / (1 + 4 / 10) ** 2)


def test_weight_decay_shrinks_weights_but_not_biases() -> None:
    x = torch.randn(100, 5, generator=rng(0))
    y = torch.randn(100, 2, generator=rng(1))
    plain, decayed = (AnchoredADMM("squared", weight_decay=decay, eta=0.1) for decay in (0.0, 0.9))
    models = [fit(net(5, 9, 2), (x, y), m, max_sweeps=8, sinks=(), restore_best=False).model for m in (plain, decayed)]
    sizes = [sum(float(p.detach().norm()) for p in model.parameters() if p.ndim == 2) for model in models]
    assert sizes[1] < 0.95 * sizes[0]


def test_weight_decay_of_one_step() -> None:
    """W is shortened by eta_k times the decay before it moves, b is not: the difference to a step without is W's."""
    x, y = blobs(40, 4, 2, F64)
    moved = []
    for decay in (0.0, 0.5):
        method = AnchoredADMM("squared", batch_size="full", average=False, weight_decay=decay, **SETTINGS)
        started(method, net(4, 3, 1, dtype=F64), (x, y.double()))
        start = {l: W.clone() for l, W in method.W.items()}
        method.step()
        moved.append(method.weights())
    for l, W in start.items():
        expected = -length(0) * 0.5 * W
        expected[:, -1] = 0
        torch.testing.assert_close(moved[1][l] - moved[0][l], expected, rtol=1e-9, atol=1e-12)


# --- chunks and batches


def trained(method: AnchoredADMM, chunk: int | None = None, sweeps: int = 6, seed: int = 0) -> list[Tensor]:
    """The weights of a 4-20-18-3 net on 150 rows: both sides of a step that is factored only at looks occur."""
    started(method, net(4, 20, 18, 3, dtype=F64), blobs(150, 4, 3, F64), seed)
    method.chunk = chunk or method.chunk
    for _ in range(sweeps):
        method.step()
    return [W.clone() for W in method.weights().values()]


@pytest.mark.parametrize("chunk", [7, 64, 150])
@pytest.mark.parametrize("standardise", [True, False])
def test_chunks_change_nothing(chunk: int, standardise: bool) -> None:
    whole, cut = (
        trained(AnchoredADMM("cross_entropy", batch_size="full", standardise=standardise), size)
        for size in (None, chunk)
    )
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [32, 149, "auto"])  # the last batch has 22 rows, 1 row, or whatever it has
def test_a_seed_decides_all(size: Any) -> None:
    first, again, other = (trained(AnchoredADMM("cross_entropy", batch_size=size), seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(bool(torch.isfinite(W).all()) for W in first)


def test_a_batch_larger_than_the_rows_is_all_of_them() -> None:
    full, larger = (trained(AnchoredADMM("cross_entropy", batch_size=size)) for size in ("full", 10_000))
    assert all(torch.equal(a, b) for a, b in zip(full, larger, strict=True))


def test_batch_size_of_fit_wins() -> None:
    x, y = blobs(100)
    method = AnchoredADMM("logistic", batch_size="full")
    fit(net(4, 5, 1), (x, y), method, batch_size=10, max_sweeps=1, sinks=())
    assert method.steps == 10


@pytest.mark.parametrize("weights", [10, 10**6])
@pytest.mark.parametrize("rows", [1, 2, 31, 32, 500, 10_000, 1_000_000])
def test_auto_batches(rows: int, weights: int) -> None:
    size = AnchoredADMM("squared").batch_size_for(rows, weights)
    assert 1 <= size <= rows
    assert rows / size >= 40 or size <= 32
    assert size <= (1024 if weights == 10 else 512)


def test_outputs_become_louder_only_where_that_is_worth_it() -> None:
    """Fresh weights whisper; those of a trained model, which separates the classes, would gain by shouting too."""
    data = blobs(400, 4, 2)
    model = net(4, 20, 1)

    def growth(amplify: bool) -> float:
        method = AnchoredADMM("logistic", batch_size="full", average=False, amplify=amplify)
        started(method, model, data)
        norms = [float(method.W[2].norm())]
        for _ in range(4):
            method.step()
            norms.append(float(method.W[2].norm()))
        return max(later / before for before, later in pairwise(norms))

    assert growth(amplify=True) > 1.8
    assert growth(amplify=False) < 1.2
    fit(model, data, AnchoredADMM("logistic"), max_sweeps=30, sinks=())
    assert growth(amplify=True) < 1.2


@pytest.mark.parametrize("average", [True, False])
def test_outputs_start_around_zero_unless_they_mean_something(average: bool) -> None:
    """A bias of 3 on a fresh model is taken out before the first step; the mean of a trained one stays."""
    x, y = blobs(400, 4, 2)
    model = net(4, 20, 1)
    last = list(model.parameters())[-1]
    nn.init.constant_(last, 3.0)

    def mean_after_a_step(amplify: bool) -> float:
        method = AnchoredADMM("logistic", batch_size="full", eta=1e-4, average=average, amplify=amplify)
        problem, rows = started(method, model, (x, y))
        method.step()
        return float(problem.forward(method.weights(), rows.x).mean())

    assert abs(mean_after_a_step(amplify=True)) < 0.1
    assert mean_after_a_step(amplify=False) > 2.5
    fit(model, (x, y), AnchoredADMM("logistic"), max_sweeps=30, sinks=())
    nn.init.constant_(last, last.item() + 1)  # a trained model that leans to one side
    trained = model(x).mean().item()
    assert abs(trained) > 0.5
    assert mean_after_a_step(amplify=True) == pytest.approx(trained, abs=0.1)
