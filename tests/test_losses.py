"""Every loss against brute force, against torch's criteria, and every message a user can meet."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from torch_admm.errors import ConversionError
from torch_admm.losses import (
    L1,
    LOSSES,
    AbstractLoss,
    AbstractRegression,
    CrossEntropy,
    Hinge,
    Huber,
    Logistic,
    OneVsRestHinge,
    Squared,
    loss_of,
)

DTYPES = [torch.float32, torch.float64]
BETAS = torch.logspace(-3, 3, 40, dtype=torch.float64).tolist()
KEPT = 300  # rows for each beta: 40 x 300 = 12,000 cases a loss and dtype


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread(rows: int, outputs: int, seed: int) -> Tensor:
    """N(0, 1), N(0, 10^2) and uniform in +-100, row after row."""
    g = rng(seed)
    v = torch.randn(rows, outputs, generator=g, dtype=torch.float64)
    v[1::3] *= 10
    v[2::3] = 200 * torch.rand(v[2::3].shape, generator=g, dtype=torch.float64) - 100
    return v


# --- entrywise losses: the naive cost, written apart from the package, and a grid


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


# --- cross-entropy: optimality, perturbations, and a reference by bisection

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


# --- torch criteria

VECTOR, TABLE = (20,), (20, 5)
CRITERIA: list[tuple[type[nn.Module], dict[str, Any], AbstractLoss, str]] = [
    (nn.MSELoss, {}, Squared(), "real"),
    (nn.L1Loss, {}, L1(), "real"),
    (nn.HuberLoss, {"delta": 0.5}, Huber(0.5), "real"),
    (nn.BCEWithLogitsLoss, {}, Logistic(), "share"),
    (nn.BCEWithLogitsLoss, {"pos_weight": torch.tensor([2.5])}, Logistic(2.5), "share"),
    (nn.BCEWithLogitsLoss, {"pos_weight": torch.arange(5.0)}, Logistic([0, 1, 2, 3, 4]), "share"),
    (nn.CrossEntropyLoss, {}, CrossEntropy(), "label"),
    (nn.CrossEntropyLoss, {"label_smoothing": 0.25}, CrossEntropy(0.25), "label"),
    (nn.CrossEntropyLoss, {"weight": torch.arange(5.0)}, CrossEntropy(weight=[0, 1, 2, 3, 4]), "label"),
    (
        nn.CrossEntropyLoss,
        {"weight": torch.arange(5.0), "label_smoothing": 0.5},
        CrossEntropy(0.5, torch.arange(5)),
        "label",
    ),
    (
        nn.CrossEntropyLoss,
        {"weight": torch.arange(5.0), "label_smoothing": 0.5},
        CrossEntropy(0.5, torch.arange(5)),
        "share",
    ),
]
TARGETS = {
    "real": torch.randn(TABLE, generator=rng(2), dtype=torch.float64),
    "share": torch.rand(TABLE, generator=rng(2), dtype=torch.float64),
    "label": torch.randint(5, VECTOR, generator=rng(2)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "options", "expected", "target"), CRITERIA)
def test_criteria_convert_and_agree(
    kind: type[nn.Module], options: dict[str, Any], expected: AbstractLoss, target: str, dtype: torch.dtype
) -> None:
    loss = loss_of(kind(**options))
    assert loss == expected == loss_of(kind(**options, reduction="sum"))
    z = 3 * torch.randn(TABLE, generator=rng(3), dtype=dtype)
    y = TARGETS[target] if target == "label" else TARGETS[target].to(dtype)
    options = {key: value.to(dtype) if isinstance(value, Tensor) else value for key, value in options.items()}
    rows = kind(**options, reduction="none")(z, y)
    torch.testing.assert_close(loss(z, loss.encode(y, 5, z)), rows if rows.ndim == 1 else rows.sum(1))


class Shifted(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target + 1)


class Renamed(nn.MSELoss):
    pass


def test_names_losses_and_untouched_subclasses_convert() -> None:
    assert sorted(LOSSES) == [
        "cross_entropy", "hinge", "huber", "l1", "logistic", "one_vs_rest_hinge", "squared"
    ]  # fmt: skip
    for name in LOSSES:
        loss = loss_of(name)
        assert loss.name == name
        assert loss_of(loss) is loss
    assert loss_of(Renamed()) == Squared()


# --- every message

Z = torch.zeros(3, 1)
KNOWN = "'cross_entropy', 'hinge', 'huber', 'l1', 'logistic', 'one_vs_rest_hinge', 'squared'"


def encoding(loss: AbstractLoss, y: list[Any] | Tensor, outputs: int) -> Callable[[], object]:
    return lambda: loss.encode(torch.as_tensor(y), outputs, Z)


def converting(spec: object) -> Callable[[], object]:
    return lambda: loss_of(spec)


ENCODE_ERRORS: list[tuple[Callable[[], object], str]] = [
    (
        encoding(Hinge(), [[0, 1], [1, 0]], 2),
        r"'hinge' takes one output but the net has 2: .*'one_vs_rest_hinge'",
    ),
    (encoding(Hinge(), [[0, 1], [1, 0]], 1), r"y has shape \(2, 2\), expected \(rows,\) or \(rows, 1\)"),
    (encoding(Hinge(), [0, 1, 2], 1), r"y\[2\] is 2: expected labels 0 and 1"),
    (encoding(Hinge(), [[0.0], [0.5]], 1), r"y\[1, 0\] is 0.5: expected labels 0 and 1"),
    (encoding(Hinge(), [-1, 1, 1], 1), r"y holds labels -1 and \+1: map them to 0 and 1"),
    (encoding(Hinge(), [0.0, math.nan], 1), r"y\[1\] is nan: targets must be finite"),
    (encoding(Hinge(), [1j, 0j], 1), r"y has dtype torch.complex64, expected real targets"),
    (
        encoding(OneVsRestHinge(), [0, 1], 1),
        r"one output: use the loss 'hinge' or 'logistic', or give the net",
    ),
    (encoding(OneVsRestHinge(), [0, 3], 3), r"y\[1\] is 3: expected class labels 0..2"),
    (encoding(OneVsRestHinge(), [0, 1, -1], 3), r"y\[2\] is -1: expected class labels 0..2"),
    (encoding(OneVsRestHinge(), [0.0, 1.0], 3), r"y has dtype torch.float32, expected integer class labels"),
    (encoding(OneVsRestHinge(), [True, False], 2), r"y has dtype torch.bool, expected integer class labels"),
    (encoding(OneVsRestHinge(), [[0], [1]], 2), r"y has shape \(2, 1\), expected \(rows,\) for class labels"),
    (encoding(OneVsRestHinge(), [1j], 2), r"y has dtype torch.complex64, expected real targets"),
    (encoding(Squared(), [1.0, 2.0], 2), r"y has shape \(2,\), expected \(rows, 2\) for 2 outputs"),
    (encoding(Squared(), torch.zeros(()), 1), r"y has shape \(\), expected \(rows,\)"),
    (encoding(L1(), [[1.0, -math.inf]], 2), r"y\[0, 1\] is -inf: targets must be finite"),
    (
        encoding(Huber(), torch.tensor([1e300], dtype=torch.float64), 1),
        r"y\[0\] is 1e\+300: .*finite in torch.float32",
    ),
    (encoding(Logistic(), [0.0, 1.5], 1), r"y\[1\] is 1.5: expected labels or probabilities between 0 and 1"),
    (encoding(Logistic(), [-1, 1], 1), r"y\[0\] is -1: .*map labels -1 and \+1 to 0 and 1"),
    (encoding(Logistic([1.0, 2.0]), [0, 1], 1), r"pos_weight has 2 entries but the net has 1 outputs"),
    (encoding(CrossEntropy(), [0, 1], 1), r"one output: use the loss 'hinge' or 'logistic', or give the net"),
    (encoding(CrossEntropy(), [[0.5, 0.5]], 1), r"one output: use the loss 'hinge' or 'logistic'"),
    (encoding(CrossEntropy(), [0, 5], 5), r"y\[1\] is 5: expected class labels 0..4"),
    (encoding(CrossEntropy(), [0.0, 1.0], 5), r"y has dtype torch.float32, expected integer class labels"),
    (encoding(CrossEntropy(), [[0, 1]], 2), r"y has shape \(1, 2\), expected \(rows,\) for class labels"),
    (encoding(CrossEntropy(), [[0.2, 0.8]], 3), r"y has shape \(1, 2\), expected \(rows, 3\)"),
    (encoding(CrossEntropy(), [[0.2, 1.8]], 2), r"y\[0, 1\] is 1.79.*between 0 and 1"),
    (encoding(CrossEntropy(), [[0.2, math.nan]], 2), r"y\[0, 1\] is nan: targets must be finite"),
    (encoding(CrossEntropy(weight=[1, 2]), [0, 1], 3), r"weight has 2 entries but the net has 3 outputs"),
    (lambda: Huber(0.0), r"delta is 0.0, expected a finite number > 0"),
    (lambda: CrossEntropy(1.5), r"label_smoothing is 1.5, expected a number between 0 and 1"),
    (lambda: CrossEntropy(weight=[1, -1]), r"weight is \(1.0, -1.0\), expected finite numbers >= 0"),
    (lambda: Logistic(math.nan), r"pos_weight is \(nan,\), expected finite numbers >= 0"),
    (lambda: Logistic(torch.ones(2, 3)), r"pos_weight has shape \(2, 3\), expected one number per output"),
]
CONVERSION_ERRORS: list[tuple[Callable[[], object], str]] = [
    (converting("hing"), rf"unknown loss 'hing'; known: {KNOWN}\. .*LOSSES\['hing'\] = MyLoss"),
    (converting(3), rf"int cannot be the loss: .*one of {KNOWN}.*loss_of.register\(int,"),
    (converting(nn.KLDivLoss()), r"KLDivLoss cannot be the loss: .*loss_of.register\(KLDivLoss,"),
    (converting(nn.BCELoss()), r"BCELoss cannot be .*drop the Sigmoid .*BCEWithLogits.*register\(BCELoss,"),
    (converting(nn.NLLLoss()), r"NLLLoss cannot be .*drop the LogSoftmax .*CrossEntropyLoss"),
    (converting(nn.SmoothL1Loss()), r"SmoothL1Loss cannot be .*use nn.HuberLoss"),
    (converting(nn.MultiLabelSoftMarginLoss()), r"MultiLabelSoftMarginLoss .*use nn.BCEWithLogitsLoss"),
    (converting(nn.SoftMarginLoss()), r"SoftMarginLoss cannot be .*map the labels -1 and \+1 to 0 and 1"),
    (converting(nn.HingeEmbeddingLoss()), r"HingeEmbeddingLoss cannot be .*use the loss 'hinge'"),
    (converting(nn.MultiMarginLoss()), r"MultiMarginLoss cannot be .*'one_vs_rest_hinge'"),
    (converting(Shifted()), r"Shifted cannot be .*overrides the forward of MSELoss.*register\(Shifted,"),
    (converting(nn.MSELoss(reduction="none")), r"MSELoss\(reduction='none'\) cannot be .*'mean' or 'sum'"),
    (
        converting(nn.BCEWithLogitsLoss(torch.ones(3))),
        r"BCEWithLogitsLoss\(weight=tensor\(\[1., 1., 1.\]\)\) cannot be .*use pos_weight",
    ),
    (converting(nn.CrossEntropyLoss(ignore_index=2)), r"CrossEntropyLoss\(ignore_index=2\) .*drop those"),
    (converting(nn.CrossEntropyLoss(-torch.ones(1))), r"CrossEntropyLoss: weight is \(-1.0,\), expected"),
    (converting(nn.HuberLoss(delta=-1.0)), r"HuberLoss: delta is -1.0, expected a finite number > 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), ENCODE_ERRORS, ids=[m for _, m in ENCODE_ERRORS])
def test_targets_and_settings_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), CONVERSION_ERRORS, ids=[m for _, m in CONVERSION_ERRORS])
def test_specs_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        call()


# --- targets in, predictions and scores out


@pytest.mark.parametrize(
    ("loss", "y", "outputs", "expected"),
    [
        (Hinge(), torch.tensor([True, False]), 1, torch.tensor([[1.0], [0.0]])),
        (Hinge(), torch.tensor([1.0, 0.0], dtype=torch.float64), 1, torch.tensor([[1.0], [0.0]])),
        (Hinge(), torch.tensor([[1], [1]], dtype=torch.uint8), 1, torch.tensor([[1.0], [1.0]])),
        (OneVsRestHinge(), torch.tensor([2, 0], dtype=torch.uint8), 3, torch.tensor([2, 0])),
        (CrossEntropy(), torch.tensor([2, 0], dtype=torch.int32), 3, torch.tensor([2, 0])),
        (CrossEntropy(), torch.tensor([[0.5, 0.5]], dtype=torch.float64), 2, torch.tensor([[0.5, 0.5]])),
        (Squared(), torch.tensor([2, 0]), 1, torch.tensor([[2.0], [0.0]])),
        (Logistic(), torch.tensor([[True, False]]), 2, torch.tensor([[1.0, 0.0]])),
        (Logistic(), torch.tensor([0.25]), 1, torch.tensor([[0.25]])),
        (Hinge(), torch.tensor([]), 1, torch.zeros(0, 1)),
    ],
)
def test_encode(loss: AbstractLoss, y: Tensor, outputs: int, expected: Tensor) -> None:
    torch.testing.assert_close(loss.encode(y, outputs, Z), expected, rtol=0, atol=0)  # checks the dtype too


@pytest.mark.parametrize(
    ("loss", "z", "y", "predicted", "score"),
    [
        (Hinge(), [[0.4], [0.6], [2.0]], [0, 1, 0], [0, 1, 1], 2 / 3),
        (OneVsRestHinge(), [[1.0, 0.0], [2.0, 3.0]], [0, 0], [0, 1], 0.5),
        (Logistic(), [[-0.1], [0.1]], [0, 1], [0, 1], 1.0),
        (Logistic(), [[-1.0, 1.0]], [[0.2, 0.3]], [[0, 1]], 0.5),
        (CrossEntropy(), [[1.0, 0.0], [2.0, 3.0]], [0, 0], [0, 1], 0.5),
        (CrossEntropy(), [[1.0, 0.0], [2.0, 3.0]], [[0.9, 0.1], [0.4, 0.6]], [0, 1], 1.0),
        (Squared(), [[1.0], [2.0], [4.0]], [1.0, 2.0, 3.0], [[1.0], [2.0], [4.0]], 0.5),
        (L1(), [[1.0, 7.0], [3.0, 7.0]], [[1.0, 7.0], [3.0, 7.0]], [[1.0, 7.0], [3.0, 7.0]], 1.0),
        (Huber(), [[1.0, 7.0], [3.0, 8.0]], [[1.0, 7.0], [3.0, 7.0]], [[1.0, 7.0], [3.0, 8.0]], 0.5),
    ],
)
def test_predict_and_score(loss: AbstractLoss, z: list[Any], y: list[Any], predicted: Any, score: float) -> None:
    outputs = torch.tensor(z)
    assert loss.predict(outputs).tolist() == predicted
    measured = loss.score(outputs, loss.encode(torch.tensor(y), outputs.shape[1], outputs))
    assert type(measured) is float
    assert measured == pytest.approx(score)


def test_score_of_no_rows_is_nan() -> None:
    assert math.isnan(Hinge().score(torch.zeros(0, 1), torch.zeros(0, 1)))


# --- the hot path: what the base class promises of every loss

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


# --- a loss of one's own


@final
@dataclass(frozen=True)
class Doubled(AbstractRegression):
    """2 (z - y)^2."""

    name: ClassVar[str] = "doubled"
    exact: ClassVar[bool] = True

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return 2 * ((z - y) ** 2).sum(1)

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        return (2 * y + beta * v) / (2 + beta)


class DoubledCriterion(nn.Module):
    """No relative of torch's criteria."""


@pytest.fixture
def forget() -> Iterator[None]:
    """Take DoubledCriterion and Shifted out of the registry again, for which functools has no call."""
    yield
    (registry,) = gc.get_referents(loss_of.registry)
    for kind in (DoubledCriterion, Shifted):
        registry.pop(kind, None)
    loss_of._clear_cache()


@pytest.mark.usefixtures("forget")
def test_own_losses_register_by_type_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_of.register(DoubledCriterion, lambda criterion: Doubled())
    loss_of.register(Shifted, lambda criterion: Doubled())  # more specific than the built-in for MSELoss
    monkeypatch.setitem(LOSSES, "doubled", Doubled)
    assert loss_of(DoubledCriterion()) == loss_of(Shifted()) == loss_of("doubled") == Doubled()
    with pytest.raises(ConversionError, match="'cross_entropy', 'doubled', 'hinge'"):
        loss_of("tripled")


def test_own_losses_are_forgotten() -> None:
    for spec in (DoubledCriterion(), Shifted(), "doubled"):
        with pytest.raises(ConversionError):
            loss_of(spec)
