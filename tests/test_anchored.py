"""AnchoredADMM: a sweep against its mathematics, chunks and batches, resuming, roll-backs, and a loop of one's own."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import Fn, blobs, net, rng, started
from torch_admm import AnchoredADMM, BoundADMM, Outcome, Patience, fit
from torch_admm.gram import with_ones

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
        self.steps = 0

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

    def sweep(self, x: Tensor, y: Tensor, look: bool) -> None:
        a, r = self.residuals(x, y)
        eta = length(self.steps)
        for l, W in self.W.items():
            inputs = self.ones(a[l - 1])
            if look:
                self.G[l].append(inputs.T @ inputs / len(x))
                self.C[l].append(r[l].T @ r[l] / len(x))
            G, C = (torch.stack(seen).mean(0) for seen in (self.G[l], self.C[l]))
            right = self.method.rho * G.diagonal().mean() * torch.eye(len(G), dtype=F64)
            left = self.method.rho_residual * C.diagonal().mean() * torch.eye(len(C), dtype=F64)
            D = left @ torch.linalg.inv(C + left) @ (r[l].T @ inputs) @ torch.linalg.inv(G + right) @ right
            self.V[l] = self.method.momentum * self.V[l] + D
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
    x = torch.randn(23, 3, generator=rng(1), dtype=F64)
    y = torch.randn(23, widths[-1], generator=rng(2), dtype=F64)
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
    assert looks[0]
    assert all(looks) == (refresh == 1)


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
    """After every step the average moves by the same part of its way to W in all layers; the part shrinks."""
    method, plain = (AnchoredADMM("squared", batch_size="full", average=on, **SETTINGS) for on in (True, False))
    x, y = blobs(60, 4, 2, F64)
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


# --- save, load, go on


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("standardise", [True, False])
@pytest.mark.parametrize("size", [32, "full"])
def test_k_plus_m_sweeps(size: Any, standardise: bool, average: bool) -> None:
    """The same bits as in a straight run, through a file that holds nothing but tensors and numbers."""
    x, y = blobs(200, 4, 3)
    data = (20 * x + 5, y)

    def run(sweeps: int, state: Any = None) -> tuple[nn.Module, dict[str, Any]]:
        method = AnchoredADMM("cross_entropy", batch_size=size, standardise=standardise, average=average, refresh=3)
        model = net(4, 24, 18, 3)
        fit(model, data, method, max_sweeps=sweeps, sinks=(), seed=2, restore_best=False, state=state)
        return model, method.state_dict()

    straight, _ = run(9)
    file = io.BytesIO()
    torch.save(run(4)[1], file)
    file.seek(0)
    resumed, _ = run(5, torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_resuming_before_a_roll_back() -> None:
    """What a roll-back goes back to is part of the state: the same bits after weights broke in the same way."""
    data = blobs(200, 4, 3)
    methods = [AnchoredADMM("cross_entropy", batch_size=50, refresh=50) for _ in range(2)]
    for method in methods:
        started(method, net(4, 12, 3), data)
    for _ in range(3):
        methods[0].step()
    assert not methods[0].looks()
    methods[1].load_state_dict(methods[0].state_dict())
    for method in methods:
        method.W[1].fill_(math.nan)
        method.step()
        assert method.rollbacks == 1
        method.step()
    first, second = (method.weights() for method in methods)
    assert all(torch.equal(first[l], second[l]) for l in first)


def test_resuming_with_wide_layers() -> None:
    """Moments that keep leading eigenvectors only are part of the state too."""
    x = torch.randn(90, 140, generator=rng(1))
    data = x, x[:, 0] * x[:, 1]

    def run(sweeps: int, state: Any = None) -> tuple[nn.Module, dict[str, Any]]:
        method, model = AnchoredADMM("squared", refresh=2), net(140, 150, 1)
        fit(model, data, method, max_sweeps=sweeps, sinks=(), restore_best=False, state=state)
        return model, copy.deepcopy(method.state_dict())

    straight, resumed = run(4)[0], run(2, run(2)[1])[0]
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_state_of_something_else() -> None:
    x, y = blobs()
    state = AnchoredADMM("logistic")
    started(state, net(4, 7, 1), (x, y))
    for wrong, message in (
        ({"model": {}}, r"state has no 'W'; one that AnchoredADMM\.state_dict\(\) gave"),
        (state.state_dict(), r"state: W\[1\] is \(7, 5\); \(6, 5\) is expected"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(net(4, 6, 1), (x, y), AnchoredADMM("logistic"), max_sweeps=1, sinks=(), state=wrong)


# --- roll-backs


@pytest.mark.parametrize("size", [16, "full"])
@pytest.mark.parametrize("eta", [50.0, 1e3])
def test_what_explodes_is_taken_back(eta: float, size: Any) -> None:
    x, y = blobs(200, 4, 3)
    method = AnchoredADMM("cross_entropy", eta=eta, batch_size=size, refresh=4)
    result = fit(net(4, 24, 20, 3), (x, y), method, max_sweeps=30, sinks=(), restore_best=False)
    backs = [row["rollbacks"] for row in result.history]
    assert result.outcome is Outcome.MAX_SWEEPS
    assert backs[0] == 0 < backs[-1]
    assert backs == sorted(backs)
    assert result.history[-1]["step_length"] < 0.5 * result.history[0]["step_length"]
    assert all(bool(torch.isfinite(p).all()) for p in result.model.parameters())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [16, "full"])
def test_a_run_recovers_from_an_explosion(size: Any, seed: int) -> None:
    """Back to weights that were fine: after enough halvings of a length that is far too large, training works."""
    x, y = blobs(200, 4, 3)
    method = AnchoredADMM("cross_entropy", eta=2.0, half_life=30, head_start=0.0, batch_size=size, refresh=1)
    result = fit(net(4, 24, 20, 3), (x, y), method, max_sweeps=60, sinks=(), restore_best=False, seed=seed)
    assert result.history[-1]["rollbacks"] >= 1
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]


def test_a_network_that_has_died_is_taken_back() -> None:
    """Its loss may be that of a good guess, but no residual reaches the first layer, so no step would wake it up."""
    x, y = blobs(200, 4, 3)
    method = AnchoredADMM("cross_entropy", batch_size=16, refresh=4)
    started(method, net(4, 24, 20, 3), (x, y))
    method.step()
    method.W[1][:, -1] = -1e3  # biases under which no unit is ever active
    method.step()
    assert method.rollbacks == 1
    assert float(method.W[1][:, -1].abs().max()) < 10


def test_a_network_that_was_never_alive_still_learns_its_biases() -> None:
    x, y = blobs(200, 4, 3)
    model = net(4, 24, 3)
    torch.nn.init.constant_(model[0].bias, -1e3)  # type: ignore[arg-type]
    result = fit(model, (x, y), AnchoredADMM("cross_entropy"), max_sweeps=5, sinks=())
    assert result.history[-1]["rollbacks"] == 0
    assert result.history[-1]["loss"] <= result.history[0]["loss"]


def test_weights_that_keep_failing_are_given_up_for_the_first() -> None:
    """The ones kept may be on the brink: when nothing went well from there twice, training starts again."""
    x, y = blobs(200, 4, 3)
    method = AnchoredADMM("cross_entropy", batch_size=16, refresh=4)
    started(method, net(4, 24, 20, 3), (x, y))
    method.step()
    kept, first = method.kept_W[2].clone(), method.first_W[2].clone()
    assert not torch.equal(kept, first)
    method._roll_back()
    assert torch.equal(method.W[2], kept)
    method._roll_back()
    assert torch.equal(method.W[2], first)


@pytest.mark.parametrize("size", [16, "full"])
def test_weights_that_are_not_finite_do_not_stay(size: Any) -> None:
    """A value that broke W once is gone after the next look, and so is all that was made from it."""
    x, y = blobs(200, 4, 3)
    method = AnchoredADMM("cross_entropy", batch_size=size, refresh=4)
    _, rows = started(method, net(4, 24, 20, 3), (x, y))
    for _ in range(3):
        method.step()
    for W in method.W.values():
        W.fill_(math.nan)
    for _ in range(40):
        method.step()
    assert all(bool(torch.isfinite(W).all()) for W in (*method.W.values(), *method.weights().values()))
    assert 1 <= method.rollbacks <= 3
    start, now = net(4, 24, 20, 3)(x).detach(), method.problem.forward(method.weights(), rows.x)
    assert float(method.loss(now, rows.y).mean()) < 0.8 * float(method.loss(start, rows.y).mean())


def test_a_lucky_first_batch_does_not_end_training() -> None:
    """Rows drawn first that fit already say nothing about the others, whose loss is not an explosion."""
    x = torch.randn(60, 3, generator=rng(0))
    model = net(3, 8, 1)
    y = 5 * x.sum(1, keepdim=True)
    method = AnchoredADMM("squared", batch_size=1)
    _, rows = started(method, model, (x, y))
    first, _ = next(rows.batches(1, 0, 0))
    y[(x == first).all(1)] = model(first).detach()
    result = fit(model, (x, y), AnchoredADMM("squared", batch_size=1), max_sweeps=4, sinks=())
    assert result.best["loss"] < 0.5 * result.history[0]["loss"]


# --- settings of a run


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


def test_validation_keeps_rows_out() -> None:
    x, y = blobs(200)
    method = AnchoredADMM("logistic")
    result = fit(net(4, 8, 1), (x, y), method, validation=0.3, max_sweeps=2, sinks=(), seed=1)
    assert method.rows.count == 140
    assert {"validation_loss", "validation_accuracy"} <= result.history[0].keys()
    kept = {tuple(row) for chunk in method.rows.chunks(64) for row in chunk.x.tolist()}
    assert kept < {tuple(row) for row in x.tolist()}
    other = AnchoredADMM("logistic")
    fit(net(4, 8, 1), (x, y), other, validation=0.3, max_sweeps=1, sinks=(), seed=2)
    assert {tuple(row) for chunk in other.rows.chunks(64) for row in chunk.x.tolist()} != kept


@pytest.mark.parametrize(("part", "rows", "expected"), [(0.999, 10, 1), (1e-9, 10, 9), (0.5, 2, 1)])
def test_validation_leaves_a_row_on_either_side(part: float, rows: int, expected: int) -> None:
    x, y = blobs(rows)
    method = AnchoredADMM("logistic")
    fit(net(4, 3, 1), (x, y), method, validation=part, max_sweeps=1, sinks=())
    assert method.rows.count == expected


def test_early_stopping() -> None:
    """Labels by chance: what is learned is of no use for the rows kept out, and the best of them is handed back."""
    x = torch.randn(80, 6, generator=rng(0))
    y = torch.randint(0, 2, (80,), generator=rng(1))
    result = fit(
        net(6, 32, 1), (x, y), AnchoredADMM("logistic"), validation=0.5, monitor="validation_loss", stop=Patience(3),
        max_sweeps=400, sinks=(),
    )  # fmt: skip
    losses = [row["validation_loss"] for row in result.history]
    assert result.outcome is Outcome.PATIENCE
    assert len(losses) < 400
    assert result.best["validation_loss"] == min(losses) == losses[-4]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"average": "yes"}, r"average is 'yes'; one of True, False is expected"),
    *[({name: value}, rf"{name} is .*; a finite number above 0 is expected")
      for name in ("eta", "half_life", "rho", "rho_residual", "beta", "gamma")
      for value in (0, -1.0, math.nan, math.inf, "1", True)],
    ({"momentum": 1}, r"momentum is 1; a number of at least 0 and below 1 is expected"),
    ({"momentum": -0.1}, r"momentum is -0\.1; a number of at least 0"),
    ({"batch_size": "half"}, r"batch_size is 'half'; one of 'auto', 'full' is expected"),
    ({"batch_size": 0}, r"batch_size is 0; a whole number of at least 1 is expected"),
    ({"batch_size": 2.5}, r"batch_size is 2\.5; a whole number of at least 1"),
    ({"batch_size": True}, r"batch_size is True; a whole number of at least 1"),
    ({"refresh": 0}, r"refresh is 0; a whole number of at least 1 is expected"),
    ({"head_start": -0.5}, r"head_start is -0\.5; a finite number of at least 0 is expected"),
    ({"weight_decay": -1}, r"weight_decay is -1; a number of at least 0"),
    ({"standardise": "yes"}, r"standardise is 'yes'; one of None, True, False is expected"),
    ({"loss": "crossentropy"}, r"'crossentropy'.*cross_entropy"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnchoredADMM(**({"loss": "squared"} | settings))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (0, r"validation is 0 of 120 rows; a number between 0 and 1"),
        (1, r"validation is 1; a number of at least 0 and below 1"),
        (2, r"validation is 2; a number of at least 0 and below 1"),
        ("half", r"validation is 'half'; a number of at least 0"),
        (True, r"validation is True; a number of at least 0"),
    ],
)
def test_bad_validation(part: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(net(4, 3, 1), blobs(), AnchoredADMM("logistic"), validation=part, sinks=())


def test_validation_of_one_row() -> None:
    with pytest.raises(ValueError, match=r"validation is 0\.5 of 1 rows; .* 2 rows, are needed"):
        fit(net(4, 3, 1), blobs(1), AnchoredADMM("logistic"), validation=0.5, sinks=())


# --- a loop of one's own


def loop(model: nn.Module, opt: BoundADMM, epochs: int, inside: Callable[[int], bool] = lambda _: False) -> None:
    """Train on blobs of three classes; `inside` says which epochs run in inference mode."""
    for epoch in range(epochs):
        loader = DataLoader(TensorDataset(*blobs(300, 4, 3)), 50, shuffle=True, generator=rng(epoch))
        with torch.inference_mode(inside(epoch)):
            for x, y in loader:
                opt.step(x, y)


def accuracy(model: nn.Module) -> float:
    x, y = blobs(300, 4, 3)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def test_bind() -> None:
    model = net(4, 24, 16, 3)
    opt = AnchoredADMM(loss="cross_entropy").bind(model)
    before = accuracy(model)
    loop(model, opt, 25)
    assert before < 0.5
    assert accuracy(model) > 0.9


@pytest.mark.parametrize("inside", [lambda _: True, lambda e: e % 2 == 0, lambda e: e % 2 == 1])
def test_bind_in_inference_mode(inside: Callable[[int], bool]) -> None:
    """The same bits whatever surrounds the steps."""
    models = [net(4, 24, 16, 3) for _ in range(2)]
    for model, where in zip(models, (lambda _: False, inside), strict=True):
        loop(model, AnchoredADMM("cross_entropy").bind(model), 4, where)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert not any(p.is_inference() for p in models[1].parameters())


def test_bind_made_in_inference_mode() -> None:
    model = net(4, 24, 3)
    with torch.inference_mode():
        opt = AnchoredADMM("cross_entropy", standardise=True).bind(model)
    loop(model, opt, 2, lambda e: e == 1)
    with torch.inference_mode():
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    loop(model, opt, 2, lambda e: e == 1)
    assert accuracy(model) > 0.4


@pytest.mark.parametrize("wanted", [True, False])
def test_no_graph(wanted: bool) -> None:
    """Parameters stay leaves without gradients, whatever their requires_grad, which stays as it is."""
    model = net(4, 10, 3).requires_grad_(wanted)
    start = [p.clone() for p in model.parameters()]
    kept = list(model.parameters())
    x, y = blobs(100, 4, 3)
    opt = AnchoredADMM("cross_entropy").bind(model)
    with torch.enable_grad():
        for _ in range(3):
            opt.step(x.requires_grad_(), y)
    for p, q, before in zip(model.parameters(), kept, start, strict=True):
        assert p is q
        assert p.is_leaf
        assert p.grad is None
        assert p.grad_fn is None
        assert p.requires_grad is wanted
        assert not torch.equal(p, before)
    assert x.grad is None
    assert not any(t.requires_grad for t in (*opt.method.W.values(), *opt.method.V.values()))


def test_bound_state() -> None:
    """Five epochs, or two, a file and three in new objects: the same bits."""
    models = [net(4, 24, 18, 3) for _ in range(3)]
    opts = [AnchoredADMM("cross_entropy", standardise=True).bind(model) for model in models]
    x, y = blobs(300, 4, 3)
    for epoch in range(5):
        for i in range(0, 300, 64):
            opts[0].step(10 * x[i : i + 64], y[i : i + 64])
            opts[1 if epoch < 2 else 2].step(10 * x[i : i + 64], y[i : i + 64])
        if epoch == 1:
            file = io.BytesIO()
            torch.save(opts[1].state_dict(), file)
            file.seek(0)
            opts[2].load_state_dict(torch.load(file, weights_only=True))
            assert all(torch.equal(a, b) for a, b in zip(models[1].parameters(), models[2].parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[2].parameters(), strict=True))


def test_a_state_in_memory_stays_as_it_was() -> None:
    """What state_dict gave is not changed by later steps, so going back to it goes back."""
    model = net(4, 10, 3)
    opt = AnchoredADMM("cross_entropy").bind(model)
    loop(model, opt, 1)
    state, then = opt.state_dict(), [p.detach().clone() for p in model.parameters()]
    loop(model, opt, 1)
    opt.load_state_dict(state)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), then, strict=True))


def test_bound_is_fit_without_the_loop() -> None:
    """The batches of an epoch by hand: the same bits as in fit."""
    x, y = blobs(200, 4, 3, dtype=torch.float64)
    by_fit, by_hand = (net(4, 12, 3, dtype=torch.float64) for _ in range(2))
    method = AnchoredADMM("cross_entropy", batch_size=50)
    fit(by_fit, (x, y), method, max_sweeps=3, sinks=(), restore_best=False)
    opt = AnchoredADMM("cross_entropy").bind(by_hand)
    for epoch in range(3):
        for batch in method.rows.batches(50, 0, epoch):
            opt.step(*batch)
    for a, b in zip(by_fit.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(a, b)


X, Y = blobs(30, 4, 3)
NAN = X.clone()
NAN[7, 2] = math.nan
BATCHES: dict[str, tuple[Any, Any, str]] = {
    "wrong width": (X[:, :3], Y, r"batch: X has shape \(30, 3\); \(rows, 4\) is expected"),
    "flat": (X[:, 0], Y, r"batch: X has shape \(30,\); \(rows, 4\) is expected"),
    "float labels": (X, Y.float(), r"y has dtype torch\.float32, expected integer class labels"),
    "label 3": (X, Y + 1, r"y\[\d+\] is 3: expected class labels 0\.\.2"),
    "rows disagree": (X, Y[:29], r"batch: X has 30 rows but y has 29; they must agree"),
    "no rows": (X[:0], Y[:0], r"batch: X is empty, shape \(0, 4\)"),
    "doubles": (X.double(), Y, r"batch: X is torch\.float64 but the model's weights are torch\.float32"),
}


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("case", BATCHES)
def test_bad_batches(case: str, steps: int) -> None:
    """At the first step and at one that does not look: refused before anything changes."""
    x, y, message = BATCHES[case]
    model = net(4, 6, 3)
    opt = AnchoredADMM("cross_entropy").bind(model)
    for _ in range(steps):
        opt.step(X, Y)
    assert opt.method.looks() == (steps == 0)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        opt.step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    opt.step(X, Y)  # and nothing of it is left
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_nan_at_the_first_step() -> None:
    opt = AnchoredADMM("cross_entropy").bind(net(4, 6, 3))
    with pytest.raises(ValueError, match=r"batch: X has nan at row 7, column 2; finite values are expected"):
        opt.step(NAN, Y)


def test_nan_later_is_taken_back() -> None:
    """A step that does not look lets a NaN through; the next look takes it back."""
    model = net(4, 24, 20, 3)
    opt = AnchoredADMM("cross_entropy", refresh=4).bind(model)
    for step in range(40):
        opt.step(NAN if step == 5 else X, Y)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert opt.method.rollbacks == 1


def test_bound_flattens() -> None:
    model = nn.Sequential(nn.Flatten(), *net(4, 6, 3))
    opt = AnchoredADMM("cross_entropy").bind(model)
    for _ in range(5):
        opt.step(X.reshape(30, 2, 2), Y)
    assert bool(torch.isfinite(model(X.reshape(30, 2, 2))).all())
