"""Least squares from sums: the SVD's answer on the well-determined part, at any rank and conditioning."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torch_admm import map_of
from torch_admm.comm import Solo
from torch_admm.data import Rows
from torch_admm.gram import Gram, cross, cross_into, laid_out, with_ones
from torch_admm.sums import FLOAT32_ROWS, Sums

from .helpers import rng

WELL_DETERMINED = 1e-2  # singular values above this part of the largest
BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
SHAPES = [(2000, 50), (300, 200), (100, 100), (30, 100), (99, 100), (1, 20)]
F64 = torch.float64
DTYPES = [torch.float32, F64]


def problem(rows: int, columns: int, cond: float, dtype: torch.dtype, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """A with singular values from 1 to 1 / cond, and targets that are not in its range."""
    g = torch.Generator().manual_seed(rows + columns)
    k = min(rows, columns)
    U = torch.linalg.qr(torch.randn(rows, k, dtype=torch.float64, generator=g)).Q
    V = torch.linalg.qr(torch.randn(columns, k, dtype=torch.float64, generator=g)).Q
    s = torch.logspace(0, -math.log10(cond), k, dtype=torch.float64)
    s[k if rank is None else rank :] = 0
    A = math.sqrt(rows) * (U * s) @ V.T
    noise, W = (torch.randn(n, 3, dtype=torch.float64, generator=g) for n in (rows, columns))
    Z = noise + A @ W
    return A.to(dtype), Z.to(dtype)


def solved(
    A: Tensor, Z: Tensor, bias: bool = False, chunk: int = 64, ridge: float | None = None, products: torch.dtype = F64
) -> Tensor:
    gram = Gram(A.shape[1], bias, A, products)
    R = torch.zeros(Z.shape[1], A.shape[1] + bias, dtype=torch.float64)
    for a, z in zip(A.split(chunk), Z.split(chunk), strict=True):
        gram.accumulate(a)
        R += cross(z.to(products), a.to(products), bias)
    return gram.factor(ridge).solve(R).to(A.dtype)


def distance(W: Tensor, A: Tensor, Z: Tensor) -> float:
    """Relative distance to the SVD's answer, on its well-determined directions."""
    U, s, Vt = torch.linalg.svd(A.double(), full_matrices=False)
    keep = s > WELL_DETERMINED * s[0]
    exact = (Z.double().T @ U[:, keep] / s[keep]) @ Vt[keep]
    return float((W.double() @ Vt[keep].T @ Vt[keep] - exact).norm() / exact.norm())


