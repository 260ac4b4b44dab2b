"""Smooth activations: h is torch's, derivatives are autograd's, the z step finds brute force's minimum."""

from __future__ import annotations

import copy
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as fn

from tests.helpers import CountSyncs
from torch_admm import tables
from torch_admm.smooth import ELU, GELU, Sigmoid, SiLU, Softplus, Tanh
from torch_admm.tables import BOUND, AbstractSmooth

ACTIVATIONS: list[AbstractSmooth] = [
    Sigmoid(),
    Tanh(),
    SiLU(),
    GELU(),
    GELU(approximate="tanh"),
    ELU(),
    ELU(alpha=3.0),
    Softplus(),
    Softplus(beta=2.0, threshold=1.0),
]
DTYPES = [torch.float32, torch.float64]
KAPPAS = [1e-2, 10.0, 1e3, 1e6]

each_h = pytest.mark.parametrize("h", ACTIVATIONS, ids=repr)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def cost(h: AbstractSmooth, z: Tensor, a: Tensor, m: Tensor, kappa: float) -> Tensor:
    """The cost f, over beta."""
    return kappa * (a - h(z)).square() + (z - m).square()


def brute_force(h: AbstractSmooth, a: Tensor, m: Tensor, kappa: float) -> Tensor:
    """Min f / beta: the three deepest valleys on a grid, the tails and the kink, each searched ever finer."""
    grid = torch.linspace(-50, 50, 1001, dtype=torch.float64)
    f = kappa * (a[:, None] - h(grid)).square() + (grid - m[:, None]).square()
    higher = torch.ones_like(f, dtype=torch.bool)
    higher[:, 1:] &= f[:, 1:] <= f[:, :-1]
    higher[:, :-1] &= f[:, :-1] <= f[:, 1:]
    valleys = grid[f.where(higher, math.inf).topk(3, largest=False).indices]
    kink = torch.full_like(m, h.top if h.top < math.inf else 0.0)
    z = torch.cat((valleys, torch.stack((m, (kappa * a + m) / (kappa + 1), kink), dim=1)), dim=1)
    window, width = torch.linspace(-1, 1, 11, dtype=torch.float64), 0.12
    for _ in range(13):
        near = z[:, :, None] + width * window
        best = cost(h, near, a[:, None, None], m[:, None, None], kappa).argmin(dim=2, keepdim=True)
        z, width = near.gather(2, best)[:, :, 0], width / 4
    return cost(h, z, a[:, None], m[:, None], kappa).amin(dim=1)


def excess(h: AbstractSmooth, a: Tensor, m: Tensor, beta: float, gamma: float) -> Tensor:
    """(f(z) - min f) over the scale of the stated bound; NaN where z is."""
    z = h.minimise(a, m, beta, gamma).double()
    a, m, kappa = a.double(), m.double(), gamma / beta
    scale = kappa * (a.square() + h(z).square()) + m.square() + z.square()
    gain = cost(h, z, a, m, kappa) - brute_force(h, a, m, kappa)
    return gain / scale.clamp(min=1e-30)


