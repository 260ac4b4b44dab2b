"""The proximal step of every loss against brute force, and its values against naive formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from tests.helpers import rng
from torch_admm.losses import (
    L1,
    AbstractLoss,
    CrossEntropy,
    Hinge,
    Huber,
    Logistic,
    OneVsRestHinge,
    Squared,
)

DTYPES = [torch.float32, torch.float64]
BETAS = torch.logspace(-3, 3, 40, dtype=torch.float64).tolist()
KEPT = 300  # rows for each beta: 40 x 300 = 12,000 cases a loss and dtype


def spread(rows: int, outputs: int, seed: int) -> Tensor:
    """N(0, 1), N(0, 10^2) and uniform in +-100, row after row."""
    g = rng(seed)
    v = torch.randn(rows, outputs, generator=g, dtype=torch.float64)
    v[1::3] *= 10
    v[2::3] = 200 * torch.rand(v[2::3].shape, generator=g, dtype=torch.float64) - 100
    return v


@dataclass(frozen=True)
class Entrywise:
    """A loss, its naive cost f(z, y) with y of z's shape, and what brute force needs to know of f."""

    loss: AbstractLoss
    outputs: int
    targets: Callable[[int, torch.Generator], Tensor]  # user targets
    cost: Callable[[Tensor, Tensor], Tensor]
    slope: float  # of f, at most
    curvature: float  # of f away from kinks, at most


def bits(rows: int, g: torch.Generator) -> Tensor:
    return torch.randint(2, (rows,), generator=g)


def reals(rows: int, g: torch.Generator) -> Tensor:
    y = 3 * torch.randn(rows, generator=g, dtype=torch.float64)
    y[::5] = y[::5].round()  # so that z = y and v = y +- 1/(2 beta) are met exactly
    return y


def shares(rows: int, g: torch.Generator) -> Tensor:
    y = torch.rand(rows, 3, generator=g, dtype=torch.float64)
    y[::2] = y[::2].round()
    return y


def naive_hinge(z: Tensor, y: Tensor) -> Tensor:
    return torch.where(y == 1, (1 - z).clamp_min(0), z.clamp_min(0))


def naive_huber(z: Tensor, y: Tensor, delta: float) -> Tensor:
    d = (z - y).abs()
    return torch.where(d <= delta, d * d / 2, delta * (d - delta / 2))


def naive_logistic(z: Tensor, y: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    zero = torch.zeros(())
    return weight * y * torch.logaddexp(zero, -z) + (1 - y) * torch.logaddexp(zero, z)


WEIGHTS = torch.tensor([0.3, 1.0, 4.0], dtype=torch.float64)
ENTRYWISE = {
    "hinge": Entrywise(Hinge(), 1, bits, naive_hinge, 1, 0),
    "one_vs_rest": Entrywise(OneVsRestHinge(), 4, lambda n, g: torch.randint(4, (n,), generator=g), naive_hinge, 1, 0),
    "squared": Entrywise(Squared(), 1, reals, lambda z, y: (z - y) ** 2, math.inf, 2),
    "l1": Entrywise(L1(), 1, reals, lambda z, y: (z - y).abs(), 1, 0),
    "huber": Entrywise(Huber(), 1, reals, lambda z, y: naive_huber(z, y, 1.0), 1, 1),
    "huber_2.5": Entrywise(Huber(2.5), 1, reals, lambda z, y: naive_huber(z, y, 2.5), 2.5, 1),
    "logistic": Entrywise(Logistic(), 1, bits, naive_logistic, 1, 0.25),
    "logistic_soft_weighted": Entrywise(
        Logistic(WEIGHTS), 3, shares, lambda z, y: naive_logistic(z, y, WEIGHTS.to(z)), 4, 1
    ),
}


def entries(case: Entrywise, y: Tensor) -> Tensor:
    """Encoded targets in z's shape."""
    return functional.one_hot(y, case.outputs).double() if y.ndim == 1 else y.double()


def problems(case: Entrywise, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, float]]:
    """(v, encoded y, beta); every fourth row sits on a kink or where the minimiser reaches one."""
    for seed, beta in enumerate(BETAS):
        v = spread(KEPT, case.outputs, seed).to(dtype)
        y = case.loss.encode(case.targets(KEPT, rng(seed)), case.outputs, v)
        k = 1 / (2 * beta)
        for offset, at in enumerate((0, k, -k, k / 2)):
            v[4 * offset :: 16] = entries(case, y)[4 * offset :: 16].to(dtype) + at
        yield v, y, beta


