"""Least squares from accumulated sums: accumulate -> merge -> factor -> solve.

    argmin_W  sum_rows ||z - W [a, 1]||^2  =  R G^+,    G = sum [a, 1]'[a, 1],    R = sum z'[a, 1]

Only the small matrices G and R are kept, whatever the number of rows (the paper's transpose reduction); while there
are fewer rows than columns the rows themselves are smaller still, and the solve happens on their side.

G is rank-deficient in practice (dead units, duplicated features, few rows), so the pseudo-inverse is taken by iterated
Tikhonov regularisation: with S = a'a, centred if there is a bias, over its mean diagonal, P = (S + delta I)^-1 and
W <- W + (R - W S) P repeated, an eigen-direction of size e is weighed by 1 - (delta / (e + delta))^4. That is 1 on the
well-determined part (singular values above a hundredth of the largest), and goes to 0 smoothly where the sums hold
little but rounding. A smaller delta would resolve more directions and answer all of them less well: W would be large in
those that are barely determined, and its rounding would reach the rest. No step looks at a value on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

__all__ = ["Factor", "Gram", "blocks", "cross", "cross_into", "laid_out", "with_ones"]

DELTA = {  # by the dtypes of the weights and of the products
    (torch.float64, torch.float64): 1e-8,
    (torch.float32, torch.float64): 3e-6,
    (torch.float32, torch.float32): 3e-5,
}
REFINEMENTS = 3
TRIES, JITTER = (
    3,
    100.0,
)  # delta, 100 delta and 10000 delta are tried at once; the smallest that factors is taken
SMALLEST_COLUMN = 0.01  # smaller columns are scaled up to this part of the largest: raw features differ by 1e12
BLOCK = 96  # columns of a block in the symmetric product; narrower ones cost more than they save
MANY = 32  # columns that are worth laying an answer out anew


@final
class Gram:
    """The sums a'a and 1'a over all rows seen, kept in float64.

    Products in float64 (the default) give weights within 1e-10 of the SVD's on the well-determined part. Products in
    float32 are faster; what their rounding leaves depends on how they are added (see `Sums`).
    """

    def __init__(
        self, columns: int, bias: bool, like: Tensor, products: torch.dtype = torch.float64, at_once: int | None = None
    ) -> None:
        """Start with no rows; `columns` counts those of a, without the bias. `like` gives dtype and device."""
        self.columns, self.bias, self.products, self.at_once = columns, bias, products, at_once
        self.delta = DELTA[like.dtype, products]
        self.count = 0
        self.total = torch.zeros(columns, dtype=torch.float64, device=like.device)  # 1'a
        self._rows: list[Tensor] | None = []  # kept while they are fewer than the columns
        self._upper: Tensor | None = None  # then a'a on and above the diagonal

    def accumulate(self, a: Tensor) -> None:
        """Add the rows a, shape (rows, columns)."""
        a = a.to(self.products)
        self.count += len(a)
        if self.bias:
            self.total += a.sum(0)
        if self._rows is not None and self.count < self.columns:
            self._rows.append(a.clone())
        else:
            self._collapse()
            self._add(a)

    def merge(self, other: Gram) -> None:
        """Add all rows that `other` has seen."""
        assert (self.columns, self.bias, self.products) == (other.columns, other.bias, other.products)
        self.count += other.count
        self.total += other.total
        if self._rows is not None and other._rows is not None and self.count < self.columns:
            self._rows += other._rows
        else:
            self._collapse()
            assert self._upper is not None
            self._upper += other.matrix().triu()

    def packed(self, first: int, total: int) -> list[Tensor]:
        """What crosses to other ranks, to be added up: the sums, or where all `total` rows are fewer than the columns,
        these rows, the ones here being those from `first` on.
        """
        if total < self.columns:
            rows = torch.cat([self.total.new_zeros(0, self.columns), *(a.double() for a in self._rows or ())])
            place = self.total.new_zeros(total, self.columns)
            place.narrow(0, first, len(rows)).copy_(rows)
            return [self.total, place]
        self._collapse()
        assert self._upper is not None
        return [self.total, self._upper.view(-1).index_select(0, _upper(self.columns, self.total.device))]

    def unpack(self, sums: Sequence[Tensor], total: int) -> None:
        """Take the place of a Gram that has seen the `total` rows of all ranks."""
        self.count, (self.total, values) = total, sums
        if total < self.columns:
            self._rows, self._upper = [values], None
        else:
            self._rows, self._upper = None, torch.zeros_like(self.total).repeat(self.columns, 1)
            self._upper.view(-1).index_copy_(0, _upper(self.columns, values.device), values)

    def matrix(self) -> Tensor:
        """a'a, (columns, columns) in float64."""
        if self._upper is None:
            rows = torch.cat(self._rows).double() if self._rows else self.total.new_zeros(0, self.columns)
            return rows.T @ rows
        return self._upper.triu() + self._upper.triu(1).T

    def factor(self, ridge: float | None = None) -> Factor:
        """Factor once, solve many. `ridge`, relative to the mean diagonal of a'a, also shrinks W (not the bias).

        With a bias the columns are centred first: their means belong to the bias, and far from zero they would drown
        everything else.
        """
        mean = self.total / max(1, self.count)
        if self._rows and ridge is None:
            A = torch.cat(self._rows).double() - mean
            scale = _column_scale(A.square().sum(0))
            Q, T = torch.linalg.qr((A * scale).T)  # C = A'A = Q T T' Q'
            return Factor(self, mean, scale, T @ T.T, Q)
        G = self.matrix()
        C = G - self.count * torch.outer(mean, mean)
        if ridge is not None:
            C = C + ridge * G.diagonal().mean() * torch.eye(self.columns, dtype=C.dtype, device=C.device)
        scale = _column_scale(C.diagonal().clamp(min=0))
        return Factor(self, mean, scale, scale.unsqueeze(1) * C * scale)

    def _collapse(self) -> None:
        """Turn kept rows into sums."""
        if self._rows is None:
            return
        self._upper = torch.zeros(self.columns, self.columns, dtype=torch.float64, device=self.total.device)
        rows, self._rows = self._rows, None
        for a in rows:
            self._add(a)

    def _add(self, a: Tensor) -> None:
        """a'a on and above the diagonal, by blocks, since torch has no symmetric product."""
        assert self._upper is not None
        for lo, hi in blocks(self.columns):
            left, right = a.narrow(1, lo, hi - lo), a.narrow(1, lo, self.columns - lo)
            self._upper.narrow(0, lo, hi - lo).narrow(1, lo, self.columns - lo).add_(product(left, right, self.at_once))