def random_cases(h: AbstractSmooth, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    def normal(scale: float) -> Tensor:
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    def uniform(scale: float) -> Tensor:
        return scale * (2 * torch.rand(n, generator=generator, dtype=torch.float64) - 1)

    pairs = [
        (normal(1), normal(1)),
        (normal(10), normal(10)),
        (uniform(100), uniform(100)),
        (uniform(1.5), uniform(8)),
        (h(normal(4)), normal(4)),  # a within the range of h
        (uniform(1e3), uniform(1e3)),
    ]
    a, m = zip(*pairs, strict=True)
    return torch.cat(a), torch.cat(m)


@each_dtype
@each_h
def test_minimise_is_the_global_minimum(h: AbstractSmooth, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    cases = 0
    for trial in range(34):
        beta, gamma = (10 ** (6 * torch.rand(2, generator=generator, dtype=torch.float64) - 3)).tolist()
        if trial == 0:
            beta, gamma = 1.0, 10.0
        a, m = (x.to(dtype) for x in random_cases(h, 50, generator))
        assert (excess(h, a, m, beta, gamma) <= BOUND[dtype]).all()
        cases += a.numel()
    assert cases >= 10_000


@each_dtype
@each_h
@pytest.mark.parametrize("kappa", KAPPAS)
def test_minimise_where_two_minima_are_born(h: AbstractSmooth, kappa: float, dtype: torch.dtype) -> None:
    """Just beyond the centre of curvature at a vertex, where f is flattest and Newton slowest."""
    generator = torch.Generator().manual_seed(2)
    z = torch.linspace(-h.reach, min(h.reach, h.top), 20_001, dtype=torch.float64)
    for side in (1, -1):
        centre = tables._centre(h, z, kappa, side)
        v = centre.argmin()
        if math.isinf(centre[v]):
            continue
        beyond = 10 ** (-8 * torch.rand(40, generator=generator, dtype=torch.float64))
        a = side * centre[v] * (1 + side * centre[v].sign() * side * beyond)
        near = z[v] + beyond.sqrt() * torch.randn(40, generator=generator, dtype=torch.float64)
        m = near - kappa * (a - h(near)) * h.derivatives(near)[0]
        assert (excess(h, a.to(dtype), m.to(dtype), 1.0, kappa) <= BOUND[dtype]).all()


@each_dtype
@each_h
@pytest.mark.parametrize("kappa", KAPPAS)
def test_minimise_beside_the_jumps(h: AbstractSmooth, kappa: float, dtype: torch.dtype) -> None:
    """The argmin rises with m; halve on the larger rise, and the jump, if there is one, is closed in upon."""
    size = torch.logspace(-2, 3, 12, dtype=torch.float64)
    a = torch.cat((size, -size)).repeat(2)
    low = torch.tensor([-1e3, -10.0], dtype=torch.float64).repeat_interleave(24)
    high = -low
    z_low, z_high = h.minimise(a, low, 1.0, kappa), h.minimise(a, high, 1.0, kappa)
    for _ in range(50):
        m = (low + high) / 2
        z = h.minimise(a, m, 1.0, kappa)
        left = z - z_low > z_high - z
        low, z_low = torch.where(left, low, m), torch.where(left, z_low, z)
        high, z_high = torch.where(left, m, high), torch.where(left, z, z_high)
    m = torch.cat((low, high, low - 1e-4, high + 1e-4))
    assert (excess(h, a.repeat(4).to(dtype), m.to(dtype), 1.0, kappa) <= BOUND[dtype]).all()


@each_dtype
@each_h
def test_extremes_and_ties(h: AbstractSmooth, dtype: torch.dtype) -> None:
    special = [0.0, -0.0, 0.5, 1.0, -1.0, h.reach, -h.reach, min(h.top, 2.0), 1e3, -1e3, 1e6, -1e6]
    a, m = (x.flatten() for x in torch.meshgrid(*[torch.tensor(special, dtype=dtype)] * 2, indexing="ij"))
    for kappa in (1e-3, 1.0, 10.0, 1e3):
        assert (excess(h, a, m, 1.0, kappa) <= BOUND[dtype]).all()


@each_h
def test_derivatives_are_those_of_autograd(h: AbstractSmooth) -> None:
    z = torch.linspace(-12, min(12.0, h.top - 1e-6), 801, dtype=torch.float64, requires_grad=True)
    (dh,) = torch.autograd.grad(h(z).sum(), z, create_graph=True)
    (d2h,) = torch.autograd.grad(dh.sum(), z)
    torch.testing.assert_close(h.derivatives(z.detach()), (dh.detach(), d2h), rtol=1e-9, atol=1e-12)


@each_h
@pytest.mark.parametrize("kappa", KAPPAS)
def test_the_centre_of_curvature_has_one_extreme_a_stretch(h: AbstractSmooth, kappa: float) -> None:
    """The property of h on which the search rests."""
    z = torch.linspace(-h.reach, min(h.reach, h.top), 20_001, dtype=torch.float64)
    lowest = z[h(z).argmin()]
    for side, stretch in ((1, z > -math.inf), (-1, z < lowest), (-1, z > lowest)):
        centre = tables._centre(h, z, kappa, side).where(stretch, math.inf)
        centre = centre[centre < 1e9]
        if centre.numel():
            slack, v = 1e-9 * (1 + centre.abs()), int(centre.argmin())
            assert (centre.diff() <= slack[1:])[:v].all()
            assert (centre.diff() >= -slack[1:])[v:].all()


def test_h_is_the_function_of_torch() -> None:
    z = torch.linspace(-30, 30, 1001)
    expected = [
        torch.sigmoid(z),
        torch.tanh(z),
        fn.silu(z),
        fn.gelu(z),
        fn.gelu(z, approximate="tanh"),
        fn.elu(z),
        fn.elu(z, alpha=3.0),
        fn.softplus(z),
        fn.softplus(z, beta=2.0, threshold=1.0),
    ]
    for h, value in zip(ACTIVATIONS, expected, strict=True):
        assert torch.equal(h(z), value)
        torch.testing.assert_close(h.value(z), value)
        assert not h.exact


@each_dtype
@each_h
def test_a_non_finite_entry_stays_non_finite_and_alone(h: AbstractSmooth, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    a, m = (3 * torch.randn(2, 60, generator=generator, dtype=torch.float64)).to(dtype)
    clean = h.minimise(a, m, 1.0, 10.0)
    for i, bad in enumerate((math.nan, math.inf, -math.inf)):
        a[i] = bad
        m[3 + i] = bad
    dirty = h.minimise(a, m, 1.0, 10.0)
    assert not dirty[:6].isfinite().any()
    assert dirty[[0, 3]].isnan().all()
    assert torch.equal(dirty[6:], clean[6:])


@each_h
def test_shapes_strides_and_chunks(h: AbstractSmooth, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)  # vector and scalar code round apart
    generator = torch.Generator().manual_seed(4)
    a, m = torch.randn(2, 6, 10, generator=generator)
    z = h.minimise(a, m, 1.0, 10.0)
    assert_close(h.minimise(a.T, m.T, 1.0, 10.0), z.T)
    assert_close(h.minimise(a[:, ::2], m[:, ::2], 1.0, 10.0), z[:, ::2])
    assert_close(h.minimise(a[0, 0], m[0, 0], 1.0, 10.0), z[0, 0])
    assert h.minimise(a[:0], m[:0], 1.0, 10.0).shape == (0, 10)
    monkeypatch.setitem(tables._CHUNK, "cpu", 7)
    assert_close(h.minimise(a, m, 1.0, 10.0), z)


@each_h
def test_runs_on_another_device_and_leaves_nothing_behind(h: AbstractSmooth) -> None:
    """A fake device raises on mixed devices and on reading a value back to the host."""
    h = copy.deepcopy(h)
    h._tables.clear()
    for _ in range(2):  # tensors of one mode may not meet those of another
        with FakeTensorMode():
            m = torch.randn(5, 3, device="cuda")
            z = h.minimise(torch.randn(5, 3, device="cuda"), m, 1.0, 10.0)
        assert (z.shape, z.dtype, z.device) == (m.shape, m.dtype, m.device)
    assert not h._tables
    assert h.minimise(torch.zeros(2), torch.zeros(2), 1.0, 10.0).isfinite().all()


@each_h
def test_nothing_comes_back_to_the_host(h: AbstractSmooth) -> None:
    a, m = torch.randn(2, 40, generator=torch.Generator().manual_seed(5))
    h.minimise(a, m, 1.0, 10.0)
    with CountSyncs() as reads:
        h.minimise(a, m, 1.0, 10.0)
    assert reads.seen == []


def test_tables_are_kept_small_and_few() -> None:
    h = Sigmoid()
    m = torch.zeros(4)
    h.minimise(m, m, 1.0, 10.0)
    (table,) = h._tables.values()
    assert sum(x.nbytes for x in table if isinstance(x, Tensor)) < 1_000_000
    h.minimise(m, m, 2.0, 20.0)
    assert next(iter(h._tables.values())) is table
    for gamma in range(1, 41):
        h.minimise(m, m, 1.0, float(gamma))
    assert len(h._tables) == tables._CACHED


def test_activations_compare_and_print_by_their_parameters() -> None:
    assert Softplus(beta=2.0) == Softplus(beta=2.0) != Softplus()
    assert hash(ELU()) == hash(ELU(alpha=1.0))
    assert list(map(repr, ACTIVATIONS[:5])) == [
        "Sigmoid()",
        "Tanh()",
        "SiLU()",
        "GELU(approximate='none')",
        "GELU(approximate='tanh')",
    ]
    assert repr(ELU(alpha=3.0)) == "ELU(alpha=3.0)"
    assert repr(Softplus()) == "Softplus(beta=1.0, threshold=20.0)"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GELU(approximate="erf"), 'GELU: approximate must be "none" or "tanh", not \'erf\''),
        (lambda: ELU(alpha=0.0), "ELU: alpha must be positive and finite, not 0.0"),
        (lambda: ELU(alpha=math.nan), "ELU: alpha must be positive and finite, not nan"),
        (lambda: Softplus(beta=-1.0), "Softplus: beta must be positive and finite, not -1.0"),
        (lambda: Softplus(threshold=-1.0), "Softplus: threshold must be finite and not negative, not -1.0"),
    ],
)
def test_bad_parameters_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()
