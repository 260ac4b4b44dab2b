"""Hard cases with the default method: no NaN, never worse than the start, and what can be learned is learned."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import blobs, net, rng, started
from torch_admm import AnchoredADMM, Outcome, Result, fit, from_module
from torch_admm.data import Rows, rows_of
from torch_admm.losses import AbstractLoss
from torch_admm.stop import is_better

Data = tuple[Tensor, Tensor]
KINDS = {"binary": 1, "classes": 3, "regression": 1, "several targets": 2}


def task(kind: str, rows: int = 200, features: int = 6) -> Data:
    """Something that can be learned: the classes of blobs, or smooth functions of two features."""
    x, _ = blobs(rows, features)
    score = x[:, 0] + x[:, -1].square()
    if kind == "binary":
        return x, (score > score.median()).long()
    if kind == "classes":
        return x, torch.bucketize(score, torch.quantile(score, torch.tensor([1 / 3, 2 / 3])))
    return x, score if kind == "regression" else torch.stack([score, x[:, 0]], 1)


@torch.no_grad()
def figures(model: nn.Module, data: Data, loss: AbstractLoss) -> tuple[float, float]:
    """Mean loss and score of a model, by calling it."""
    rows = rows_of(data, from_module(model, loss))
    assert isinstance(rows, Rows)
    z = model(rows.x)
    return float(loss(z, rows.y).double().mean()), loss.score(z, rows.y)


def run(model: nn.Module, data: Data, sweeps: int = 5, **settings: Any) -> Result:
    """What holds for any data: finite weights, a model that is no worse than at the start, and a sentence."""
    start = copy.deepcopy(model)
    result = fit(model, data, max_sweeps=sweeps, sinks=(), **settings)
    assert result.outcome is Outcome.MAX_SWEEPS
    assert result.message == "all sweeps were made"
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert all(math.isfinite(row["loss"]) for row in result.history)
    monitor, loss = next(k for k in result.best if k.startswith("train_")), result.method.loss
    assert not is_better(monitor, figures(start, data, loss)[1], figures(model, data, loss)[1])
    start = copy.deepcopy(model)
    fit(model, data, AnchoredADMM(loss), max_sweeps=1, sinks=(), monitor="loss")
    assert figures(model, data, loss)[0] <= figures(start, data, loss)[0]
    return result


def falls(result: Result, by: float = 0.1) -> bool:
    """Is the lowest loss of the run by so much below the first?"""
    return min(row["loss"] for row in result.history) < (1 - by) * result.history[0]["loss"]


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.GELU, nn.Hardtanh])
@pytest.mark.parametrize("kind", KINDS)
def test_plain(kind: str, act: type[nn.Module]) -> None:
    assert falls(run(net(6, 20, KINDS[kind], act=act), task(kind)))


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda x: torch.cat([x, torch.ones(len(x), 2)], 1),
    "constant and large": lambda x: torch.cat([x, torch.full((len(x), 2), 1e5)], 1),
    "zero": lambda x: torch.cat([x, torch.zeros(len(x), 2)], 1),
    "duplicated": lambda x: torch.cat([x, x], 1),
    "almost duplicated": lambda x: torch.cat([x, x + 1e-6], 1),
    "from 1e-6 to 1e6": lambda x: x * torch.logspace(-6, 6, x.shape[1]),
    "all 1e-6": lambda x: x * 1e-6,
    "all 1e6": lambda x: x * 1e6,
    "shifted by 1e4": lambda x: x + 1e4,
    "mostly zero": lambda x: torch.cat([x, torch.eye(len(x))[:, :8]], 1),
}


@pytest.mark.parametrize("case", FEATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_features(kind: str, case: str) -> None:
    x, y = task(kind)
    x = FEATURES[case](x)
    assert falls(run(net(x.shape[1], 20, KINDS[kind]), (x, y)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 5])
def test_outliers_in_x(kind: str, count: int) -> None:
    """One feature is flat beside 1e8, but nothing breaks, and the others are still there to learn from."""
    x, y = task(kind)
    x[:count, 0] = 1e8
    assert falls(run(net(6, 20, KINDS[kind]), (x, y)))


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("kind", ["binary", "classes"])
def test_one_class_only(kind: str, label: int) -> None:
    x, y = task(kind)
    assert falls(run(net(6, 20, KINDS[kind]), (x, torch.full_like(y, label))))


@pytest.mark.parametrize("kind", ["binary", "classes"])
def test_one_row_of_a_rare_class(kind: str) -> None:
    x, y = task(kind)
    y = torch.zeros_like(y)
    y[0] = 1
    assert falls(run(net(6, 20, KINDS[kind]), (x, y)))


@pytest.mark.parametrize("kind", KINDS)
def test_targets_by_chance(kind: str) -> None:
    x, y = task(kind)
    run(net(6, 20, KINDS[kind]), (x, y[torch.randperm(len(y), generator=rng(3))]))


@pytest.mark.parametrize("kind", ["binary", "classes"])
def test_labels_that_contradict_each_other(kind: str) -> None:
    """Every row once with each label: the best that can be said is that all are as likely."""
    x, _ = task(kind, 60)
    classes = max(2, KINDS[kind])
    y = torch.arange(classes).repeat_interleave(len(x))
    result = run(net(6, 20, KINDS[kind]), (x.repeat(classes, 1), y), sweeps=20)
    least = math.log(classes)
    assert least * (1 - 1e-6) <= min(row["loss"] for row in result.history) <= least * 1.05
    assert result.history[-1]["loss"] <= least * 1.2


@pytest.mark.parametrize("value", [0.0, 1.0, -7.5, 1e6])
@pytest.mark.parametrize("kind", ["regression", "several targets"])
def test_constant_targets(kind: str, value: float) -> None:
    x, y = task(kind)
    result = run(net(6, 20, KINDS[kind]), (x, torch.full_like(y, value)))
    assert min(row["loss"] for row in result.history) < result.history[0]["loss"]


@pytest.mark.parametrize("size", [1e-6, 1e3, 1e6])
@pytest.mark.parametrize("kind", ["regression", "several targets"])
def test_targets_of_any_size(kind: str, size: float) -> None:
    x, y = task(kind)
    result = run(net(6, 20, KINDS[kind]), (x, y * size))
    assert min(row["loss"] for row in result.history) < result.history[0]["loss"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows(kind: str, rows: int) -> None:
    x, y = task(kind)
    assert falls(run(net(6, 20, KINDS[kind]), (x[:rows], y[:rows]), sweeps=20), 0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 10])
def test_batches_smaller_than_the_width(kind: str, size: int) -> None:
    assert falls(run(net(6, 20, KINDS[kind]), task(kind, 60), batch_size=size), 0.3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(1,), (300,), (1, 300), (300, 1), (1, 1), (150, 140)])
def test_widths(kind: str, widths: tuple[int, ...]) -> None:
    sweeps = 7 if widths == (1, 300) else 5  # all that 300 units see is one number, which takes a while to tell much
    assert falls(run(net(6, *widths, KINDS[kind]), task(kind), sweeps=sweeps))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
def test_twenty_layers(kind: str, act: type[nn.Module]) -> None:
    """Hardly anything of x gets through: nothing breaks, and of numbers to predict the mean is learnt."""
    result = run(net(6, *[12] * 19, KINDS[kind], act=act), task(kind, 100))
    assert falls(result) or kind in ("binary", "classes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
def test_no_hidden_layer(kind: str, bias: bool) -> None:
    assert falls(run(net(6, KINDS[kind], bias=bias), task(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_all_units_dead(kind: str) -> None:
    """Nothing reaches the first layer, but the bias of the last learns what a constant can."""
    model = net(6, 20, KINDS[kind])
    nn.init.constant_(next(p for p in model.parameters() if p.ndim == 1), -1e3)
    x, y = task(kind)
    y = torch.ones_like(y) if not y.is_floating_point() else y + 3
    result = run(model, (x, y))
    assert result.history[-1]["rollbacks"] == 0
    assert falls(result)


@pytest.mark.parametrize("kind", KINDS)
def test_some_units_dead(kind: str) -> None:
    model = net(6, 40, KINDS[kind])
    bias = next(p for p in model.parameters() if p.ndim == 1)
    with torch.no_grad():
        bias[::2] = -1e3
    assert falls(run(model, task(kind)))


@torch.no_grad()
def test_a_network_that_dies_on_the_way_is_taken_back_though_its_loss_is_fine() -> None:
    """All units dead, all classes as likely: a loss below that of the first weights, from which no step leads away."""
    x, y = task("classes")
    method = AnchoredADMM("cross_entropy", batch_size=16, refresh=4)
    model = net(6, 20, 3)
    model[-1].weight.mul_(5)  # type: ignore[operator]
    problem, rows = started(method, model, (x, y))
    method.step()
    method.W[1][:, -1] = -1e3
    method.W[2][:, -1] = 0
    method.V[1].zero_()  # or momentum would move so large a W far enough to be noticed by its loss
    start, dead = (problem.forward(W, rows.x) for W in (method.guard.first_W, method.W))
    assert float(method.loss(dead, y).mean()) < float(method.loss(start, y).mean())
    method.step()
    assert method.rollbacks == 1
    assert bool((problem.layers[1].map.forward(method.W[1], x) > 0).any())


def test_rows_that_fit_from_the_start_are_no_sign_of_an_explosion() -> None:
    """Every other row has a loss of 0 before training, and soon more than twice that."""
    x, model = torch.randn(60, 3, generator=rng(0)), net(3, 8, 1)
    y = 5 * x.sum(1, keepdim=True)
    y[::2] = model(x[::2]).detach()
    result = fit(model, (x, y), AnchoredADMM("squared", batch_size=1, refresh=1), max_sweeps=4, sinks=())
    assert result.history[-1]["rollbacks"] == 0
    assert falls(result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [(), (20,)])
def test_last_layer_from_zero(kind: str, widths: tuple[int, ...]) -> None:
    """Zero is a usual start of a last layer, and a step relative to it must not be zero."""
    model = net(6, *widths, KINDS[kind])
    for p in model[-1].parameters():
        nn.init.zeros_(p)
    assert falls(run(model, task(kind), sweeps=10), 0.05)


@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_any_size_to_start_from(kind: str, size: float) -> None:
    model = net(6, 20, KINDS[kind])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(size)
    assert falls(run(model, task(kind)), 0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_start(kind: str) -> None:
    """Where the loss is as low as it gets there is nothing to win, and little is lost."""
    model = net(6, 20, KINDS[kind])
    x, y = task(kind)
    with torch.no_grad():
        z = model(x)
    if kind in ("binary", "classes"):
        with torch.no_grad():
            for p in model[-1].parameters():
                p.mul_(1e3)
        y = (z[:, 0] > 0).long() if kind == "binary" else z.argmax(1)
    else:
        y = z.squeeze(1) if kind == "regression" else z
    before = [p.detach().clone() for p in model.parameters()]
    result = fit(model, (x, y), max_sweeps=3, sinks=(), monitor="loss")
    assert all(math.isfinite(row["loss"]) for row in result.history)
    assert result.best["loss"] <= result.history[0]["loss"]
    if result.best["sweep"] == 0:
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("loss", ["hinge", "l1", "huber", "logistic", "squared"])
def test_every_loss_of_one_output(loss: str) -> None:
    kind = "binary" if loss in ("hinge", "logistic") else "regression"
    assert falls(run(net(6, 20, 1), task(kind), method=AnchoredADMM(loss)))


@pytest.mark.parametrize("loss", ["cross_entropy", "one_vs_rest_hinge"])
def test_every_loss_of_classes(loss: str) -> None:
    assert falls(run(net(6, 20, 3), task("classes"), method=AnchoredADMM(loss)))


@pytest.mark.parametrize("kind", KINDS)
def test_float64(kind: str) -> None:
    x, y = task(kind)
    y = y.double() if y.is_floating_point() else y
    assert falls(run(net(6, 20, KINDS[kind], dtype=torch.float64), (x.double(), y)))
