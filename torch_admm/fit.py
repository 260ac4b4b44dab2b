"""The one training loop, for ADMM and baselines alike."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from .anchored import AnchoredADMM
from .arguments import fraction, positive_int
from .data import has_floating_targets, rows_of
from .judge import Judge
from .method import AbstractMethod
from .problem import Weights, from_module
from .record import AbstractSink, Clock, ProgressBar, Row
from .stop import AbstractStop, Outcome, is_better

__all__ = ["Result", "fit"]


@final
@dataclass(frozen=True)
class Result:
    """What a run gives back; the trained model is the object that was passed in."""

    model: nn.Module
    outcome: Outcome
    message: str
    history: list[Row]
    best: Row
    method: AbstractMethod = field(repr=False)


def fit(
    model: nn.Module,
    data: Any,
    method: AbstractMethod | None = None,
    *,
    max_sweeps: int = 100,
    batch_size: int | None = None,
    validation: float | None = None,
    evaluate: Any = None,
    evaluate_every: int = 1,
    monitor: str | None = None,
    stop: AbstractStop | Sequence[AbstractStop] = (),
    sinks: AbstractSink | Sequence[AbstractSink] | None = None,
    seed: int = 0,
    restore_best: bool = True,
    state: dict[str, Any] | None = None,
) -> Result:
    """Train `model` in place and say how it went.

    - `data`: (X, y) as tensors or numpy arrays; the path of an HDF5 file made by `torch_admm.data.hdf5.Writer`; a
      map-style torch Dataset of pairs (x, y); a DataLoader of one, whose batches are then the mini-batches.
    - `method`: AnchoredADMM, BregmanADMM, a baseline or your own AbstractMethod; None takes AnchoredADMM with a loss
      that suits y: squared error for floating targets, logistic loss or cross-entropy for classes.
    - `batch_size`: rows a mini-batch, for methods that have any; None leaves it to the method.
    - `validation`: part of the rows, drawn by the seed, that is kept out of training and recorded as validation_loss
      and validation_<metric>; with `stop=Patience(n)`, early stopping.
    - `evaluate`: held-out data of any of these kinds, recorded as test_loss and test_<metric>, or a function of the
      model that returns a dict of numbers. Every `evaluate_every` sweeps one row is recorded, with the clock standing
      still.
    - `monitor`: the recorded name that tells which row is best. Default: the validation metric, else the test metric,
      else the first number of your own `evaluate`, else the training metric. Smaller is better for residuals and for
      names that end in loss, error, mse, rmse, mae or nll, larger for all others. Choosing by test data flatters the
      result on that data: for an honest figure choose by `validation`.
    - `stop`: rules (Target, Tolerance, Patience, TimeBudget), looked at after each recorded row.
    - `sinks`: where rows go as they come (ProgressBar, JSONLines, TensorBoard); None shows a bar in a terminal.
    - `restore_best`: leave the model at its best recorded row; False leaves it at the last.
    - `state`: go on from what `result.method.state_dict()` gave; sweeps, seconds and history count from here.

    Arguments are checked before anything in the model changes. Training runs outside autocast, whatever surrounds it.
    Ctrl-C ends the run and returns what there is, once the first row has been recorded.
    """
    max_sweeps = positive_int("max_sweeps", max_sweeps)
    every = positive_int("evaluate_every", evaluate_every)
    seed = positive_int("seed", seed, least=0)
    if batch_size is not None:
        batch_size = positive_int("batch_size", batch_size)
    stops = _several("stop", stop, AbstractStop)
    outlets = _several("sinks", ProgressBar() if sinks is None else sinks, AbstractSink)
    method = _default_method(model, data) if method is None else method
    if not isinstance(method, AbstractMethod):
        raise ValueError(f"method is {method!r}; an AbstractMethod such as BregmanADMM(loss) is expected")
    problem = from_module(model, method.loss)
    rows = rows_of(data, problem)
    if batch_size is not None and rows.batch_size not in (None, batch_size):
        raise ValueError(f"batch_size is {batch_size}, but the batches of the DataLoader have {rows.batch_size} rows")
    rows, held = (rows, None) if validation is None else rows.parted(_part(validation, rows.count), seed)
    judge = Judge(problem, rows, held, evaluate, monitor)
    clock = Clock()
    with clock, _outside_autocast(problem.device):
        method.init(problem, rows, batch_size=batch_size, seed=seed)
        if state is not None:
            method.load_state_dict(state)
            problem.write(method.weights())
    run = _Run(method, judge, clock, stops, outlets, every)
    outcome, message = run.loop(max_sweeps)
    problem.write(run.best_weights if restore_best or outcome is Outcome.NON_FINITE else run.last_weights)
    return Result(model, outcome, message, run.history, run.best, method)


@final
@dataclass
class _Run:
    """The loop and what it remembers: the history, and the best row with its weights."""

    method: AbstractMethod
    judge: Judge
    clock: Clock
    stops: list[AbstractStop]
    sinks: list[AbstractSink]
    every: int
    history: list[Row] = field(default_factory=list)
    best: Row = field(default_factory=dict)
    best_weights: Weights = field(default_factory=dict)
    last_weights: Weights = field(default_factory=dict)  # whole, even if Ctrl-C came while they were being written

    def loop(self, max_sweeps: int) -> tuple[Outcome, str]:
        self.last_weights = self.judge.problem.read()
        outcome = self.record(0)  # before the sinks open: it refuses names that are not recorded
        with ExitStack() as stack:
            for sink in self.sinks:
                sink.open(max_sweeps)
                stack.callback(sink.close)
            self.tell(self.history[0])
            try:
                return self.sweeps(max_sweeps) if outcome is None else (outcome, str(outcome))
            except KeyboardInterrupt:
                return Outcome.INTERRUPTED, str(Outcome.INTERRUPTED)

    def sweeps(self, max_sweeps: int) -> tuple[Outcome, str]:
        for sweep in range(1, max_sweeps + 1):
            with self.clock, _outside_autocast(self.judge.problem.device):
                self.method.step()
                W = self.method.weights()
                broken = _non_finite(W)  # waits for the device, so it belongs inside the clock
            if broken:
                message = f"{Outcome.NON_FINITE}: layer {broken[0]}, sweep {sweep}"
                warnings.warn(f"{message}; the model is left at its best finite weights", RuntimeWarning, stacklevel=5)
                return Outcome.NON_FINITE, message
            self.last_weights = dict(W)
            self.judge.problem.write(W)
            if sweep % self.every == 0 or sweep == max_sweeps:
                outcome = self.record(sweep)
                self.tell(self.history[-1])
                if outcome is not None:
                    return outcome, str(outcome)
        return Outcome.MAX_SWEEPS, str(Outcome.MAX_SWEEPS)

    def record(self, sweep: int) -> Outcome | None:
        row = self.judge.judge({"sweep": sweep, "seconds": self.clock.seconds, **self.method.measures()})
        key = self.judge.monitor
        if not self.best or is_better(key, row[key], self.best[key]):
            self.best, self.best_weights = row, self.judge.problem.read()
        self.history.append(row)
        return next((o for rule in self.stops if (o := rule.check(self.history, key)) is not None), None)

    def tell(self, row: Row) -> None:
        for sink in self.sinks:
            sink.write(row)


def _default_method(model: nn.Module, data: Any) -> AbstractMethod:
    """Floating targets: squared error. Classes: logistic loss for one output, cross-entropy for several."""
    if has_floating_targets(data):
        return AnchoredADMM("squared")
    return AnchoredADMM("logistic" if from_module(model, "squared").outputs == 1 else "cross_entropy")


def _part(validation: Any, count: int) -> int:
    """How many rows to keep out: at least one, and not all."""
    part = fraction("validation", validation)
    if part == 0 or count < 2:
        raise ValueError(
            f"validation is {validation!r} of {count} rows; a number between 0 and 1, and 2 rows, are needed"
        )
    return min(count - 1, max(1, round(part * count)))


def _several(name: str, value: Any, kind: type[Any]) -> list[Any]:
    values = list(value) if isinstance(value, list | tuple) else [value]
    for v in values:
        if not isinstance(v, kind):
            raise ValueError(f"{name} has {v!r}; objects of {kind.__name__} are expected")
    return values


@contextmanager
def _outside_autocast(device: torch.device) -> Iterator[None]:
    """Sums and solves in half precision would train nothing."""
    with torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext():
        yield


def _non_finite(W: Weights) -> list[int]:
    flags = torch.stack([torch.isfinite(W_l).all() for W_l in W.values()]).tolist()
    return [l for l, fine in zip(W, flags, strict=True) if not fine]