def total(case: Entrywise, y: Tensor, v: Tensor, beta: float, z: Tensor) -> Tensor:
    return case.cost(z, y) + beta * (z - v) ** 2


def grid_minimum(cost: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The smallest cost seen on a 101-point grid (in front) refined three times around its best point."""
    best = torch.full_like(low, math.inf)
    for _ in range(4):
        steps = torch.linspace(0, 1, 101, dtype=torch.float64).reshape(-1, 1, 1)
        z = low + (high - low) * steps
        value, at = cost(z).min(0)
        best = torch.minimum(best, value)
        centre, reach = z.gather(0, at[None])[0], (high - low) / 50
        low, high = centre - reach, centre + reach
    return best


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ENTRYWISE.values(), ids=ENTRYWISE.keys())
def test_prox_beats_the_grid(case: Entrywise, dtype: torch.dtype) -> None:
    """Zero of 12,000 cases or more are worse than the grid, up to the rounding of z itself.

    A rounding e of z costs (curvature/2 + beta) e^2, nothing of first order: kinks must be hit exactly.
    e is 4 eps times the numbers that enter: v, y and the pull. 1e-14 is for the cost itself, in float64.
    """
    for v, y, beta in problems(case, dtype):
        z, wide, target = case.loss.prox(v, y, beta).double(), v.double(), entries(case, y)
        pull = torch.full_like(wide, case.slope / (2 * beta))
        if case.loss.exact:  # these losses pull towards y and not past it
            pull = torch.minimum(pull, (wide - target).abs())
        cost = partial(total, case, target, wide, beta)
        best = grid_minimum(cost, wide - pull - 0.1, wide + pull + 0.1)
        e = 4 * torch.finfo(dtype).eps * (wide.abs() + target.abs() + pull)
        slack = (case.curvature / 2 + beta) * e**2 + 1e-14 * (best.abs() + beta * wide**2)
        worse = int((cost(z) > best + slack).sum())
        assert worse == 0, f"beta = {beta}: {worse} entries worse than the grid"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["logistic", "logistic_soft_weighted"])
def test_logistic_prox_is_stationary(name: str, dtype: torch.dtype) -> None:
    """|gradient| <= 4 eps (2 beta + s) (1 + |v| + s / (2 beta)): rounding of v, y and z alone."""
    case = ENTRYWISE[name]
    w = torch.ones(()) if name == "logistic" else WEIGHTS
    for v, y, beta in problems(case, dtype):
        z, wide, target = case.loss.prox(v, y, beta).double(), v.double(), y.double()
        s = 1 + (w - 1) * target
        gradient = s * torch.sigmoid(z) - w * target + 2 * beta * (z - wide)
        scale = (2 * beta + s) * (1 + wide.abs() + s / (2 * beta))
        assert (gradient.abs() / scale).max() <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("case", ENTRYWISE.values(), ids=ENTRYWISE.keys())
def test_values_are_the_naive_costs(case: Entrywise) -> None:
    v, y, _ = next(problems(case, torch.float64))
    torch.testing.assert_close(case.loss(v, y), case.cost(v, entries(case, y)).sum(1))


def test_hinge_prox_is_exact_at_and_beyond_the_kink() -> None:
    v = torch.tensor([[0.75], [1.0], [3.1], [0.25], [0.0], [-3.1]])
    y = torch.tensor([[1.0], [1.0], [1.0], [0.0], [0.0], [0.0]])
    assert Hinge().prox(v, y, 1.0).flatten().tolist() == [1.0, 1.0, v[2].item(), 0.0, 0.0, v[5].item()]


CLASSES = [2, 3, 10, 50]
WEIGHT_OF = {k: torch.linspace(0.2, 3, k, dtype=torch.float64) for k in CLASSES}
ENTROPY: dict[str, Callable[[int], CrossEntropy]] = {
    "plain": lambda k: CrossEntropy(),
    "smoothed_weighted": lambda k: CrossEntropy(0.1, WEIGHT_OF[k]),
    "soft": lambda k: CrossEntropy(0.2),
}


def mass(loss: CrossEntropy, y: Tensor, k: int) -> Tensor:
    """The q of torch's documentation, in float64: weight * ((1 - smoothing) p + smoothing / classes)."""
    p = functional.one_hot(y, k).double() if y.ndim == 1 else y.double()
    weight = torch.tensor(loss.weight or [1.0] * k, dtype=torch.float64)
    return weight * ((1 - loss.label_smoothing) * p + loss.label_smoothing / k)


def class_targets(kind: str, rows: int, k: int, seed: int) -> Tensor:
    labels = torch.randint(k, (rows,), generator=rng(seed))
    soft = torch.softmax(3 * torch.randn(rows, k, generator=rng(seed), dtype=torch.float64), 1)
    return soft if kind == "soft" else labels


def entropy_problems(kind: str, dtype: torch.dtype, far: float = 1.0) -> Iterator[tuple[Any, ...]]:
    """(loss, v, y, beta): 40 betas x 4 class counts x 80 rows = 12,800 rows, some tied, some far apart."""
    for seed, beta in enumerate(BETAS):
        for k in CLASSES:
            loss, v = ENTROPY[kind](k), spread(80, k, seed) * far
            v[::7] = v[::7, :1]  # all classes tied
            v[3::7, 1:] = v[3::7, 1:2]  # one against the rest
            v = v.to(dtype)
            yield loss, v, loss.encode(class_targets(kind, 80, k, seed), k, v), beta


@pytest.mark.parametrize("far", [1.0, 10.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ENTROPY)
def test_cross_entropy_prox_is_stationary(kind: str, dtype: torch.dtype, far: float) -> None:
    """|gradient| <= 4 eps (2 beta + s) (1 + max|v| + s / (2 beta)), for |v| up to 1000 (far = 10)."""
    for loss, v, y, beta in entropy_problems(kind, dtype, far):
        z, wide, q = loss.prox(v, y, beta).double(), v.double(), mass(loss, y, v.shape[1])
        s = q.sum(1, keepdim=True)
        gradient = s * torch.softmax(z, 1) - q + 2 * beta * (z - wide)
        scale = (2 * beta + s) * (1 + wide.abs().amax(1, keepdim=True) + s / (2 * beta))
        assert (gradient.abs() / scale).max() <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", ENTROPY)
def test_cross_entropy_prox_is_not_beaten_by_perturbations(kind: str) -> None:
    """With the loss's own values: value and prox must belong together. 1e-13 is rounding."""
    for loss, v, y, beta in entropy_problems(kind, torch.float64):
        z = loss.prox(v, y, beta)
        cost = loss(z, y) + beta * ((z - v) ** 2).sum(1)
        for size in (1e-5, 1e-2, 1.0):
            other = z + size * torch.randn(z.shape, generator=rng(1), dtype=z.dtype)
            rival = loss(other, y) + beta * ((other - v) ** 2).sum(1)
            assert (cost <= rival + 1e-13 * (1 + rival + beta * (v**2).sum(1))).all()


def bisect(f: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, steps: int) -> Tensor:
    """The root of an increasing f."""
    for _ in range(steps):
        middle = (low + high) / 2
        below = f(middle) < 0
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def entropy_reference(u: Tensor, c: Tensor) -> Tensor:
    """Solve z + c softmax(z) = u: bisect tau = logsumexp(z), and inside it z_k + c exp(z_k - tau) = u_k."""

    def level(tau: Tensor) -> Tensor:
        return bisect(lambda z: z + c * torch.exp(z - tau) - u, u - 2 * c - (u - tau).clamp_min(0), u, 60)

    top = torch.logsumexp(u, 1, keepdim=True)
    return level(bisect(lambda tau: tau - torch.logsumexp(level(tau), 1, keepdim=True), top - c, top, 60))


@pytest.mark.parametrize("kind", ENTROPY)
def test_cross_entropy_prox_is_the_reference(kind: str) -> None:
    for index, (loss, v, y, beta) in enumerate(entropy_problems(kind, torch.float64)):
        if index % 29 == 0:
            q = mass(loss, y, v.shape[1])
            z = entropy_reference(v + q / (2 * beta), q.sum(1, keepdim=True) / (2 * beta))
            torch.testing.assert_close(loss.prox(v, y, beta), z, rtol=1e-10, atol=1e-10)


def test_a_class_of_weight_zero_leaves_v_alone() -> None:
    loss, v = CrossEntropy(weight=[0.0, 1.0]), torch.randn(6, 2, generator=rng(0))
    for beta in (1e-3, 1.0, 1e3):
        torch.testing.assert_close(loss.prox(v, torch.zeros(6, dtype=torch.int64), beta), v)


HOT: list[tuple[AbstractLoss, int]] = [
    *((case.loss, case.outputs) for case in ENTRYWISE.values()),
    (CrossEntropy(), 3),
    (CrossEntropy(0.1, [1.0, 2.0, 3.0]), 3),
]


def plain_targets(loss: AbstractLoss, rows: int, outputs: int) -> Tensor:
    labels = isinstance(loss, (CrossEntropy, OneVsRestHinge))
    return torch.arange(rows) % outputs if labels else (torch.arange(rows * outputs) % 2).reshape(rows, outputs)


@pytest.mark.parametrize("beta", [1e-3, 1.0])
@pytest.mark.parametrize(("loss", "outputs"), HOT)
def test_nan_stays_in_its_row_and_inputs_stay_untouched(loss: AbstractLoss, outputs: int, beta: float) -> None:
    v = torch.randn(5, outputs, generator=rng(0))
    y = loss.encode(plain_targets(loss, 5, outputs), outputs, v)
    clean = loss.prox(v, y, beta)
    v[2, 0] = math.nan
    before = v.clone(), y.clone()
    z = loss.prox(v, y, beta)
    assert z[2, 0].isnan()
    assert loss(z, y).isnan().tolist() == [False, False, True, False, False]
    torch.testing.assert_close(z[[0, 1, 3, 4]], clean[[0, 1, 3, 4]], rtol=0, atol=0)
    assert torch.equal(v.nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(y, before[1])
    assert z.data_ptr() != v.data_ptr()


@pytest.mark.parametrize("beta", [1e-3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("loss", "outputs"), HOT)
def test_a_prepared_prox_is_the_same(loss: AbstractLoss, outputs: int, dtype: torch.dtype, beta: float) -> None:
    """Whatever tensor it was prepared with, and however often it is called."""
    prox = loss.prepared(beta, torch.zeros(3, 2, dtype=dtype))
    for rows in (5, 1, 0):
        v = torch.randn(rows, outputs, generator=rng(rows), dtype=dtype)
        y = loss.encode(plain_targets(loss, rows, outputs), outputs, v)
        before = v.clone()
        torch.testing.assert_close(prox(v, y), loss.prox(v, y, beta), rtol=0, atol=0)
        assert torch.equal(v, before)


@pytest.mark.parametrize("beta", [1e-3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("loss", "outputs"), HOT)
def test_the_hot_path_runs_on_a_device_without_waiting(
    loss: AbstractLoss, outputs: int, dtype: torch.dtype, beta: float
) -> None:
    """Fake tensors refuse mixed devices, and have no values to wait for or to branch on."""
    y = loss.encode(plain_targets(loss, 5, outputs), outputs, torch.zeros(1, dtype=dtype))
    with FakeTensorMode():
        v = torch.empty(5, outputs, dtype=dtype, device="cuda")
        target = torch.empty(y.shape, dtype=y.dtype, device="cuda")
        z = loss.prox(v, target, beta)
        value, predicted = loss(z, target), loss.predict(z)
    assert (z.shape, z.dtype, z.device.type) == (v.shape, dtype, "cuda")
    assert (value.shape, value.dtype, value.device.type) == ((5,), dtype, "cuda")
    assert predicted.device.type == "cuda"
