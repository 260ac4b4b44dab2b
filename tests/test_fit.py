"""The one loop: history, clock, best iterate, stop rules, sinks, Ctrl-C and resuming."""

from __future__ import annotations

import copy
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_admm
from baselines import LBFGS, SGD
from tests.helpers import blobs, net
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, Outcome, Patience, Target, TimeBudget, Tolerance, fit
from torch_admm.record import Clock, Row
from torch_admm.stop import is_better

METHODS: dict[str, Any] = {
    "bregman": lambda: BregmanADMM("hinge", gamma=1.0, warm_start=3),
    "bregman_consistent": lambda: BregmanADMM("logistic", warm_start=2, multiplier="consistent"),
    "bregman_bfloat16": lambda: BregmanADMM("hinge", warm_start=1, state_dtype=torch.bfloat16),
    "anchored": lambda: AnchoredADMM("logistic"),
    "sgd": lambda: SGD("hinge", lr=0.05, batch_size=16),
    "lbfgs": lambda: LBFGS("logistic"),
}


def easy() -> tuple[Tensor, Tensor]:
    x, _ = blobs(300)
    return x, x[:, 0] > x[:, 1]


def test_history_and_result() -> None:
    x, y = easy()
    model = net(4, 6, 1)
    result = fit(model, (x[:200], y[:200]), BregmanADMM(), evaluate=(x[200:], y[200:]), max_sweeps=5, sinks=())
    assert [row["sweep"] for row in result.history] == [0, 1, 2, 3, 4, 5]
    expected = {"sweep", "seconds", "loss", "train_accuracy", "test_loss", "test_accuracy"}
    expected |= {"residual_z", "residual_a", "multiplier"}
    assert all(set(row) == expected for row in result.history)
    assert all(b["seconds"] >= a["seconds"] for a, b in zip(result.history, result.history[1:], strict=False))
    assert (result.outcome, result.message) == (Outcome.MAX_SWEEPS, "all sweeps were made")
    with torch.no_grad():
        hinge = torch.where(y[:200], 1 - model(x[:200])[:, 0], model(x[:200])[:, 0]).relu().mean()
        accuracy = ((model(x[200:])[:, 0] > 0.5) == y[200:]).double().mean()
    assert result.best["loss"] == pytest.approx(float(hinge), rel=1e-5)
    assert result.best["test_accuracy"] == pytest.approx(float(accuracy))


@pytest.mark.parametrize("name", METHODS)
def test_k_plus_m_sweeps(name: str, tmp_path: Path) -> None:
    """k sweeps, save, load, m sweeps: the same bits as k + m sweeps."""
    whole, first, second = METHODS[name](), METHODS[name](), METHODS[name]()
    straight, resumed = net(4, 6, 1), net(4, 6, 1)
    fit(straight, easy(), whole, max_sweeps=7, sinks=(), restore_best=False, seed=5)
    fit(net(4, 6, 1), easy(), first, max_sweeps=3, sinks=(), restore_best=False, seed=5)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    fit(resumed, easy(), second, max_sweeps=4, sinks=(), restore_best=False, seed=5, state=state)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