@final
class Factor:
    """A factored Gram matrix: `solve(R)` is argmin_W sum ||z - W [a, 1]||^2 for R = sum z'[a, 1]."""

    def __init__(self, gram: Gram, mean: Tensor, scale: Tensor, S: Tensor, Q: Tensor | None = None) -> None:
        """`S` is the centred and scaled a'a; with fewer rows than columns, in an orthonormal basis Q of those rows."""
        diagonal = S.diagonal().mean()
        self.unit = torch.where(diagonal == 0, 1.0, diagonal)
        self.S = S / self.unit
        self.P = _shifted_inverse(self.S, gram.delta)
        self.mean, self.scale, self.Q = mean, scale, Q
        self.count, self.bias, self.columns = gram.count, gram.bias, gram.columns

    def solve(self, R: Tensor) -> Tensor:
        """R G^+, float64."""
        R = R.double()
        if not self.bias:
            return self._solve_centred(R)
        z_a, z_1 = R.narrow(1, 0, self.columns), R.narrow(1, self.columns, 1)
        W = self._solve_centred(z_a - z_1 * self.mean)
        return torch.cat([W, z_1 / max(1, self.count) - (W @ self.mean).unsqueeze(1)], dim=1)

    def _solve_centred(self, R: Tensor) -> Tensor:
        X = R * (self.scale / self.unit)
        if self.Q is None:
            return self._filtered(X) * self.scale
        # Centred rows never span all of Q, and what rounding leaves of X in the rest would come out 1 / delta times as
        # large: filtered twice it is gone, and nothing else changes.
        W = self._filtered(self._filtered(X @ self.Q) @ self.S)
        return W @ self.Q.T * self.scale

    def _filtered(self, X: Tensor) -> Tensor:
        """X S^+, by iterated Tikhonov regularisation."""
        W = X @ self.P
        for _ in range(REFINEMENTS):
            W = W + (X - W @ self.S) @ self.P
        return W


