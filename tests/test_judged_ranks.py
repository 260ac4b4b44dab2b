"""Figures of the model, and so best row, stop and weights, are the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from torch_admm import AnchoredADMM, BregmanADMM, Outcome, Patience, fit

from .helpers import blobs, net, rng
from .ranks import in_group, on_ranks

ROWS = 331
NOT_JUDGED = ("seconds", "bytes_sent")


def _data(loss: str, rows: int, outputs: int, inputs: int = 5) -> tuple[Tensor, Tensor]:
    x, y = blobs(rows, inputs, max(2, outputs))
    noise = torch.randn(rows, outputs, generator=rng(3))
    return x, x.narrow(1, 0, outputs) + 0.3 * noise if loss == "squared" else y


CASES: dict[str, tuple[Any, str, tuple[int, ...], int]] = {
    "regression": (lambda loss: AnchoredADMM(loss, batch_size=64), "squared", (5, 8, 1), ROWS),
    "linear regression": (BregmanADMM, "squared", (5, 1), ROWS),
    "two targets": (lambda loss: BregmanADMM(loss, multiplier="none"), "squared", (5, 2), ROWS),
    "binary": (lambda loss: AnchoredADMM(loss, batch_size="full"), "logistic", (5, 9, 1), ROWS),
    "classes": (lambda loss: AnchoredADMM(loss, batch_size=64), "cross_entropy", (5, 9, 4), ROWS),
    "a larger net": (lambda loss: AnchoredADMM(loss, batch_size="full"), "squared", (50, 200, 2), 2501),
    "few rows": (BregmanADMM, "squared", (5, 1), 2),
}


def _run(name: str, dataset: bool, turned: bool = False, **more: Any) -> Any:
    """The history, as far as it is judged, why it ended, and the weights of its best row."""
    make, loss, widths, rows = CASES[name]
    model, method = net(*widths), make(loss)
    x, y = _data(loss, rows, widths[-1], widths[0])
    x = x.T.contiguous().T if turned else x
    options: dict[str, Any] = {"max_sweeps": 30, "stop": Patience(3), "sinks": (), **more}
    result = fit(model, TensorDataset(x, y) if dataset else (x, y), method, evaluate=(x[:99], y[:99]), **options)
    history = [{k: v for k, v in row.items() if k not in NOT_JUDGED} for row in result.history]
    weights = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return history, result.best["sweep"], str(result.outcome), result.message, weights


def _runs(_: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name in CASES:
        found[name, "metric"] = _run(name, False, monitor=None)
        found[name, "train loss"] = _run(name, False, monitor="loss")
    found["regression", "validation"] = _run("regression", False, validation=0.2)
    found["binary", "by columns"] = _run("binary", False, turned=True)
    for name in ("regression", "classes"):
        found[name, "not in memory"] = _run(name, True)
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_what_is_judged_is_the_same_on_any_number_of_ranks(size: int) -> None:
    (alone,) = on_ranks(1, in_group, _runs)
    assert isinstance(alone, dict), alone
    for several in on_ranks(size, in_group, _runs):
        assert isinstance(several, dict), several
        assert {key: several[key] == alone[key] for key in alone} == dict.fromkeys(alone, True)
    assert {key for key, found in alone.items() if found[2] == str(Outcome.PATIENCE)}, "or nothing was ever the best"
