"""BregmanADMM is Algorithm 1: a sweep by hand, each step a minimisation, and where and why it stalls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import blobs, net, started
from torch_admm import BregmanADMM, fit, from_module
from torch_admm.gram import with_ones

F64 = torch.float64


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)[:, None]


def test_one_sweep_by_hand() -> None:
    """Net 1-1-1 without biases, two rows, beta = gamma = 1, the paper's hinge; all numbers worked on paper."""
    model = net(1, 1, 1, bias=False, dtype=F64)
    method = BregmanADMM("hinge", gamma=1.0, warm_start=0)
    started(method, model, (column(1, 2), torch.tensor([1, 0])))
    start = {
        "W": {1: column(9), 2: column(1)},
        "a": {1: column(9, 9)},
        "z": {1: column(2, 2), 2: column(1, 0)},
        "lam": column(0, 0),
        "sweeps": 0,
    }
    method.load_state_dict(start)
    method.sweep()
    expected = {
        "W1": (method.W[1], column(6 / 5)),  # (2*1 + 2*2) / (1 + 4)
        "a1": (method.a[1], column(1.5, 1)),  # (z_2 + h(z_1)) / 2, with W_2 = 1
        "z1": (method.z[1], column(1.35, 1.7)),  # the mean of a_1 and m_1 = (1.2, 2.4), all positive
        "W2": (method.W[2], column(6 / 13)),  # 1.5 / (1.5^2 + 1)
        "z2": (method.z[2], column(1, 0)),  # m_2 = (9/13, 6/13), each half a unit or less from its kink
        "lam": (method.lam, column(4 / 13, -6 / 13)),  # z_2 - m_2, as the paper prints it
    }
    for name, (got, want) in expected.items():
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9), (name, got, want)


def objective(
    method: BregmanADMM, x: Tensor, y: Tensor, a: dict[int, Tensor], z: dict[int, Tensor], W: dict[int, Tensor]
) -> float:
    """The augmented objective; under "consistent" the multiplier acts on z_L - m_L, under "paper" on z_L."""
    L, layers = method.problem.L, method.problem.layers
    m = {l: layers[l].map.forward(W[l], x if l == 1 else a[l - 1]) for l in layers}
    total = (
        method.loss(z[L], y).sum() + (method.lam * (z[L] - (m[L] if method.multiplier == "consistent" else 0))).sum()
    )
    for l in layers:
        total += method.beta[l] * (z[l] - m[l]).square().sum()
        if l < L:
            total += method.gamma[l] * (a[l] - layers[l].h(z[l])).square().sum()
    return float(total)


def naive_sweep(method: BregmanADMM, x: Tensor, y: Tensor) -> Iterator[tuple[str, Any]]:
    """Algorithm 1 with textbook solves, yielding after every single step."""
    layers, L, beta, gamma = method.problem.layers, method.problem.L, method.beta, method.gamma
    a, z, W = ({l: t.clone() for l, t in part.items()} for part in (method.a, method.z, method.W))

    def seen(l: int) -> Tensor:
        return z[l] + method.lam / (2 * beta[l]) if l == L and method.multiplier == "consistent" else z[l]

    def inputs(l: int) -> Tensor:
        return x if l == 1 else a[l - 1]

    for l in range(1, L + 1):
        W[l] = torch.linalg.lstsq(with_ones(inputs(l)), seen(l)).solution.T
        yield f"W{l}", (a, z, W)
        m = with_ones(inputs(l)) @ W[l].T
        if l < L:
            V, b = W[l + 1][:, :-1], W[l + 1][:, -1]
            K = beta[l + 1] * V.T @ V + gamma[l] * torch.eye(V.shape[1], dtype=F64)
            right = beta[l + 1] * (seen(l + 1) - b) @ V + gamma[l] * layers[l].h(z[l])
            a[l] = torch.linalg.solve(K, right.T).T
            yield f"a{l}", (a, z, W)
            z[l] = layers[l].h.minimise(a[l], m, beta[l], gamma[l])
        else:
            z[l] = method.loss.prox(m - method.lam / (2 * beta[l]), y, beta[l])
        yield f"z{l}", (a, z, W)


CASES = [("hinge", 1, 2), ("logistic", 1, 2), ("cross_entropy", 3, 3), ("one_vs_rest_hinge", 3, 3)]


