"""Moments: the damping they apply is the formula, whichever way they keep G."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

from tests.helpers import rng
from torch_admm.moments import FULL, LEADING, SLOWEST, AbstractMoment, FullMoment, LeadingMoment, moment
from torch_admm.spans import Spans

F64 = torch.float64
RHO = 0.7


def rows(count: int, columns: int, seed: int, rank: int | None = None) -> Tensor:
    v = torch.randn(count, columns, generator=rng(seed), dtype=F64)
    if rank is not None:
        v = v[:, :rank] @ torch.randn(rank, columns, generator=rng(99), dtype=F64)
    return v * torch.linspace(0.2, 3, columns, dtype=F64)


def damp(G: Tensor) -> Tensor:
    """rho s (G + rho s I)^-1."""
    ridge = RHO * G.diagonal().mean() * torch.eye(len(G), dtype=F64)
    P: Tensor = ridge @ torch.linalg.inv(G + ridge)
    return P


def taken(part: AbstractMoment) -> list[Tensor]:
    """The sums of the one leaf there is."""
    return [t.squeeze(0) for t in part.take()]


def refreshed(part: AbstractMoment, *batches: Tensor) -> AbstractMoment:
    for v in batches:
        part.look(v, Spans([len(v)]))
        part.refresh(taken(part), len(v))
    return part


def agree(part: AbstractMoment, P: Tensor, tolerance: float) -> None:
    """`right` and `left` are D P and P D, for any D."""
    D = torch.randn(5, len(P), generator=rng(7), dtype=F64)
    torch.testing.assert_close(part.right(D.clone()), D @ P, rtol=0, atol=tolerance)
    torch.testing.assert_close(part.left(D.T.clone()), P @ D.T, rtol=0, atol=tolerance)


def test_kinds() -> None:
    like = torch.zeros(0)
    assert isinstance(moment(FULL, RHO, like), FullMoment)
    assert isinstance(moment(FULL + 1, RHO, like), LeadingMoment)


@pytest.mark.parametrize("columns", [FULL, FULL + 1])
def test_knows_nothing_at_first(columns: int) -> None:
    agree(moment(columns, RHO, torch.zeros(0, dtype=F64)), torch.eye(columns, dtype=F64), 1e-12)


@pytest.mark.parametrize("columns", [2, 9])
@pytest.mark.parametrize("refreshes", [1, 2, 5])
def test_first_refreshes_are_a_plain_mean(columns: int, refreshes: int) -> None:
    """Each refresh counts the same, whatever its number of rows."""
    batches = [rows(10 + 3 * k, columns, k) for k in range(refreshes)]
    part = refreshed(FullMoment(columns, RHO, batches[0]), *batches)
    G = torch.stack([v.T @ v / len(v) for v in batches]).mean(0)
    agree(part, damp(G), 1e-10)


def test_later_refreshes_forget() -> None:
    """Once the mean is as slow as SLOWEST, the newest rows always weigh so much."""
    batches = [rows(15, 6, k) * (1 + k) for k in range(25)]
    part = refreshed(FullMoment(6, RHO, batches[0]), *batches)
    G = torch.zeros(6, 6, dtype=F64)
    for k, v in enumerate(batches, start=1):
        weight = 1 / k if k < 1 / SLOWEST else SLOWEST
        G = (1 - weight) * G + weight * v.T @ v / len(v)
    agree(part, damp(G), 1e-10)


def test_one_column_has_no_direction() -> None:
    """Rows of one number: the formula is a number, which the relative step removes."""
    part = refreshed(moment(1, RHO, torch.zeros(0, dtype=F64)), rows(9, 1, 0))
    agree(part, torch.eye(1, dtype=F64), 0)
    assert part.take() == []


@pytest.mark.parametrize("columns", [1, 6, 150])
def test_what_is_taken(columns: int) -> None:
    """As many sums as the moment says, once, in float64; without rows, zeros of the same shapes."""
    part = moment(columns, RHO, torch.zeros(0))
    part.look(rows(9, columns, 0).float(), Spans([9]))
    seen, nothing = part.take(), part.take()
    assert len(seen) == len(nothing) == part.sums
    for some, none in zip(seen, nothing, strict=True):
        assert some.dtype == none.dtype == F64
        assert some.shape == none.shape
        assert bool((some != 0).any())
        assert not none.any()


@pytest.mark.parametrize("kind", [FullMoment, LeadingMoment])
def test_several_looks_are_one(kind: type[AbstractMoment]) -> None:
    v = rows(60, 200, 1)
    once = refreshed(kind(200, RHO, v), v)
    often = kind(200, RHO, v)
    for part in v.split(17):
        often.look(part, Spans([len(part)]))
    often.refresh(taken(often), len(v))
    D = rows(3, 200, 2)
    torch.testing.assert_close(once.right(D.clone()), often.right(D.clone()), rtol=0, atol=1e-10)


def apart(part: AbstractMoment, P: Tensor) -> float:
    """How far `right` and `left` are from D P and P D, relative to what these take away from D."""
    D = torch.randn(60, len(P), generator=rng(7), dtype=F64)
    gaps = (part.right(D.clone()) - D @ P).norm(), (part.left(D.T.clone()) - P @ D.T).norm()
    return float(max(gaps) / (D @ P - D).norm())


@pytest.mark.parametrize("columns", [FULL + 1, 100, 649])
def test_the_first_directions_are_orthonormal(columns: int) -> None:
    part = LeadingMoment(columns, RHO, torch.zeros(1, dtype=F64))
    torch.testing.assert_close(part.U @ part.U.T, torch.eye(LEADING, dtype=F64), rtol=0, atol=1e-12)
    torch.testing.assert_close(part.U[0], torch.full((columns,), columns**-0.5, dtype=F64))


@pytest.mark.parametrize(("rank", "bound"), [(1, 1e-3), (5, 0.01), (LEADING, 0.06)])
@pytest.mark.parametrize("columns", [130, 300])
def test_leading_eigenvectors_suffice_for_a_low_rank(rank: int, bound: float, columns: int) -> None:
    """After ten refreshes; each is one step of a subspace iteration, so that close eigenvalues take longest."""
    v = rows(400, columns, 3, rank)
    P = damp(v.T @ v / len(v))
    part = refreshed(LeadingMoment(columns, RHO, v), *[v] * 10)
    assert apart(part, P) < bound
    assert apart(refreshed(part, *[v] * 90), P) < bound / 2


@pytest.mark.parametrize(("rank", "first", "later"), [(1, 1e-3, 5e-4), (5, 0.01, 5e-3), (LEADING, 0.09, 0.03)])
def test_leading_eigenvectors_of_the_fewest_columns(rank: int, first: float, later: float) -> None:
    """As above, where directions that are left out lie closest: ten refreshes leave more than of wider rows."""
    v = rows(400, FULL + 2, 3, rank)
    P = damp(v.T @ v / len(v))
    part = refreshed(LeadingMoment(FULL + 2, RHO, v), *[v] * 10)
    assert apart(part, P) < first
    assert apart(refreshed(part, *[v] * 90), P) < later


def test_leading_eigenvectors_of_a_full_rank() -> None:
    """A few large directions among many small ones: those are found, and the others are hardly damped anyway."""
    v = torch.randn(2000, 200, generator=rng(3), dtype=F64) * torch.cat(
        [torch.linspace(20, 10, 8, dtype=F64), torch.full((192,), 0.5, dtype=F64)]
    )
    part = refreshed(LeadingMoment(200, RHO, v), *[v] * 30)
    P = damp(v.T @ v / len(v))
    D = torch.randn(50, 200, generator=rng(7), dtype=F64)
    exact, got = D @ P, part.right(D.clone())
    assert float((exact - got).norm() / exact.norm()) < 0.05
    assert float((exact - D).norm() / exact.norm()) > 0.15


def test_leading_eigenvectors_follow_the_rows() -> None:
    """Rows that turn to directions never seen before: five refreshes later they are damped as by the full G."""
    old, new = (
        torch.randn(300, 4, generator=rng(seed), dtype=F64) @ torch.randn(4, 150, generator=rng(seed + 1), dtype=F64)
        for seed in (1, 3)
    )
    full, leading = (refreshed(kind(150, RHO, old), *[old] * 10, *[new] * 5) for kind in (FullMoment, LeadingMoment))
    assert apart(leading, full.right(torch.eye(150, dtype=F64))) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("rank", [None, 3, 0])
def test_eigenvectors_stay_orthonormal(dtype: torch.dtype, rank: int | None) -> None:
    """U U' = I on the rows that carry something; with no rank left, nothing is damped twice."""
    v = (rows(50, 150, 1, rank) if rank != 0 else torch.zeros(50, 150)).to(dtype)
    part = LeadingMoment(150, RHO, v)
    for k in range(12):
        refreshed(part, v * (1 + 0.1 * k))
        carries = part.e > 1e-3 * part.e.max().clamp_min(1e-300)
        U = part.U.double()[carries]
        eye = torch.eye(len(U), dtype=F64)
        torch.testing.assert_close(U @ U.T, eye, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-7)
        assert float(torch.linalg.matrix_norm(part.U.double(), 2)) < 1 + 1e-5


