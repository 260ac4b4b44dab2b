"""AnchoredADMM.bind: steps in a loop of one's own."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import blobs, net, rng
from torch_admm import AnchoredADMM, BoundADMM, fit


def loop(model: nn.Module, opt: BoundADMM, epochs: int, inside: Callable[[int], bool] = lambda _: False) -> None:
    """Train on blobs of three classes; `inside` says which epochs run in inference mode."""
    for epoch in range(epochs):
        loader = DataLoader(TensorDataset(*blobs(300, 4, 3)), 50, shuffle=True, generator=rng(epoch))
        with torch.inference_mode(inside(epoch)):
            for x, y in loader:
                opt.step(x, y)


def accuracy(model: nn.Module) -> float:
    x, y = blobs(300, 4, 3)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def test_bind() -> None:
    model = net(4, 24, 16, 3)
    opt = AnchoredADMM(loss="cross_entropy").bind(model)
    before = accuracy(model)
    loop(model, opt, 25)
    assert before < 0.5
    assert accuracy(model) > 0.9


@pytest.mark.parametrize("inside", [lambda _: True, lambda e: e % 2 == 0, lambda e: e % 2 == 1])
def test_bind_in_inference_mode(inside: Callable[[int], bool]) -> None:
    """The same bits whatever surrounds the steps."""
    models = [net(4, 24, 16, 3) for _ in range(2)]
    for model, where in zip(models, (lambda _: False, inside), strict=True):
        loop(model, AnchoredADMM("cross_entropy").bind(model), 4, where)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert not any(p.is_inference() for p in models[1].parameters())


def test_bind_made_in_inference_mode() -> None:
    model = net(4, 24, 3)
    with torch.inference_mode():
        opt = AnchoredADMM("cross_entropy", standardise=True).bind(model)
    loop(model, opt, 2, lambda e: e == 1)
    with torch.inference_mode():
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    loop(model, opt, 2, lambda e: e == 1)
    assert accuracy(model) > 0.4


@pytest.mark.parametrize("wanted", [True, False])
def test_no_graph(wanted: bool) -> None:
    """Parameters stay leaves without gradients, whatever their requires_grad, which stays as it is."""
    model = net(4, 10, 3).requires_grad_(wanted)
    start = [p.clone() for p in model.parameters()]
    kept = list(model.parameters())
    x, y = blobs(100, 4, 3)
    opt = AnchoredADMM("cross_entropy").bind(model)
    with torch.enable_grad():
        for _ in range(3):
            opt.step(x.requires_grad_(), y)
    for p, q, before in zip(model.parameters(), kept, start, strict=True):
        assert p is q
        assert p.is_leaf
        assert p.grad is None
        assert p.grad_fn is None
        assert p.requires_grad is wanted
        assert not torch.equal(p, before)
    assert x.grad is None
    assert not any(t.requires_grad for t in (*opt.method.W.values(), *opt.method.V.values()))


def test_bound_state() -> None:
    """Five epochs, or two, a file and three in new objects: the same bits."""
    models = [net(4, 24, 18, 3) for _ in range(3)]
    opts = [AnchoredADMM("cross_entropy", standardise=True).bind(model) for model in models]
    x, y = blobs(300, 4, 3)
    for epoch in range(5):
        for i in range(0, 300, 64):
            opts[0].step(10 * x[i : i + 64], y[i : i + 64])
            opts[1 if epoch < 2 else 2].step(10 * x[i : i + 64], y[i : i + 64])
        if epoch == 1:
            file = io.BytesIO()
            torch.save(opts[1].state_dict(), file)
            file.seek(0)
            opts[2].load_state_dict(torch.load(file, weights_only=True))
            assert all(torch.equal(a, b) for a, b in zip(models[1].parameters(), models[2].parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[2].parameters(), strict=True))


def test_a_state_of_something_else() -> None:
    opt = AnchoredADMM("cross_entropy").bind(net(4, 10, 3))
    with pytest.raises(ValueError, match=r"state has no 'usual'; one that BoundADMM\.state_dict\(\) gave is expected"):
        opt.load_state_dict(opt.method.state_dict())


def test_a_short_batch_steps_as_far_as_a_usual_one() -> None:
    """Lengths are made for the rows of most batches; the last one of an epoch has less to say, not less to do."""
    x, y = blobs(2048, 4, 3)
    method = AnchoredADMM("cross_entropy", average=False)
    opt = method.bind(net(4, 10, 3))
    opt.step(x, y)
    before, length = {l: W.clone() for l, W in method.W.items()}, method._length(2048)
    opt.step(x[:64], y[:64])
    assert length > method._length(64)
    for l, W in method.W.items():
        size = max(float(before[l].norm()), float(method.motion.first[l]))
        assert float((W - before[l]).norm()) == pytest.approx(length * size, rel=1e-3)


def test_a_state_in_memory_stays_as_it_was() -> None:
    """What state_dict gave is not changed by later steps, so going back to it goes back."""
    model = net(4, 10, 3)
    opt = AnchoredADMM("cross_entropy").bind(model)
    loop(model, opt, 1)
    state, then = opt.state_dict(), [p.detach().clone() for p in model.parameters()]
    loop(model, opt, 1)
    opt.load_state_dict(state)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), then, strict=True))


def test_bound_is_fit_without_the_loop() -> None:
    """The batches of an epoch by hand: the same bits as in fit."""
    x, y = blobs(200, 4, 3, dtype=torch.float64)
    by_fit, by_hand = (net(4, 12, 3, dtype=torch.float64) for _ in range(2))
    method = AnchoredADMM("cross_entropy", batch_size=50)
    fit(by_fit, (x, y), method, max_sweeps=3, sinks=(), restore_best=False)
    opt = AnchoredADMM("cross_entropy").bind(by_hand)
    for epoch in range(3):
        for batch in method.rows.batches(50, 0, epoch):
            opt.step(*batch)
    for a, b in zip(by_fit.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(a, b)


X, Y = blobs(30, 4, 3)
NAN = X.clone()
NAN[7, 2] = math.nan
BATCHES: dict[str, tuple[Any, Any, str]] = {
    "wrong width": (X[:, :3], Y, r"batch: X has shape \(30, 3\); \(rows, 4\) is expected"),
    "flat": (X[:, 0], Y, r"batch: X has shape \(30,\); \(rows, 4\) is expected"),
    "float labels": (X, Y.float(), r"y has dtype torch\.float32, expected integer class labels"),
    "label 3": (X, Y + 1, r"y\[\d+\] is 3: expected class labels 0\.\.2"),
    "rows disagree": (X, Y[:29], r"batch: X has 30 rows but y has 29; they must agree"),
    "no rows": (X[:0], Y[:0], r"batch: X is empty, shape \(0, 4\)"),
    "doubles": (X.double(), Y, r"batch: X is torch\.float64 but the model's weights are torch\.float32"),
}


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("case", BATCHES)
def test_bad_batches(case: str, steps: int) -> None:
    """At the first step and at one that does not look: refused before anything changes."""
    x, y, message = BATCHES[case]
    model = net(4, 6, 3)
    opt = AnchoredADMM("cross_entropy").bind(model)
    for _ in range(steps):
        opt.step(X, Y)
    assert opt.method.looks() == (steps == 0)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        opt.step(x, y)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    opt.step(X, Y)  # and nothing of it is left
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_nan_at_the_first_step() -> None:
    opt = AnchoredADMM("cross_entropy").bind(net(4, 6, 3))
    with pytest.raises(ValueError, match=r"batch: X has nan at row 7, column 2; finite values are expected"):
        opt.step(NAN, Y)


def test_nan_later_is_taken_back() -> None:
    """A step that does not look lets a NaN through; the next look takes it back."""
    model = net(4, 24, 20, 3)
    opt = AnchoredADMM("cross_entropy", refresh=4).bind(model)
    for step in range(40):
        opt.step(NAN if step == 5 else X, Y)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert opt.method.rollbacks == 1


def test_bound_flattens() -> None:
    model = nn.Sequential(nn.Flatten(), *net(4, 6, 3))
    opt = AnchoredADMM("cross_entropy").bind(model)
    for _ in range(5):
        opt.step(X.reshape(30, 2, 2), Y)
    assert bool(torch.isfinite(model(X.reshape(30, 2, 2))).all())
