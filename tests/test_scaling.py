"""Standardised inputs leave no trace: the trained model takes raw inputs, and a trained model starts as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import net, rng, started
from tests.ranks import in_group, on_ranks
from torch_admm import AnchoredADMM, fit, from_module
from torch_admm.comm import AbstractComm, Solo
from torch_admm.data import Rows, rows_of
from torch_admm.gram import with_ones
from torch_admm.scaling import REACH, Scaling, measured

F64 = torch.float64


def raw(rows: int = 300, dtype: torch.dtype = torch.float32) -> Tensor:
    """Four features in units of their own, each spread evenly, so that none reaches far out."""
    u = 2 * torch.rand(rows, 4, generator=rng(1), dtype=F64) - 1
    spread, centre = torch.tensor([[3.0, 200, 0.02, 40]], dtype=F64), torch.tensor([[10.0, -50, 0.3, 0]], dtype=F64)
    return (u * spread + centre).to(dtype)


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0, correction=0)


def targets(x: Tensor) -> Tensor:
    u = standardised(x)
    return u[:, :1] * u[:, 1:2] + u[:, 2:3] - 0.5 * u[:, 3:]


def plain(x: Tensor) -> Rows:
    return Rows(x, torch.zeros(len(x), 1, dtype=x.dtype))


def wanted(x: Tensor, bias: bool = True) -> Scaling:
    scaling = measured(plain(x), bias, True, Solo())
    assert scaling is not None
    return scaling


@pytest.mark.parametrize("bias", [True, False])
def test_fold_and_unfold(bias: bool) -> None:
    """Inverse to each other, and W u = fold(W) x for the same rows."""
    x = raw(dtype=F64)
    scaling = wanted(x, bias)
    W = torch.randn(7, 4 + bias, generator=rng(2), dtype=F64)
    ones = with_ones if bias else torch.clone
    torch.testing.assert_close(scaling.unfold(scaling.fold(W)), W)
    torch.testing.assert_close(scaling.fold(scaling.unfold(W)), W)
    torch.testing.assert_close(ones(scaling(x)) @ W.T, ones(x) @ scaling.fold(W).T)
    torch.testing.assert_close(ones(x) @ W.T, ones(scaling(x)) @ scaling.unfold(W).T)


def test_measures_are_the_textbook_ones() -> None:
    x = raw(dtype=F64)
    torch.testing.assert_close(wanted(x)(x), standardised(x))
    without = wanted(x, bias=False)(x)
    torch.testing.assert_close(without.square().mean(0), torch.ones(4, dtype=F64))
    torch.testing.assert_close(without * x.square().mean(0).sqrt(), x)


def test_x_is_not_written_to() -> None:
    x = raw()
    before = x.clone()
    wanted(x)(x)
    assert torch.equal(x, before)


def test_no_value_ends_up_far_out() -> None:
    """A column that is almost always the same would be blown up by its spread."""
    x = _almost_constant()
    u = wanted(x)(x)
    assert float(u.abs().max()) <= REACH * (1 + 1e-9)
    assert float(u[17, 0]) == pytest.approx(REACH)


@pytest.mark.parametrize("value", [0.0, 3.0, 1e6, 0.1, -1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_constant_features_are_not_blown_up(value: float, dtype: torch.dtype) -> None:
    x = raw(dtype=dtype)
    x[:, 2] = value
    scaling = wanted(x)
    assert bool(torch.isfinite(scaling.scale).all())
    assert float(scaling(x)[:, 2].abs().max()) < 1e-3
    W = torch.randn(5, 5, generator=rng(0), dtype=dtype)
    torch.testing.assert_close(scaling.unfold(scaling.fold(W)), W, rtol=1e-4, atol=1e-3)


def test_many_rows_are_looked_at_in_stretches() -> None:
    x = torch.randn(200_000, 1, generator=rng(0)) * 7 + torch.linspace(0, 1, 200_000)[:, None]
    u = wanted(x)(x)
    assert abs(float(u.mean())) < 0.05
    assert float(u.std()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("where", [slice(0, 1000), slice(-1000, None)])
def test_the_first_and_the_last_rows_are_looked_at(where: slice) -> None:
    x = torch.zeros(200_000, 1)
    x[where] = 50.0
    assert float(wanted(x)(x).abs().max()) <= REACH


def _almost_constant() -> Tensor:
    x = raw(5000, F64)
    x[:, 0] = 3.0
    x[17, 0] = 4.0
    return x


def _scale_of(ranks: AbstractComm) -> list[float]:
    scaling = measured(plain(_almost_constant()).part(ranks.rank, ranks.size), True, True, ranks)
    assert scaling is not None
    return [float(scale) for scale in scaling.scale]


def test_all_ranks_find_how_far_out_a_value_of_any_of_them_is() -> None:
    alone = _scale_of(Solo())
    for found in on_ranks(2, in_group, _scale_of):
        assert found == pytest.approx(alone, rel=1e-12)


AUTO: dict[str, tuple[Any, bool]] = {
    "unit size": (lambda u: u, False),
    "between 0 and 1": (lambda u: (u + 1) / 2, False),
    "one large": (lambda u: u * torch.tensor([1.0, 1.0, 1.0, 1e3]), True),
    "an offset": (lambda u: u + 100, True),
    "all small": (lambda u: u * 1e-3, True),
    "some small": (lambda u: u * torch.tensor([1.0, 1.0, 1e-3, 1e-3]), False),
    "bytes": (lambda u: (u + 1) * 127.5, True),
}


@pytest.mark.parametrize("case", AUTO)
def test_auto(case: str) -> None:
    """None standardises raw data and leaves unit-size data alone; True and False always win."""
    make, acts = AUTO[case]
    x = make(2 * torch.rand(200, 4, generator=rng(0)) - 1)
    for setting, expected in ((None, acts), (True, True), (False, False)):
        method = AnchoredADMM("squared", standardise=setting)
        started(method, net(4, 5, 1), (x, x[:, 0]))
        assert (method.scaling is not None) is expected


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [64, "full"])
@pytest.mark.parametrize("widths", [(4, 12, 1), (4, 1)])
def test_the_model_takes_raw_inputs(widths: tuple[int, ...], size: Any, bias: bool) -> None:
    """Trained on raw inputs, it is the net trained on inputs that were standardised by hand."""
    x = raw(dtype=F64)
    y = targets(x)
    by_hand = standardised(x) if bias else x / x.square().mean(0).sqrt()
    models = []
    for inputs, setting in ((x, True), (by_hand, False)):
        models.append(net(*widths, bias=bias, dtype=F64))
        method = AnchoredADMM("squared", batch_size=size, standardise=setting)
        fit(models[-1], (inputs, y), method, max_sweeps=6, sinks=(), seed=3, restore_best=False)
    with torch.no_grad():
        torch.testing.assert_close(models[0](x), models[1](by_hand), rtol=1e-5, atol=1e-5)


def test_the_loss_on_raw_inputs_is_recorded() -> None:
    """What the history says is what the model does with the raw rows."""
    x = raw()
    model = net(4, 16, 1)
    result = fit(model, (x, targets(x)), max_sweeps=20, sinks=())
    with torch.no_grad():
        assert result.best["loss"] == pytest.approx(float((model(x) - targets(x)).square().mean()), rel=1e-4)
    assert result.best["loss"] < 0.3 * float(targets(x).square().mean())


@pytest.mark.parametrize("standardise", [None, True])
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_training_again_starts_from_what_was_learned(loss: str, standardise: bool | None) -> None:
    x = raw()
    y = targets(x) if loss == "squared" else targets(x)[:, 0] > 0
    model = net(4, 16, 1)
    first = fit(model, (x, y), AnchoredADMM(loss, standardise=standardise), max_sweeps=15, sinks=(), monitor="loss")
    method = AnchoredADMM(loss, standardise=standardise)
    started(method, model, (x, y))
    with torch.no_grad():
        again = from_module(model, loss).forward(method.weights(), x)
        torch.testing.assert_close(again, model(x), rtol=1e-3, atol=1e-3)
    second = fit(model, (x, y), AnchoredADMM(loss, standardise=standardise), max_sweeps=5, sinks=(), monitor="loss")
    assert second.history[0]["loss"] == pytest.approx(first.best["loss"], rel=1e-3)
    assert second.best["loss"] <= second.history[0]["loss"]
    assert second.history[1]["loss"] < 0.5 * first.history[0]["loss"]


def test_fresh_weights_are_taken_for_standardised_inputs() -> None:
    """Weights that fit inputs of unit size better than raw ones are read so: the first sweep starts from there."""
    x = raw()
    y = targets(x)
    model = net(4, 16, 1)
    method = AnchoredADMM("squared", standardise=True)
    started(method, model, (x, y))
    with torch.no_grad():
        got = method.problem.forward(method.weights(), x)
        torch.testing.assert_close(got, model(wanted(x)(x)), rtol=1e-3, atol=1e-3)


def test_bind_measures_the_first_batch() -> None:
    x = raw(400)
    y = targets(x)
    model = net(4, 16, 1)
    opt = AnchoredADMM("squared").bind(model)
    for _ in range(20):
        for i in range(0, 400, 100):
            opt.step(x[i : i + 100], y[i : i + 100])
    assert opt.method.scaling is not None
    torch.testing.assert_close(opt.method.scaling.shift, x[:100].mean(0), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert float((model(x) - y).square().mean()) < 0.3 * float(y.square().mean())


def test_rows_are_left_as_they_are() -> None:
    x = raw()
    before = x.clone()
    fit(net(4, 6, 1), (x, targets(x)), max_sweeps=2, sinks=())
    assert torch.equal(x, before)
    problem = from_module(nn.Linear(4, 1), "squared")
    rows = rows_of((x, targets(x)), problem)
    assert isinstance(rows, Rows)
    assert torch.equal(rows.x, before)
