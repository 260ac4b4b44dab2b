"""AnchoredADMM: saving, loading and going on; weights that broke are taken back."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import blobs, net, rng, started
from torch_admm import AnchoredADMM, Outcome, fit
from torch_admm.guard import Guard

# --- save, load, go on


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("standardise", [True, False])
@pytest.mark.parametrize("size", [32, "full"])
def test_k_plus_m_sweeps(size: Any, standardise: bool, average: bool) -> None:
    """The same bits as in a straight run, through a file that holds nothing but tensors and numbers."""
    x, y = blobs(200, 4, 3)
    data = (20 * x + 5, y)

    def run(sweeps: int, state: Any = None) -> tuple[nn.Module, dict[str, Any]]:
        method = AnchoredADMM("cross_entropy", batch_size=size, standardise=standardise, average=average, refresh=3)
        model = net(4, 24, 18, 3)
        fit(model, data, method, max_sweeps=sweeps, sinks=(), seed=2, restore_best=False, state=state)
        return model, method.state_dict()

    straight, _ = run(9)
    file = io.BytesIO()
    torch.save(run(4)[1], file)
    file.seek(0)
    resumed, _ = run(5, torch.load(file, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("loss", ["logistic", "squared", "hinge"])
def test_a_run_can_be_handed_to_another_process(loss: str) -> None:
    """As a result of a worker is: the copy goes on as the run itself does. So are settings, before there is a run."""
    model, data = net(4, 12, 1), blobs(200, 4)
    method = pickle.loads(pickle.dumps(AnchoredADMM(loss, batch_size=50, refresh=3, eta=0.03)))
    result = fit(model, data, method, max_sweeps=2, sinks=())
    for copied in (pickle.loads(pickle.dumps(result)).method, copy.deepcopy(method)):
        kept = method.state_dict()
        for each in (method, copied):
            each.step()
        assert all(torch.equal(W, copied.weights()[l]) for l, W in method.weights().items())
        method.load_state_dict(kept)


def test_resuming_before_a_roll_back() -> None:
    """What a roll-back goes back to is part of the state: the same bits after weights broke in the same way."""
    data = blobs(200, 4, 3)
    methods = [AnchoredADMM("cross_entropy", batch_size=50, refresh=50) for _ in range(2)]
    for method in methods:
        started(method, net(4, 12, 3), data)
    for _ in range(2):
        methods[0].step()
    assert not methods[0].looks()
    methods[1].load_state_dict(methods[0].state_dict())
    for method in methods:
        method.W[1].fill_(math.nan)
        method.step()
        assert method.rollbacks == 1
        method.step()
    first, second = (method.weights() for method in methods)
    assert all(torch.equal(first[l], second[l]) for l in first)


def test_resuming_with_wide_layers() -> None:
    """Moments that keep leading eigenvectors only are part of the state too."""
    x = torch.randn(90, 140, generator=rng(1))
    data = x, x[:, 0] * x[:, 1]

    def run(sweeps: int, state: Any = None) -> tuple[nn.Module, dict[str, Any]]:
        method, model = AnchoredADMM("squared", refresh=2), net(140, 150, 1)
        fit(model, data, method, max_sweeps=sweeps, sinks=(), restore_best=False, state=state)
        return model, copy.deepcopy(method.state_dict())

    straight, resumed = run(4)[0], run(2, run(2)[1])[0]
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_state_of_something_else() -> None:
    x, y = blobs()
    state = AnchoredADMM("logistic")
    started(state, net(4, 7, 1), (x, y))
    for wrong, message in (
        ({"model": {}}, r"state has no 'W'; one that AnchoredADMM\.state_dict\(\) gave"),
        (state.state_dict(), r"state: W\[1\] is \(7, 5\); \(6, 5\) is expected"),
    ):
        with pytest.raises(ValueError, match=message):
            fit(net(4, 6, 1), (x, y), AnchoredADMM("logistic"), max_sweeps=1, sinks=(), state=wrong)


# --- roll-backs


@pytest.mark.parametrize("size", [16, "full"])
@pytest.mark.parametrize("eta", [50.0, 1e3])
def test_what_explodes_is_taken_back(eta: float, size: Any) -> None:
    x, y = blobs(200, 4, 3)
    method = AnchoredADMM("cross_entropy", eta=eta, batch_size=size, refresh=4)
    result = fit(net(4, 24, 20, 3), (x, y), method, max_sweeps=30, sinks=(), restore_best=False)
    backs = [row["rollbacks"] for row in result.history]
    assert result.outcome is Outcome.MAX_SWEEPS
    assert backs[0] == 0 < backs[-1]
    assert backs == sorted(backs)
    assert result.history[-1]["step_length"] < 0.5 * result.history[0]["step_length"]
    assert all(bool(torch.isfinite(p).all()) for p in result.model.parameters())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [16, "full"])
def test_a_run_recovers_from_an_explosion(size: Any, seed: int) -> None:
    """Back to weights that were fine: after enough halvings of a length that is far too large, training works."""
    x, y = blobs(200, 4, 3)
    method = AnchoredADMM("cross_entropy", eta=2.0, half_life=30, head_start=0.0, batch_size=size, refresh=1)
    result = fit(net(4, 24, 20, 3), (x, y), method, max_sweeps=60, sinks=(), restore_best=False, seed=seed)
    assert result.history[-1]["rollbacks"] >= 1
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]


def test_a_loss_of_all_rows_that_rises_again_is_taken_back() -> None:
    """It stays below that of the first weights, and has no chance in it: steps have become too long."""
    W = {1: torch.ones(2, 2)}
    low, high, few = (Guard(W, W) for _ in range(3))
    for guard, later, of_all in ((low, 0.55, True), (high, 0.65, True), (few, 0.65, False)):
        for loss in (1.0, 0.5):
            assert not guard.exploded(loss, lambda: 1.0, W, W, of_all=of_all)
        found = [guard.exploded(later, lambda: 1.0, {1: 2 * W[1]}, W, of_all=of_all) for _ in range(5)]
        assert found == [False] * 4 + [guard is high]
        torch.testing.assert_close(guard.back()[0], W if guard is high else {1: 2 * W[1]})
    assert high.lowest == 0.5
    high.back()  # nothing went well from there: all starts again
    assert high.lowest == math.inf


def test_a_network_that_has_died_is_taken_back() -> None:
    """Its loss may be that of a good guess, but no residual reaches the first layer, so no step would wake it up."""
    x, y = blobs(200, 4, 3)
    method = AnchoredADMM("cross_entropy", batch_size=16, refresh=4)
    started(method, net(4, 24, 20, 3), (x, y))
    method.step()
    method.W[1][:, -1] = -1e3  # biases under which no unit is ever active
    method.step()
    assert method.rollbacks == 1
    assert float(method.W[1][:, -1].abs().max()) < 10


def test_a_network_that_was_never_alive_still_learns_its_biases() -> None:
    x, y = blobs(200, 4, 3)
    model = net(4, 24, 3)
    torch.nn.init.constant_(model[0].bias, -1e3)  # type: ignore[arg-type]
    result = fit(model, (x, y), AnchoredADMM("cross_entropy"), max_sweeps=5, sinks=())
    assert result.history[-1]["rollbacks"] == 0
    assert result.history[-1]["loss"] <= result.history[0]["loss"]


def test_weights_that_keep_failing_are_given_up_for_the_first() -> None:
    """The ones kept may be on the brink: when nothing went well from there twice, training starts again."""
    x, y = blobs(200, 4, 3)
    method = AnchoredADMM("cross_entropy", batch_size=16, refresh=4)
    started(method, net(4, 24, 20, 3), (x, y))
    method.step()
    kept, first = method.guard.kept_W[2].clone(), method.guard.first_W[2].clone()
    assert not torch.equal(kept, first)
    method._roll_back()
    assert torch.equal(method.W[2], kept)
    method._roll_back()
    assert torch.equal(method.W[2], first)


@pytest.mark.parametrize("size", [16, "full"])
def test_weights_that_are_not_finite_do_not_stay(size: Any) -> None:
    """A value that broke W once is gone after the next look, and so is all that was made from it."""
    x, y = blobs(200, 4, 3)
    method = AnchoredADMM("cross_entropy", batch_size=size, refresh=4)
    _, rows = started(method, net(4, 24, 20, 3), (x, y))
    for _ in range(3):
        method.step()
    for W in method.W.values():
        W.fill_(math.nan)
    for _ in range(40):
        method.step()
    assert all(bool(torch.isfinite(W).all()) for W in (*method.W.values(), *method.weights().values()))
    assert 1 <= method.rollbacks <= 3
    start, now = net(4, 24, 20, 3)(x).detach(), method.problem.forward(method.weights(), rows.x)
    assert float(method.loss(now, rows.y).mean()) < 0.8 * float(method.loss(start, rows.y).mean())


def test_a_lucky_first_batch_does_not_end_training() -> None:
    """Rows drawn first that fit already say nothing about the others, whose loss is not an explosion."""
    x = torch.randn(60, 3, generator=rng(0))
    model = net(3, 8, 1)
    y = 5 * x.sum(1, keepdim=True)
    method = AnchoredADMM("squared", batch_size=1)
    _, rows = started(method, model, (x, y))
    first, _ = next(rows.batches(1, 0, 0))
    y[(x == first).all(1)] = model(first).detach()
    result = fit(model, (x, y), AnchoredADMM("squared", batch_size=1), max_sweeps=4, sinks=())
    assert result.best["loss"] < 0.5 * result.history[0]["loss"]