def cross_into(z: Tensor, a: Tensor, out: Tensor) -> Tensor:
    """z'[a, 1] in `out`; where a has its ones already, z'a. It is fastest if the longer side of `out` is contiguous."""
    columns = a.shape[1]
    if out.shape[1] == columns:
        return torch.mm(z.T, a, out=out)
    torch.sum(z, 0, out=out.select(1, columns))
    torch.mm(z.T, a, out=out.narrow(1, 0, columns))
    return out


def cross(z: Tensor, a: Tensor, bias: bool, at_once: int | None = None) -> Tensor:
    """z'[a, 1]; without `bias`, or where a has its ones already, z'a."""
    if a.shape[1] < z.shape[1]:  # the thin side first is the faster product
        return product(with_ones(a) if bias else a, z, at_once).T
    R = product(z, a, at_once)
    return torch.cat([R, z.sum(0).unsqueeze(1)], 1) if bias else R.contiguous()


def product(left: Tensor, right: Tensor, at_once: int | None = None) -> Tensor:
    """left'right, with sums over at most `at_once` rows that are then added: one long sum rounds more."""
    stacks = len(left) // at_once if at_once else 0
    if stacks < 2 or at_once is None:
        return _once(left, right)
    whole = stacks * at_once
    first, second = (t.narrow(0, 0, whole).unflatten(0, (stacks, at_once)) for t in (left, right))
    total = torch.bmm(first.mT, second).sum(0)
    if whole < len(left):
        rest = [t.narrow(0, whole, len(t) - whole) for t in (left, right)]
        total += rest[0].T @ rest[1]
    return total


def _once(left: Tensor, right: Tensor) -> Tensor:
    """left'right. Several threads share out the rows of the answer: they had better be its longer side."""
    if torch.get_num_threads() > 1 and MANY <= left.shape[1] < right.shape[1]:
        return (right.T @ left).T
    return left.T @ right


def laid_out(values: Tensor, shape: torch.Size) -> Tensor:
    """A vector as a tensor of this shape. Of a matrix, the longer side is contiguous: products with it are faster."""
    tall = len(shape) == 2 and shape[0] > shape[1]
    return values.view(shape[::-1]).T if tall else values.view(shape)


def with_ones(a: Tensor) -> Tensor:
    """[a, 1]."""
    return torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype, device=a.device)], dim=1)


def blocks(columns: int) -> list[tuple[int, int]]:
    """How the columns are cut for the symmetric product."""
    count = max(1, min(4, columns // BLOCK))
    cuts = [round(columns * i / count) for i in range(count + 1)]
    return list(pairwise(cuts))


@lru_cache
def _upper(columns: int, device: torch.device) -> Tensor:
    """Where the entries on and above the diagonal are, counted row by row."""
    rows, across = torch.triu_indices(columns, columns, device=device).unbind()
    return rows * columns + across


def _shifted_inverse(S: Tensor, delta: float) -> Tensor:
    """(S + delta I)^-1, or with the smallest larger shift at which S is positive definite.

    All shifts are factored in one batch and picked by index on the device, since a retry would have to ask the host.
    If none factors (S is not finite) the answer is NaN, which the caller reports.
    """
    eye = torch.eye(len(S), dtype=S.dtype, device=S.device)
    L, info = torch.linalg.cholesky_ex(torch.stack([S + delta * JITTER**k * eye for k in range(TRIES)]))
    pick = (info != 0).sum().clamp(max=TRIES - 1).reshape(1)
    poison = torch.where(info.index_select(0, pick) == 0, 0.0, math.nan)
    return torch.cholesky_inverse(L.index_select(0, pick).squeeze(0)) + poison


def _column_scale(diagonal: Tensor) -> Tensor:
    norm = diagonal.sqrt()
    up = (norm.max() * SMALLEST_COLUMN / norm).clamp(min=1.0)
    return torch.where(norm > 0, up, 1.0)  # an empty column (a dead unit) stays empty
