"""Piecewise-linear activations: h is torch's, and the z step is the global minimum on every one of 10,000s of cases."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import brute_force
from torch_admm import activation_of
from torch_admm.activations import GOLDEN, AbstractActivation, Piece, PiecewiseLinear, h_sig

MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "leaky_relu_negative": lambda: nn.LeakyReLU(-0.5),
    "relu6": nn.ReLU6,
    "hardtanh": nn.Hardtanh,
    "hardtanh_wide": lambda: nn.Hardtanh(-0.3, 4.0),
    "hardtanh_one_sided": lambda: nn.Hardtanh(-math.inf, 1.0),
    "h_sig": lambda: nn.Hardtanh(0.0, 1.0),
    "hardsigmoid": nn.Hardsigmoid,
    "threshold": lambda: nn.Threshold(0.7, 0.7),
}
KINKS = torch.tensor([-3.0, -1.0, -0.3, 0.0, 0.7, 1.0, 3.0, 4.0, 6.0], dtype=torch.float64)
PENALTIES = [(1.0, 10.0), (1.0, 1.0), (1e-3, 1e3), (1e3, 1e-3), (0.3, 2.0)]
CASES = 12_000


def built(name: str) -> AbstractActivation:
    activation = activation_of(MODULES[name]())
    assert activation is not None
    return activation


def cases(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """a and m: small, large and exactly on kinks."""
    g = torch.Generator().manual_seed(0)
    scale = 10 ** (2.5 * torch.rand(CASES, generator=g, dtype=torch.float64) - 1)
    a, m = (scale * torch.randn(CASES, generator=g, dtype=torch.float64) for _ in range(2))
    on_kink = torch.randint(len(KINKS), (CASES // 6, 2), generator=g)
    a[: CASES // 6], m[CASES // 12 : CASES // 4] = KINKS[on_kink[:, 0]], KINKS[on_kink[:, 1]]
    return a.to(dtype), m.to(dtype)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_h_is_the_modules_own(name: str, dtype: torch.dtype) -> None:
    z = torch.cat([torch.linspace(-9, 9, 2001, dtype=torch.float64), KINKS]).to(dtype)
    torch.testing.assert_close(built(name)(z), MODULES[name]()(z))


@pytest.mark.parametrize("beta_gamma", PENALTIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODULES)
def test_minimise_beats_the_grid(name: str, dtype: torch.dtype, beta_gamma: tuple[float, float]) -> None:
    """0 entries worse than the grid, beyond the rounding of z itself."""
    h, (beta, gamma), (a, m) = built(name), beta_gamma, cases(dtype)
    z = h.minimise(a, m, beta, gamma)
    assert (z.shape, z.dtype) == (m.shape, m.dtype)
    A, M, Z = a.double(), m.double(), z.double()

    def cost(t: Tensor) -> Tensor:
        return gamma * (A[:, None] - h(t)).square() + beta * (t - M[:, None]).square()

    middle, reach = (A + M) / 2, 1.2 * (A - M).abs() + 7
    floor = brute_force(cost, middle, reach, torch.cat([KINKS[None].expand(CASES, -1), A[:, None], M[:, None]], 1))
    # moving z by its own rounding changes the cost by at most this
    rounding = 4 * torch.finfo(dtype).eps * (gamma + beta) * (A.abs() + M.abs() + 7).square()
    worse = cost(Z[:, None])[:, 0] > floor + rounding
    assert int(worse.sum()) == 0


@pytest.mark.parametrize("beta_gamma", PENALTIES, ids=str)
def test_relu_threshold_equals_comparing_costs(beta_gamma: tuple[float, float]) -> None:
    """The fast ReLU and the table of its two pieces give minimisers of one cost."""
    a, m = cases(torch.float64)
    table = PiecewiseLinear([Piece(0.0, 0.0, hi=0.0), Piece(1.0, 0.0, lo=0.0)])
    costs = [
        beta_gamma[1] * (a - z.relu()).square() + beta_gamma[0] * (z - m).square()
        for z in (built("relu").minimise(a, m, *beta_gamma), table.minimise(a, m, *beta_gamma))
    ]
    torch.testing.assert_close(*costs, rtol=1e-10, atol=1e-10)


class Given:
    """A way d that is known."""

    def __init__(self, d: Tensor) -> None:
        self.d = d

    def __call__(self) -> Tensor:
        return self.d.clone()

    def onto(self, m: Tensor, k: float) -> Tensor:
        return m.add_(self.d, alpha=k)


@pytest.mark.parametrize("beta_gamma", [*PENALTIES, (2.0, 2.0 * GOLDEN)], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_residual_leads_to_a_minimiser(name: str, beta_gamma: tuple[float, float]) -> None:
    """m + residual(d, ...) costs as little as minimise(h(m) + d, ...), on both sides of ReLU's golden penalty too."""
    h, (beta, gamma), (d, m) = built(name), beta_gamma, cases(torch.float64)
    d, room = torch.cat([d, 1e-3 * d, torch.zeros(len(d))]), torch.empty(3 * len(d), dtype=torch.float64)
    m = m.repeat(3)
    a = h(m) + d
    steps = h.minimise(a, m, beta, gamma), m + h.residual(Given(d), m.clone(), h(m), beta, gamma, room)
    costs = [gamma * (a - h(z)).square() + beta * (z - m).square() for z in steps]
    torch.testing.assert_close(*costs, rtol=1e-10, atol=1e-10)


def test_the_papers_sigmoid_is_hardtanh() -> None:
    z = torch.linspace(-2, 2, 101)
    torch.testing.assert_close(h_sig()(z), z.clamp(0, 1))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Piece(0.0, 0.0, hi=0.0), Piece(1.0, 1.0, lo=0.0)], r"pieces must meet: h jumps at z = 0 from 0 to 1"),
        ([Piece(0.0, 0.0, hi=0.0), Piece(1.0, 0.0, lo=1.0)], r"cover the line from left to right without gaps"),
        ([Piece(1.0, 0.0, hi=3.0)], r"cover the line from left to right without gaps"),
        ([], r"cover the line"),
    ],
)
def test_bad_pieces(pieces: list[Piece], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PiecewiseLinear(pieces)


def test_inputs_are_left_alone() -> None:
    for name in MODULES:
        a, m = cases(torch.float32)
        before = a.clone(), m.clone()
        built(name).minimise(a, m, 1.0, 10.0)
        assert torch.equal(a, before[0])
        assert torch.equal(m, before[1])