class Scripted(AbstractMethod):
    """A method whose training loss is written down in advance: the bias of a 1-1 net on the row (0, 0)."""

    def __init__(self, values: list[float], interrupt_at: int | None = None) -> None:
        self.loss = torch_admm.loss_of("squared")
        self.values, self.interrupt_at = values, interrupt_at

    def init(self, problem: Any, rows: Any, *, batch_size: int | None, seed: int) -> None:
        self.sweep = 0

    def step(self) -> None:
        self.sweep += 1
        if self.sweep == self.interrupt_at:
            raise KeyboardInterrupt

    def weights(self) -> dict[int, Tensor]:
        return {1: torch.tensor([[0.0, self.values[self.sweep - 1]]])}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def play(values: list[float], interrupt_at: int | None = None, **options: Any) -> tuple[torch_admm.Result, float]:
    """Losses are the squares of `values`; the bias that is left in the model comes back too."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.bias, 9.0)
    data = torch.zeros(1, 1), torch.zeros(1)
    defaults: dict[str, Any] = {"monitor": "loss", "sinks": (), "max_sweeps": len(values)}
    result = fit(model, data, Scripted(values, interrupt_at), **(defaults | options))
    return result, float(model.bias.detach())


def test_model_is_left_at_its_best() -> None:
    result, bias = play([5.0, 2.0, 3.0])
    assert (bias, result.best["sweep"], result.best["loss"]) == (2.0, 2, 4.0)


def test_model_is_left_at_the_last_if_told() -> None:
    result, bias = play([5.0, 2.0, 3.0], restore_best=False)
    assert (bias, result.best["sweep"]) == (3.0, 2)


def test_never_worse_than_the_start() -> None:
    assert play([20.0, 30.0])[1] == 9.0


STOPS: list[tuple[Any, list[float], Outcome, int]] = [
    (Target(4.0), [5.0, 2.0, 1.0], Outcome.TARGET, 2),
    (Target(100.0), [5.0, 2.0], Outcome.TARGET, 0),
    (Tolerance(1e-3), [5.0, 2.0, 2.0001, 2.0, 2.0, 1.0], Outcome.TOLERANCE, 5),
    (Tolerance(1e-3, evaluations=1), [5.0, 2.0, 2.0, 1.0], Outcome.TOLERANCE, 3),
    (Patience(2), [5.0, 2.0, 3.0, 2.0, 1.0], Outcome.PATIENCE, 4),
    (TimeBudget(1e-9), [5.0, 2.0], Outcome.TIME, 0),
    ([Patience(3), Target(4.0)], [5.0, 2.0, 1.0], Outcome.TARGET, 2),
    ((), [5.0, 2.0, 1.0], Outcome.MAX_SWEEPS, 3),
]


@pytest.mark.parametrize(("stop", "values", "outcome", "sweep"), STOPS)
def test_stop_rules(stop: Any, values: list[float], outcome: Outcome, sweep: int) -> None:
    result, _ = play(values, stop=stop)
    assert (result.outcome, result.history[-1]["sweep"]) == (outcome, sweep)
    assert result.message == outcome.value


def test_ctrl_c_returns_what_there_is() -> None:
    result, bias = play([5.0, 2.0, 3.0, 1.0], interrupt_at=4)
    assert (result.outcome, bias, len(result.history)) == (Outcome.INTERRUPTED, 2.0, 4)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_non_finite_weights_name_layer_and_sweep(broken: float) -> None:
    with pytest.warns(RuntimeWarning, match="NaN or infinite: layer 1, sweep 3; the model is left at its best finite"):
        result, bias = play([5.0, 2.0, broken, 1.0])
    assert (result.outcome, bias, len(result.history)) == (Outcome.NON_FINITE, 2.0, 3)
    assert result.message == "a weight became NaN or infinite: layer 1, sweep 3"


def test_non_finite_in_a_real_sweep_names_the_layer() -> None:
    """A NaN that enters the second layer's variables is found in its weights."""
    x, y = easy()
    method = BregmanADMM("hinge")
    fit(net(4, 6, 5, 1), (x, y), method, max_sweeps=1, sinks=())
    state = method.state_dict()
    state["z"][2][3, 1] = math.nan
    with pytest.warns(RuntimeWarning, match="layer 2, sweep 1"):
        result = fit(net(4, 6, 5, 1), (x, y), BregmanADMM("hinge"), max_sweeps=3, sinks=(), state=state)
    assert all(torch.isfinite(p).all() for p in result.model.parameters())


def test_resuming_starts_from_the_state() -> None:
    """Row 0 is the state's, not that of the model that came in, and a NaN falls back to it."""
    method = BregmanADMM("hinge", gamma=1.0)
    trained = fit(net(4, 6, 1), easy(), method, max_sweeps=15, sinks=(), restore_best=False)
    again = fit(
        net(4, 6, 1), easy(), BregmanADMM("hinge", gamma=1.0), max_sweeps=1, sinks=(), state=method.state_dict()
    )
    assert again.history[0]["loss"] == trained.history[-1]["loss"] != trained.history[0]["loss"]


def test_loading_a_state_forgets_a_broken_sweep() -> None:
    """Sums of an interrupted sweep do not leak into the next one."""
    x, y = easy()
    method = BregmanADMM("hinge", gamma=1.0)
    fit(net(4, 6, 1), (x, y), method, max_sweeps=2, sinks=())
    saved = {k: copy.deepcopy(v) for k, v in method.state_dict().items()}
    method.sums[2].add(x[:, :1].expand(-1, 6), x[:, :1])  # as if Ctrl-C had come in the middle of a sweep
    method.load_state_dict(saved)
    method.step()
    once = method.W[2].clone()
    method.load_state_dict(saved)
    method.step()
    assert torch.equal(once, method.W[2])


@pytest.mark.parametrize("name", ["rmse", "val_error", "Test_MAE"])
def test_own_errors_are_minimised(name: str) -> None:
    result, bias = play([5.0, 2.0, 3.0], evaluate=lambda m: {name: float(m.bias.detach())}, monitor=None)
    assert (result.best[name], bias) == (2.0, 2.0)


def test_residuals_can_be_monitored_and_stop_a_run() -> None:
    rule = Tolerance(0.5, evaluations=1, key="residual_z")
    result = fit(net(4, 6, 1), easy(), BregmanADMM(), max_sweeps=50, monitor="residual_z", stop=rule, sinks=())
    assert result.outcome is Outcome.TOLERANCE
    assert result.best["residual_z"] == min(row["residual_z"] for row in result.history)