@pytest.mark.parametrize("multiplier", ["paper", "consistent"])
@pytest.mark.parametrize(("loss", "outputs", "classes"), CASES)
@pytest.mark.parametrize("act", [nn.ReLU, nn.Hardtanh, nn.Tanh])
def test_every_step_minimises(
    multiplier: Literal["paper", "consistent"], loss: str, outputs: int, classes: int, act: type[nn.Module]
) -> None:
    """With lam fixed no step raises the augmented objective, and the sweep is the naive one."""
    method = BregmanADMM(loss, warm_start=1000, multiplier=multiplier, beta=[1.0, 0.5, 2.0], gamma=[10.0, 3.0])
    _, rows = started(method, net(4, 7, 5, outputs, act=act, dtype=F64), blobs(90, 4, classes, F64))
    method.lam.normal_(generator=torch.Generator().manual_seed(3)).mul_(0.3)
    for _ in range(4):
        last = objective(method, rows.x, rows.y, method.a, method.z, method.W)
        for name, state in naive_sweep(method, rows.x, rows.y):
            now = objective(method, rows.x, rows.y, *state)
            assert now <= last + 1e-7 * abs(last), name
            last = now
        method.sweep()
        for part, naive in zip((method.a, method.z, method.W), state, strict=True):
            for l in part:
                torch.testing.assert_close(part[l], naive[l], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", ["logistic", "squared", "huber"])
def test_full_dual_step_makes_lam_minus_the_gradient(loss: str) -> None:
    method = BregmanADMM(loss, warm_start=0, dual_step=1.0)
    x, y = blobs(60, 4, 2, F64)
    _, rows = started(method, net(4, 6, 1, dtype=F64), (x, y.double()))
    for _ in range(3):
        method.sweep()
        z = method.z[2].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(method.loss(z, rows.y).sum(), z)
        torch.testing.assert_close(method.lam, -gradient, rtol=1e-6, atol=1e-8)


def test_full_dual_step_makes_lam_minus_a_subgradient_of_the_hinge() -> None:
    method = BregmanADMM("hinge", warm_start=0, dual_step=1.0)
    _, rows = started(method, net(4, 6, 1, dtype=F64), blobs(60, 4, 2, F64))
    for _ in range(5):
        method.sweep()
        sign = 2 * rows.y - 1  # the hinge of label 0 mirrors that of label 1 at z = 1/2
        margin, slope = sign * (method.z[2] - rows.y), sign * method.lam
        tight = 1e-9
        assert bool(((slope > -tight) & (slope < 1 + tight)).all())
        assert bool((slope[margin < -tight] > 1 - tight).all())
        assert bool((slope[margin > tight] < tight).all())


def test_paper_prints_half_the_dual_step() -> None:
    method = BregmanADMM("hinge", warm_start=0, beta=3.0)
    started(method, net(4, 6, 1, dtype=F64), blobs(60, 4, 2, F64))
    method.sweep()
    m = method.problem.layers[2].map.forward(method.W[2], method.a[1])
    torch.testing.assert_close(method.lam, 3.0 * (method.z[2] - m))


def test_stalls_at_any_feasible_point() -> None:
    """Multiplier "paper": where z = W a, a = h(z) and lam = -dloss nothing moves, however large the loss is."""
    method = BregmanADMM("squared", warm_start=0, dual_step=1.0, init="model", multiplier="paper")
    x, y = blobs(200, 4, 2, F64)
    problem, rows = started(method, net(4, 6, 1, act=nn.Tanh, dtype=F64), (x, y.double()))
    W = problem.read()
    method.lam.copy_(-2 * (method.z[2] - rows.y))
    before = float(method.loss(problem.forward(W, rows.x), rows.y).mean())
    for _ in range(20):
        method.sweep()
    for l in W:
        torch.testing.assert_close(method.W[l], W[l], rtol=1e-5, atol=1e-6)
    leaves = {l: w.clone().requires_grad_() for l, w in W.items()}
    method.loss(problem.forward(leaves, rows.x), rows.y).mean().backward()
    slope = max(float(w.grad.abs().max()) for w in leaves.values() if w.grad is not None)
    assert before > 0.2
    assert slope > 0.1  # far from any minimum


def test_consistent_multiplier_lets_the_slack_absorb_the_loss() -> None:
    """The relaxed loss of z_L goes to zero, the slack a - h(z) with it, while the network's own loss stays up."""
    method = BregmanADMM("hinge", warm_start=5, dual_step=1.0, multiplier="consistent")
    problem, rows = started(method, net(4, 12, 1, dtype=F64), blobs(300, 4, 2, F64))
    for _ in range(150):
        method.sweep()
    relaxed = float(method.loss(method.z[2], rows.y).mean())
    network = float(method.loss(problem.forward(method.W, rows.x), rows.y).mean())
    assert relaxed < 0.01
    assert network > 0.15


@pytest.mark.parametrize("chunk_rows", [1, 7, 90, 1000])
def test_chunks_change_nothing(chunk_rows: int) -> None:
    methods = [BregmanADMM("hinge", warm_start=1, chunk_rows=size) for size in (None, chunk_rows)]
    for method in methods:
        started(method, net(4, 7, 5, 1, dtype=F64), blobs(90, 4, 2, F64))
        for _ in range(3):
            method.sweep()
    for l in methods[0].W:
        torch.testing.assert_close(methods[0].W[l], methods[1].W[l], rtol=1e-8, atol=1e-8)


class LargestStorage(TorchDispatchMode):
    """The bytes of the largest tensor made, other than views of what was there before."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def test_working_memory_is_one_chunk() -> None:
    method = BregmanADMM("hinge", warm_start=0, chunk_rows=50)
    _, rows = started(method, net(4, 16, 8, 1), blobs(5000, 4))
    with LargestStorage([rows.x, rows.y, method.lam, *method.a.values(), *method.z.values()]) as largest:
        method.sweep()
    assert largest.bytes <= max(50 * 17 * 4, 3 * 17 * 17 * 8)  # a chunk, or the Gram matrices that are factored


class Factorisations(TorchDispatchMode):
    """The sizes of the matrices that are factored."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "cholesky_ex" in func._schema.name:
            self.sizes.append(args[0].shape[-1])
        assert not any(word in func._schema.name for word in ("eigh", "svd", "lstsq", "lu_factor", "linalg_solve_ex"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk_rows", [10, 1000])
def test_small_side_and_once_a_sweep(chunk_rows: int) -> None:
    """One factorisation an a step, on the smaller side, and one a hidden Gram; none a chunk, none for the data."""
    method = BregmanADMM("hinge", chunk_rows=chunk_rows)
    started(method, net(9, 20, 30, 1), blobs(300, 9))
    with Factorisations() as factorisations:
        method.sweep()
    # a_1 meets W_2 of 30 x 20; a_2 meets the single row of W_3 before the Gram of a_1, whose sums may be on their way
    assert factorisations.sizes == [20, 1, 20, 30]


@pytest.mark.parametrize(("stored", "bytes_each"), [(None, 4), (torch.float32, 4), (torch.bfloat16, 2)])
def test_state_dtype_bounds_the_stored_state(stored: torch.dtype | None, bytes_each: int) -> None:
    method = BregmanADMM("hinge", state_dtype=stored)
    started(method, net(4, 16, 1), blobs(400, 4))
    state = [*method.a.values(), *method.z.values(), method.lam]
    assert sum(t.untyped_storage().nbytes() for t in state) == 400 * (16 + 16 + 1 + 1) * bytes_each
    for _ in range(15):
        method.sweep()
    assert method.W[1].dtype == torch.float32
    assert all(torch.isfinite(w).all() for w in method.W.values())


def test_bfloat16_state_trains_nearly_as_well() -> None:
    x, _ = blobs(600, 4)
    scores = []
    for stored in (None, torch.bfloat16):
        method = BregmanADMM("hinge", gamma=1.0, state_dtype=stored)
        result = fit(net(4, 20, 1), (x, x[:, 0] > x[:, 1]), method, max_sweeps=30, sinks=())
        scores.append(result.best["train_accuracy"])
    assert scores[0] > 0.9
    assert scores[1] > scores[0] - 0.05


def test_gaussian_start_depends_on_the_seed_only() -> None:
    def start(seed: int, chunk_rows: int | None) -> Tensor:
        method = BregmanADMM("hinge", chunk_rows=chunk_rows)
        started(method, net(4, 16, 1), blobs(3000, 4), seed=seed)
        assert abs(float((method.a[1] * method.z[1]).mean())) < 0.02
        return method.z[1]

    z = start(0, None)
    assert torch.equal(z, start(0, 17))
    assert not torch.equal(z, start(1, None))
    assert not torch.equal(z, start(2**32, None))
    assert abs(float(z.mean())) < 0.02
    assert abs(float(z.std()) - 1) < 0.02
    corr = torch.corrcoef(torch.cat([z.T, z.roll(1, 0).T]))
    assert float((corr - torch.eye(32)).abs().max()) < 0.09  # 4.9 standard errors of 496 pairs


@pytest.mark.parametrize("multiplier", ["paper", "consistent"])
def test_warm_start_counts_the_sweeps_without_multiplier(multiplier: Literal["paper", "consistent"]) -> None:
    method = BregmanADMM("hinge", warm_start=2, multiplier=multiplier)
    started(method, net(4, 6, 1), blobs(50))
    for expected in (False, False, True):
        method.sweep()
        assert bool(method.lam.any()) is expected


def test_multiplier_none_keeps_it_zero() -> None:
    method = BregmanADMM("hinge", warm_start=0, multiplier="none")
    started(method, net(4, 6, 1), blobs(50))
    method.sweep()
    method.sweep()
    assert not method.lam.any()


def test_ridge_reaches_every_weight_step() -> None:
    norms = []
    for ridge in (None, 1.0):
        method = BregmanADMM("hinge", ridge=ridge)
        started(method, net(4, 6, 5, 1), blobs(50))
        method.sweep()
        norms.append([float(w[:, :-1].norm()) for w in method.W.values()])
    assert all(shrunk < 0.8 * free for free, shrunk in zip(*norms, strict=True))


def test_weight_steps_reach_their_bound_in_hidden_layers() -> None:
    """Hidden activations of conditioning 100: a float32 net has weights within 1e-5 of the exact ones."""
    method = BregmanADMM("squared", chunk_rows=100, init="model")
    x, _ = blobs(600, 8)
    model = net(8, 8, 1, act=nn.Identity)
    with torch.no_grad():
        next(model.parameters()).copy_(torch.logspace(0, -2, 8).diag())
    started(method, model, (x, x.square().sum(1)))
    method.sums[2].solve()
    method.z[2].copy_(x.square().sum(1, keepdim=True))
    method._add_all(2)
    exact = torch.linalg.lstsq(with_ones(method.a[1].double()), method.z[2].double()).solution.T
    assert float((method.sums[2].solve() - exact).norm() / exact.norm()) < 1e-5


def test_measures_are_root_mean_squares() -> None:
    method = BregmanADMM("hinge", warm_start=0, chunk_rows=11)
    _, rows = started(method, net(4, 6, 1, dtype=F64), blobs(50, 4, 2, F64))
    method.sweep()
    m = {1: with_ones(rows.x) @ method.W[1].T, 2: with_ones(method.a[1]) @ method.W[2].T}
    z_m = torch.cat([(method.z[l] - m[l]).flatten() for l in m])
    expected = {
        "residual_z": float(z_m.square().mean().sqrt()),
        "residual_a": float((method.a[1] - method.z[1].relu()).square().mean().sqrt()),
        "multiplier": float(method.lam.square().mean().sqrt()),
    }
    assert method.measures() == pytest.approx(expected)
    assert min(expected.values()) > 1e-3


def test_model_start_is_the_forward_pass() -> None:
    model = net(4, 6, 1, dtype=F64)
    method = BregmanADMM("hinge", init="model")
    _, rows = started(method, model, blobs(50, 4, 2, F64))
    torch.testing.assert_close(method.z[2], model(rows.x).detach())
    assert method.measures()["residual_z"] < 1e-12
    assert method.measures()["residual_a"] < 1e-12


def test_one_linear_layer_is_a_convex_problem() -> None:
    """L = 1 has no hidden layer: with a consistent multiplier the method is plain ADMM and finds the minimum."""
    x, _ = blobs(80, 4, 2, F64)
    y = x @ column(1, -2, 3, 0.5) + 0.7
    model = nn.Linear(4, 1, dtype=F64)
    fit(model, (x, y), BregmanADMM("squared", warm_start=0, multiplier="consistent"), max_sweeps=60, sinks=())
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-4)
    assert from_module(model, "squared").L == 1
