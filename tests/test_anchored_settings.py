"""Runs of AnchoredADMM: rows kept out for validation, stopping early, bad settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.helpers import blobs, net, rng
from torch_admm import AnchoredADMM, Outcome, Patience, fit


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
