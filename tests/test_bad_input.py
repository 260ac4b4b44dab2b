"""Bad input: every message names the argument, what came and what is expected, before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from baselines import SGD
from tests.helpers import blobs, net
from torch_admm import BregmanADMM, Patience, Target, TimeBudget, Tolerance, fit

X, Y = blobs(30)
CLASSES = blobs(30, classes=3)[1]
INF = math.inf


def spoilt(value: float) -> torch.Tensor:
    x = X.clone()
    x[7, 2] = value
    return x


def targets(value: float) -> torch.Tensor:
    y = Y.float()
    y[7] = value
    return y


def given(model: nn.Module | None = None, data: Any = (X, Y), method: Any = None, **options: Any) -> dict[str, Any]:
    return {"model": net(4, 5, 1) if model is None else model, "data": data, "method": method, **options}


DATA: dict[str, tuple[dict[str, Any], str]] = {
    "nan in X": (given(data=(spoilt(math.nan), Y)), r"data: X has nan at row 7, column 2; finite values"),
    "inf in X": (given(data=(spoilt(-INF), Y)), r"data: X has -inf at row 7, column 2; finite values"),
    "nan in y": (
        given(data=(X, targets(math.nan)), method=BregmanADMM("squared")),
        r"data: y\[7\] is nan: targets must be finite",
    ),
    "inf in y": (
        given(data=(X, targets(INF)), method=BregmanADMM("squared")),
        r"data: y\[7\] is inf: targets must be finite",
    ),
    "no rows": (given(data=(X[:0], Y[:0])), r"data: X is empty, shape \(0, 4\); at least one row"),
    "no features": (given(data=(X[:, :0], Y)), r"data: X is empty, shape \(30, 0\); at least one row and one feature"),
    "rows disagree": (given(data=(X, Y[:29])), r"data: X has 30 rows but y has 29; they must agree"),
    "scalar y": (given(data=(X, torch.tensor(1))), r"data: X has 30 rows but y has none; they must agree"),
    "label 2 of 2": (given(data=(X, CLASSES), method=BregmanADMM()), r"data: y\[5\] is 2: expected labels 0 and 1"),
    "labels -1, 1": (given(data=(X, 2 * Y - 1), method=BregmanADMM()), r"data: y .*-1.*map them to 0 and 1"),
    "label 3 of 3": (
        given(net(4, 5, 3), (X, CLASSES + 1), BregmanADMM("cross_entropy")),
        r"data: y\[5\] is 3: expected class labels 0\.\.2",
    ),
    "double X": (given(data=(X.double(), Y)), r"data: X is torch\.float64 but the model's weights are torch\.float32"),
    "numpy double X": (given(data=(X.double().numpy(), Y)), r"data: X is torch\.float64 but .*X\.astype\('float32'\)"),
    "half X": (given(data=(X.half(), Y)), r"data: X is torch\.float16 but the model's weights are torch\.float32"),
    "integer X": (given(data=(X.long(), Y)), r"data: X is torch\.int64 but the model's weights are torch\.float32"),
    "complex y": (given(data=(X, Y.to(torch.complex64))), r"data: y .*complex"),
    "object X": (given(data=(np.array([["a"] * 4] * 30, object), Y)), r"data: X is an array of object; numbers of at"),
    "text y": (given(data=(X, np.array(["a"] * 30))), r"data: y is an array of <U1; numbers of at most 64 bits"),
    "no y": (given(data=(X, None)), r"data: y must be a tensor or a numpy array, got NoneType"),
    "long doubles": (given(data=(X.numpy().astype(np.longdouble), Y)), r"data: X is an array of float128; numbers"),
    "list X": (given(data=(X.tolist(), Y)), r"data: X must be a tensor or a numpy array, got list"),
    "sparse X": (given(data=(X.to_sparse(), Y)), r"data: X is torch\.sparse_coo; a dense tensor is expected"),
    "wrong width": (given(data=(X[:, :3], Y)), r"data: X has shape \(30, 3\); \(rows, 4\) is expected"),
    "flat X": (given(data=(X[:, 0], Y)), r"data: X has shape \(30,\); \(rows, 4\) is expected"),
    "images without Flatten": (given(data=(X.reshape(30, 2, 2), Y)), r"data: X has shape \(30, 2, 2\)"),
    "y too wide": (given(data=(X, torch.stack([Y, Y], 1))), r"data: y .*\(30, 2\)"),
    "y too narrow": (given(net(4, 5, 3), (X, X[:, :2]), BregmanADMM("squared")), r"data: y .*\(30, 2\).*3"),
    "float classes": (given(net(4, 5, 3), (X, CLASSES.float()), BregmanADMM("cross_entropy")), r"data: y .*float32"),
    "one output for classes": (given(method=BregmanADMM("cross_entropy")), r"1 output|outputs"),
    "other device": (
        given(data=(torch.empty(30, 4, device="meta"), Y)),
        r"data: X is on meta but the model is on cpu; move one",
    ),
    "y on other device": (given(data=(X, Y.to("meta"))), r"data: y is on meta but the model is on cpu"),
    "not a pair": (given(data=X), r"data must be a pair \(X, y\) of tensors or numpy arrays, got Tensor"),
    "three of them": (given(data=(X, Y, Y)), r"data must be a pair \(X, y\)"),
    "bad held-out rows": (given(evaluate=(X[:, :3], Y)), r"evaluate: X has shape \(30, 3\)"),
    "zero sweeps": (given(max_sweeps=0), r"max_sweeps is 0; a whole number of at least 1 is expected"),
    "negative sweeps": (given(max_sweeps=-3), r"max_sweeps is -3; a whole number of at least 1"),
    "half a sweep": (given(max_sweeps=2.5), r"max_sweeps is 2\.5; a whole number"),
    "never evaluated": (given(evaluate_every=0), r"evaluate_every is 0; a whole number of at least 1"),
    "negative seed": (given(seed=-1), r"seed is -1; a whole number of at least 0"),
    "shards that ranks cannot share": (given(shards=20), r"shards is 20; a multiple of 24 is expected"),
    "no shards": (given(shards=0), r"shards is 0; a multiple of 24 is expected"),
    "true shards": (given(shards=True), r"shards is True; a multiple of 24 is expected"),
    "a folder without name": (given(checkpoint=""), r"checkpoint is ''; the path of a folder is expected"),
    "empty batch": (given(method=SGD("hinge"), batch_size=0), r"batch_size is 0; a whole number of at least 1"),
    "batches for Bregman": (
        given(method=BregmanADMM(), batch_size=8),
        r"batch_size is 8, but BregmanADMM works on all rows at once",
    ),
    "beta of another depth": (
        given(method=BregmanADMM(beta=[1.0, 1.0, 1.0])),
        r"beta has 3 values; one number or 2, one a layer",
    ),
    "gamma of another depth": (
        given(method=BregmanADMM(gamma=[1.0, 1.0])),
        r"gamma has 2 values; one number or 1, one a layer",
    ),
    "not a method": (given(method="bregman"), r"method is 'bregman'; an AbstractMethod such as BregmanADMM\(loss\)"),
    "not a sink": (given(sinks=["log.txt"]), r"sinks has 'log\.txt'; objects of AbstractSink are expected"),
    "a bare target": (given(stop=0.95), r"stop has 0\.95; objects of AbstractStop are expected"),
    "a bare path": (given(sinks="log.txt"), r"sinks has 'log\.txt'; objects of AbstractSink are expected"),
    "own evaluation of the clock": (
        given(evaluate=lambda m: {"seconds": 1.0}),
        r"evaluate returned .*other names than",
    ),
    "own evaluation as a number": (given(evaluate=lambda m: 1.0), r"evaluate returned 1\.0; a dict of numbers"),
    "not a stop rule": (given(stop=[0.95]), r"stop has 0\.95; objects of AbstractStop are expected"),
    "unknown monitor": (
        given(monitor="auc"),
        r"monitor is 'auc', which is not recorded; recorded are sweep, seconds, ",
    ),
    "unknown watched": (given(stop=Target(1.0, "auc")), r"Target watches 'auc', which is not recorded"),
    "state of another method": (
        given(method=BregmanADMM(), state={"model": {}}),
        r"state has no 'W'; one that BregmanADMM\.state_dict\(\)",
    ),
    "state of another method for Anchored": (
        given(state={"model": {}}),
        r"state has no 'W'; one that AnchoredADMM\.state_dict\(\)",
    ),
    "state of another net": (
        given(method=BregmanADMM(), state={"W": {}, "a": {}, "z": {}, "lam": X, "sweeps": 0}),
        r"state: W\[1\] is nothing; \(5, 5\) is expected",
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_fit(case: str) -> None:
    arguments, message = DATA[case]
    before = [p.clone() for p in arguments["model"].parameters()]
    with pytest.raises(ValueError, match=message):
        fit(**(DEFAULTS | arguments))
    assert all(torch.equal(a, b) for a, b in zip(before, arguments["model"].parameters(), strict=True))


DEFAULTS: dict[str, Any] = {"max_sweeps": 2, "sinks": ()}
NOT_POSITIVE = [0, 0.0, -1.0, math.nan, INF, "1", True, None]
SETTINGS: list[tuple[Callable[[], Any], str]] = [
    *[(lambda v=v, n=n: BregmanADMM(**{n: v}), rf"{n} is .*; a finite number above 0 is expected")
      for n in ("beta", "gamma", "ridge", "dual_step") for v in NOT_POSITIVE if (n, v) != ("ridge", None)],
    (lambda: BregmanADMM(beta=[1.0, -1.0]), r"beta\[1\] is -1\.0; a finite number above 0"),
    (lambda: BregmanADMM(gamma=[math.nan]), r"gamma\[0\] is nan; a finite number above 0"),
    (lambda: BregmanADMM(warm_start=-1), r"warm_start is -1; a whole number of at least 0"),
    (lambda: BregmanADMM(chunk_rows=0), r"chunk_rows is 0; a whole number of at least 1"),
    (lambda: BregmanADMM(multiplier="full"), r"multiplier is 'full'; one of 'paper', 'consistent', 'none'"),  # type: ignore[arg-type]
    (lambda: BregmanADMM(init="zeros"), r"init is 'zeros'; one of 'gaussian', 'model'"),  # type: ignore[arg-type]
    (lambda: BregmanADMM(state_dtype=torch.int8), r"state_dtype is torch\.int8; one of None, torch\.float32"),
    (lambda: BregmanADMM("hinges"), r"'hinges'.*cross_entropy.*hinge.*squared"),
    (lambda: SGD("hinge", lr=-1), r"lr is -1; a finite number above 0"),
    (lambda: Patience(0), r"evaluations is 0; a whole number of at least 1"),
    (lambda: Target(math.nan), r"value is nan; a number is expected"),
    (lambda: Tolerance(-1e-3), r"relative is -0\.001; a finite number above 0"),
    (lambda: TimeBudget(0), r"seconds is 0; a finite number above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), SETTINGS)
def test_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_value_far_down_is_named_by_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are checked some at a time."""
    monkeypatch.setattr("torch_admm.data.checks.CHECK_ENTRIES", 40)
    x, y = blobs(100)
    x[97, 1] = math.inf
    with pytest.raises(ValueError, match=r"data: X has inf at row 97, column 1; finite values are expected"):
        fit(net(4, 3, 1), (x, y), sinks=())