def test_training_runs_outside_autocast() -> None:
    plain = fit(net(4, 6, 1), easy(), BregmanADMM("hinge", gamma=1.0), max_sweeps=5, sinks=(), restore_best=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fit(net(4, 6, 1), easy(), BregmanADMM("hinge", gamma=1.0), max_sweeps=5, sinks=(), restore_best=False)
    for a, b in zip(plain.model.parameters(), inside.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_refused_names_leave_an_old_log_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("an old run\n")
    with pytest.raises(ValueError, match="monitor is 'auc'"):
        play([1.0], monitor="auc", sinks=torch_admm.JSONLines(path))
    assert path.read_text() == "an old run\n"


def test_evaluate_every() -> None:
    result, _ = play([5.0, 4.0, 3.0, 2.0, 1.0], evaluate_every=2)
    assert [row["sweep"] for row in result.history] == [0, 2, 4, 5]


def test_own_evaluation_and_monitor() -> None:
    model = net(4, 6, 1)
    seen: list[nn.Module] = []

    def norm(m: nn.Module) -> dict[str, float]:
        seen.append(m)
        return {"norm": float(sum(p.detach().square().sum() for p in m.parameters()))}

    result = fit(model, easy(), BregmanADMM(), evaluate=norm, max_sweeps=4, sinks=())
    assert all(m is model for m in seen)
    assert result.best["norm"] == max(row["norm"] for row in result.history)


def test_unknown_monitor_lists_the_known() -> None:
    with pytest.raises(
        ValueError, match="monitor is 'acc', which is not recorded; recorded are sweep, seconds, loss, train_r2"
    ):
        play([1.0], monitor="acc")


class Hands:
    """A clock for the tests: it shows what they set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_clock_leaves_out_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands()
    monkeypatch.setattr("torch_admm.record.perf_counter", hands)

    def slow(model: nn.Module) -> dict[str, float]:
        hands.now += 100
        return {"one": 1.0}

    def step(self: Scripted) -> None:
        self.sweep += 1
        hands.now += 1

    monkeypatch.setattr(Scripted, "step", step)
    result, _ = play([3.0, 2.0], evaluate=slow)
    assert [row["seconds"] for row in result.history] == [0.0, 1.0, 2.0]
    assert hands.now == 302.0


def test_clock_adds_up_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    hands, clock = Hands(), Clock()
    monkeypatch.setattr("torch_admm.record.perf_counter", hands)
    for _ in range(2):
        with clock:
            hands.now += 3
            assert clock.seconds % 3 == 0
        hands.now += 50
    assert clock.seconds == 6


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("an old run\n")
    result, _ = play([3.0, 2.0], sinks=torch_admm.JSONLines(path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {k: v if math.isfinite(v) else None for k, v in row.items()} for row in result.history
    ]


def test_tensorboard_reads_rows(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result, _ = play([3.0, 2.0], sinks=[torch_admm.TensorBoard(tmp_path)])
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [e.value for e in events.Scalars("loss")] == [row["loss"] for row in result.history]
    assert [e.step for e in events.Scalars("loss")] == [0, 1, 2]


def test_progress_bar_shows_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    play([3.0, 2.0], sinks=torch_admm.ProgressBar("demo", always=True))
    assert "demo: 100%" in screen.getvalue()
    assert "loss=4" in screen.getvalue()


class Recorder(torch_admm.AbstractSink):
    """Notes what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def open(self, max_sweeps: int) -> None:
        self.told.append(max_sweeps)

    def write(self, row: Row) -> None:
        self.told.append(row["sweep"])
        if row["sweep"] == 2:
            raise RuntimeError("disk full")

    def close(self) -> None:
        self.told.append("closed")


def test_sinks_are_closed_whatever_happens() -> None:
    sink = Recorder()
    with pytest.raises(RuntimeError, match="disk full"):
        play([3.0, 2.0, 1.0], sinks=sink)
    assert sink.told == [3, 0, 1, 2, "closed"]


@pytest.mark.parametrize(
    ("y", "outputs", "loss"),
    [
        (torch.zeros(8), 1, "squared"),
        (torch.tensor([0, 1] * 4), 1, "logistic"),
        (torch.tensor([0, 1] * 4), 3, "cross_entropy"),
    ],
)
def test_default_method_suits_the_targets(y: Tensor, outputs: int, loss: str) -> None:
    result = fit(net(2, 3, outputs), (torch.randn(8, 2), y), max_sweeps=1, sinks=())
    assert isinstance(result.method, AnchoredADMM)
    assert result.method.loss.name == loss


@pytest.mark.parametrize(
    ("key", "value", "than", "better"),
    [("loss", 1, 2, True), ("test_loss", 2, 1, False), ("accuracy", 2, 1, True), ("loss", math.nan, 1, False),
     ("loss", 1, math.nan, True), ("accuracy", 1, 1, False), ("residual_z", 1, 2, True)],
)  # fmt: skip
def test_is_better(key: str, value: float, than: float, better: bool) -> None:
    assert is_better(key, value, than) is better


def test_numpy_and_torch_data_agree() -> None:
    x, y = easy()
    results = [
        fit(net(4, 6, 1), data, BregmanADMM(), max_sweeps=3, sinks=())
        for data in ((x, y), (x.numpy(), y.numpy()), [x.numpy(), y.int().numpy()])
    ]
    assert len({result.history[-1]["loss"] for result in results}) == 1