def test_what_few_rows_leave_open_does_not_depend_on_rounding() -> None:
    """Three rows have three directions; the others are given, not found, and damp nothing until rows have more."""
    v, noise = rows(3, 150, 1), 1 + 1e-15 * torch.randn(3, 150, generator=rng(2), dtype=F64)
    first, second = LeadingMoment(150, RHO, v), LeadingMoment(150, RHO, v)
    for part, seen in ((first, v), (second, v * noise)):
        refreshed(part, *[seen] * 4)
    assert int((first.e > 0).sum()) == 3
    for name in ("U", "e", "cU"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=0, atol=1e-11 * float(first.e[0]))
    refreshed(first, *[rows(50, 150, 3)] * 3)
    assert int((first.e > 0).sum()) == LEADING


@pytest.mark.parametrize("columns", [6, 150])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-15, 1.0, 1e15])
def test_rows_of_any_size(columns: int, dtype: torch.dtype, size: float) -> None:
    """Dead, tiny and huge rows leave D finite and no longer than it was; the damping knows no unit."""
    v = (rows(40, columns, 1, 3)).to(dtype)
    part, unit = moment(columns, RHO, v), moment(columns, RHO, v)
    refreshed(part, *[v * size] * 4)
    refreshed(unit, *[v] * 4)
    D = rows(4, columns, 2).to(dtype)
    right, left = part.right(D.clone()), part.left(D.T.clone())
    for damped in (right, left.T):
        assert bool(torch.isfinite(damped).all())
        assert float(damped.norm()) <= 1.001 * float(D.norm())
    if size >= 1e-15:
        torch.testing.assert_close(right, unit.right(D.clone()), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("columns", [6, 150])
def test_dead_columns(columns: int) -> None:
    """Units that are always zero are not damped, and damp nothing."""
    v = rows(40, columns, 1, 3)
    v[:, ::2] = 0
    part = refreshed(moment(columns, RHO, v), *[v] * 10)
    assert apart(part, damp(v.T @ v / len(v))) < 0.02
    D = rows(4, columns, 2)
    torch.testing.assert_close(part.right(D.clone())[:, ::2], D[:, ::2], rtol=0, atol=1e-9)


@pytest.mark.parametrize("columns", [6, 150])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_state(columns: int, dtype: torch.dtype) -> None:
    """Through a file, in the middle: the same bits from there on."""
    batches = [rows(20, columns, k).to(dtype) for k in range(6)]
    straight = refreshed(moment(columns, RHO, batches[0]), *batches)
    file = io.BytesIO()
    torch.save(refreshed(moment(columns, RHO, batches[0]), *batches[:3]).state_dict(), file)
    file.seek(0)
    resumed = moment(columns, RHO, batches[0])
    resumed.load_state_dict(torch.load(file, weights_only=True))
    refreshed(resumed, *batches[3:])
    D = rows(4, columns, 9).to(dtype)
    assert torch.equal(straight.right(D.clone()), resumed.right(D.clone()))
    assert torch.equal(straight.left(D.T.clone()), resumed.left(D.T.clone()))
    assert straight.right(D.clone()).dtype == dtype


@pytest.mark.parametrize("columns", [6, 150])
def test_a_state_is_copied(columns: int) -> None:
    v = rows(20, columns, 0)
    first = refreshed(moment(columns, RHO, v), v)
    second = moment(columns, RHO, v)
    second.load_state_dict(first.state_dict())
    refreshed(first, 5 * rows(20, columns, 1))
    D = rows(4, columns, 9)
    again = refreshed(moment(columns, RHO, v), v)
    assert torch.equal(second.right(D.clone()), again.right(D.clone()))