@pytest.mark.parametrize("cond", [1e2, 1e4, 1e6, 1e8, 1e10, 1e12, 1e14, 1e16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_conditioning(shape: tuple[int, int], dtype: torch.dtype, cond: float) -> None:
    A, Z = problem(*shape, cond, dtype)
    W = solved(A, Z)
    assert torch.isfinite(W).all()
    assert distance(W, A, Z) < BOUND[dtype]


@pytest.mark.parametrize("rank", [1, 2, 5, 29])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(200, 40), (30, 40)], ids=str)
def test_rank(shape: tuple[int, int], dtype: torch.dtype, rank: int) -> None:
    A, Z = problem(*shape, 10.0, dtype, rank)
    W = solved(A, Z)
    assert distance(W, A, Z) < BOUND[dtype]
    assert float(W.norm()) < 100 * float(torch.linalg.lstsq(A.double(), Z.double(), driver="gelsd").solution.norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dead_and_duplicated_columns(dtype: torch.dtype) -> None:
    A, Z = problem(400, 10, 3.0, dtype)
    A = torch.cat([A, A[:, :3], torch.zeros(400, 2, dtype=dtype), torch.ones(400, 1, dtype=dtype)], 1)
    W = solved(A, Z, bias=True)
    best = torch.linalg.lstsq(with_ones(A).double(), Z.double(), driver="gelsd").solution
    torch.testing.assert_close(with_ones(A).double() @ W.double().T, with_ones(A).double() @ best, rtol=0, atol=1e-4)
    assert torch.equal(W[:, 13:15], torch.zeros(3, 2, dtype=dtype))


def test_no_signal_at_all() -> None:
    A = torch.zeros(20, 4)
    assert torch.equal(solved(A, torch.ones(20, 3)), torch.zeros(3, 4))


def test_columns_of_every_scale() -> None:
    """Raw features from 1e-6 to 1e6: the fit is as good as the SVD's."""
    A, Z = problem(500, 13, 5.0, torch.float64)
    A = A * torch.logspace(-6, 6, 13, dtype=torch.float64)
    best = torch.linalg.lstsq(A, Z, driver="gelsd").solution
    W = solved(A, Z)
    assert float((A @ W.T - Z).norm()) < (1 + 1e-9) * float((A @ best - Z).norm())


@pytest.mark.parametrize(("mean", "spread"), [(70.0, 15.0), (290.0, 10.0), (2000.0, 10.0), (-1e4, 1.0)])
@pytest.mark.parametrize("columns", [1, 50, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_far_from_zero(mean: float, spread: float, columns: int, dtype: torch.dtype) -> None:
    """Degrees Kelvin, years: with a bias the means are eliminated, on the side of the rows too.

    What is left is the rounding of float64 sums of squares, of size (mean / spread)^2, times the square of how far
    singular values lie apart (about 5 here).
    """
    bound = max(BOUND[dtype], 5**2 * torch.finfo(torch.float64).eps * (mean / spread) ** 2)
    g = torch.Generator().manual_seed(0)
    A = (mean + spread * torch.randn(120, columns, generator=g, dtype=torch.float64)).to(dtype)
    Z = torch.randn(120, 3, generator=g, dtype=torch.float64).to(dtype)
    centred = A.double() - A.double().mean(0)
    W = solved(A, Z, bias=True).double()
    assert distance(W[:, :-1], centred, Z.double() - Z.double().mean(0)) < bound
    fitted = A.double() @ W[:, :-1].T + W[:, -1]
    torch.testing.assert_close(fitted.mean(0), Z.double().mean(0), rtol=0, atol=10 * bound * abs(mean))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(500, 7), (500, 130), (500, 300), (20, 60)], ids=str)
def test_sums_are_the_products(shape: tuple[int, int], bias: bool) -> None:
    A = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = Gram(shape[1], bias, A)
    for a in A.split(37):
        gram.accumulate(a)
    torch.testing.assert_close(gram.matrix(), A.T @ A, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gram.total, bias * A.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [(0, 3), (3, 5), (5, 40), (40, 60), (60, 60)])
def test_merge(cuts: tuple[int, int]) -> None:
    """Parts of any size, empty ones and ones smaller than the columns among them, add up to the whole."""
    A, Z = problem(60, 12, 10.0, torch.float64)
    whole, R = Gram(12, True, A), torch.zeros(3, 13, dtype=torch.float64)
    R += cross(Z, A, True)
    for part in (A[: cuts[0]], A[cuts[0] : cuts[1]], A[cuts[1] :]):
        gram = Gram(12, True, A)
        if len(part):
            gram.accumulate(part)
        whole.merge(gram)
    torch.testing.assert_close(whole.factor().solve(R), solved(A, Z, bias=True), rtol=1e-9, atol=1e-9)


def test_ridge_shrinks_weights_but_not_the_bias() -> None:
    A, Z = problem(300, 6, 3.0, torch.float64)
    Z = Z + 100
    mean = float(A.square().sum(0).mean())
    penalty = torch.diag(torch.tensor([0.5 * mean] * 6 + [0.0], dtype=torch.float64))
    full = with_ones(A)
    exact = torch.linalg.solve(full.T @ full + penalty, full.T @ Z).T
    torch.testing.assert_close(solved(A, Z, bias=True, ridge=0.5), exact, rtol=1e-9, atol=1e-9)


def summed(A: Tensor, Z: Tensor) -> Tensor:
    """As a sweep solves for W, chunk by chunk."""
    linear = map_of(torch.nn.Linear(A.shape[1], Z.shape[1], bias=False, dtype=A.dtype))
    assert linear is not None
    sums = Sums(linear, linear.read(), ridge=None, rows=Rows(A, Z), comm=Solo())
    for a, z in zip(A.split(1700), Z.split(1700), strict=True):
        sums.add(a, z)
    sums.send()
    return sums.solve()


@pytest.mark.parametrize(("cond", "rank"), [*((10.0**k, None) for k in range(1, 17, 3)), (10.0, 7)])
@pytest.mark.parametrize("shape", [(FLOAT32_ROWS, 40), (FLOAT32_ROWS - 1, 20), (2000, 50), (30, 100)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_a_sweep(shape: tuple[int, int], dtype: torch.dtype, cond: float, rank: int | None) -> None:
    """Whichever products the number of rows leads to, the bound is the same."""
    A, Z = problem(*shape, cond, dtype, rank)
    W = summed(A, Z)
    assert torch.isfinite(W).all()
    assert distance(W, A, Z) < BOUND[dtype]


def test_short_sums_are_what_makes_float32_products_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    A, Z = problem(FLOAT32_ROWS, 40, 100.0, torch.float32)
    short = distance(summed(A, Z), A, Z)
    monkeypatch.setattr("torch_admm.sums.SUM_ROWS", 1e9)
    assert short < BOUND[torch.float32] < distance(summed(A, Z), A, Z)


def test_nan_gives_nan_not_an_exception() -> None:
    A, Z = problem(50, 4, 3.0, torch.float64)
    A[3, 2] = math.nan
    assert torch.isnan(solved(A, Z)).any()


@pytest.mark.parametrize(("inputs", "outputs"), [(3, 8), (8, 3), (5, 5), (4, 1)])
@pytest.mark.parametrize("ones", [True, False])
def test_products_are_written_where_they_are_wanted(inputs: int, outputs: int, ones: bool) -> None:
    a, z = (torch.randn(20, n, generator=rng(n), dtype=torch.float64) for n in (inputs, outputs))
    expected = z.T @ with_ones(a)
    out = laid_out(torch.empty(expected.numel(), dtype=torch.float64), expected.shape)
    assert cross_into(z, with_ones(a) if ones else a, out) is out
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
