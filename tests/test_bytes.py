"""What ranks hand over while they train is what the formulas say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baselines import CG, LBFGS, SGD, Adam
from baselines.gradient import AbstractGradientMethod
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, fit

from .helpers import blobs, net
from .ranks import in_group, on_ranks

ROWS = 331
WIDTHS = (4, 9, 5, 1)
SWEEPS = 3
DTYPES = torch.float32, torch.float64

LAYERS = 9 * 5, 5 * 10, 1 * 6
R = sum(LAYERS)
BREGMAN = 8 * (sum(n * (n + 1) // 2 + n for n in (9, 5)) + R)  # of W_1, G belongs to the data, which never change
HEARD = 1 + 14 + 1  # rows, losses, an output
SEEN = HEARD + sum(n * n for n in (5, 10, 6, 9, 5))  # one column has no moment

BRANCHES = {2: 1, 3: 4, 4: 1}  # of the tree of 24 shards that a rank has at most
OF_EIGHT = {2: 1, 3: 2, 4: 1}  # of one of eight pieces, as few rows have
MERGED = {2: 1, 3: 2, 4: 1}  # of that of 8 times 3


def _sent(
    method: AbstractMethod,
    dtype: torch.dtype = torch.float32,
    rows: int = ROWS,
    widths: tuple[int, ...] = WIDTHS,
    **more: Any,
) -> float:
    data = blobs(rows, widths[0], dtype=dtype)
    history = fit(net(*widths, dtype=dtype), data, method, max_sweeps=SWEEPS, sinks=(), **more).history
    return history[-1]["bytes_sent"] - history[0]["bytes_sent"]


def _bregman(ranks: Any) -> Any:
    """One buffer a layer, in double precision."""
    return [(_sent(BregmanADMM("hinge"), dtype), MERGED[ranks.size] * SWEEPS * BREGMAN) for dtype in DTYPES]


def _shared_solve(ranks: Any) -> Any:
    """Of a wide layer, each rank solves for some outputs, and the weights cross once more.

    Its sums are large enough to go by stripes: one of as many as there are ranks more.
    """
    inputs, outputs = 600, 150
    sums = 8 * (outputs * inputs + outputs * (outputs + 1) // 2 + outputs + outputs + 1)
    found = []
    for dtype in DTYPES:
        sent = _sent(BregmanADMM("hinge"), dtype, 180, (inputs - 1, outputs, 1))
        solved, stripe = dtype.itemsize * outputs * inputs, 8 * outputs * inputs // ranks.size
        found.append((sent, SWEEPS * (MERGED[ranks.size] * sums + stripe + solved)))
    return found


def _batches(ranks: Any) -> Any:
    """One leaf, two, and eight, of which a rank of three has two branches of their tree; then all rows as one batch.

    A loss that is higher than all before is compared with that of the first weights on the same rows: one more number.
    """
    found, compared, losses = [], list[int](), AnchoredADMM._first_losses

    def counted(*arguments: Any) -> Any:
        compared.append(1)
        return losses(*arguments)

    AnchoredADMM._first_losses = counted  # type: ignore[method-assign, assignment]
    many = 2100, 2048, MERGED[ranks.size]
    for dtype in DTYPES:
        for rows, size, most in ((ROWS, 40, 1), (ROWS, 100, 1), (ROWS, ROWS - 1, 1), many, (ROWS, ROWS, 1)):
            number = 8 if size == rows else dtype.itemsize  # few rows in double precision
            steps = SWEEPS * -(-rows // size)
            looks = sum(step < steps for step in (0, 1, 12))
            compared.clear()
            sent = _sent(AnchoredADMM("hinge", batch_size=size, refresh=1000), dtype, rows)
            lines = sum(-(-n * number // 64) * 64 for n in LAYERS)  # they start at multiples of 64 bytes
            found.append((sent, most * (lines * steps + 8 * (SEEN * looks + len(compared)))))
    return found


def _shards(ranks: Any) -> Any:
    """Where shards are added up by a tree: as many times as the rank with most of them has branches."""
    sent = _sent(AnchoredADMM("hinge", batch_size="full", refresh=1000), deterministic=True)
    return [(sent, BRANCHES[ranks.size] * 8 * (SWEEPS * R + 2 * SEEN))]


def _baselines(ranks: Any) -> Any:
    """One buffer of all gradients a step of SGD and Adam, in the precision of the model; of searches, an evaluation.

    Two numbers go with it: the loss and the rows.
    """
    found, evaluated, mean_gradient = [], list[int](), AbstractGradientMethod.mean_gradient

    def counted(*arguments: Any) -> Any:
        evaluated.append(1)
        return mean_gradient(*arguments)

    AbstractGradientMethod.mean_gradient = counted  # type: ignore[method-assign, assignment]
    for dtype in DTYPES:
        for deterministic in (False, True):
            for kind, number in ((SGD, dtype.itemsize), (Adam, dtype.itemsize), (LBFGS, 8), (CG, 8)):
                evaluated.clear()
                size = {"batch_size": 100} if kind in (SGD, Adam) else {}
                sent = _sent(kind("hinge", **size), dtype, deterministic=deterministic)  # type: ignore[arg-type]
                assert len(evaluated) == SWEEPS * 4 if size else len(evaluated) >= SWEEPS
                branches = BRANCHES if deterministic else {ranks.size: 1} if size else OF_EIGHT
                found.append((sent, branches[ranks.size] * len(evaluated) * number * (R + 2)))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("task", [_bregman, _batches, _shards, _baselines])
def test_bytes_sent_are_those_of_the_formula(size: int, task: Any) -> None:
    for found in on_ranks(size, in_group, task):
        assert isinstance(found, list), found
        assert [sent for sent, _ in found] == [formula for _, formula in found], found


def test_those_of_a_solve_that_is_shared_too() -> None:
    for found in on_ranks(3, in_group, _shared_solve):
        assert isinstance(found, list), found
        assert [sent for sent, _ in found] == [formula for _, formula in found], found
