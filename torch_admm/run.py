"""The loop over sweeps, and what it remembers: on one rank or many, from the start or from a checkpoint."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch

from .checkpoint import Checkpoints, Span, of_another_run
from .comm import AbstractComm
from .data import AbstractRows
from .errors import CheckpointError
from .judge import Judge
from .method import AbstractMethod
from .problem import Weights
from .record import AbstractSink, Clock, Row
from .state import check_part
from .stop import AbstractStop, Outcome, is_better

__all__ = ["Run", "conditions"]

OUTCOMES = list(Outcome)
STORED = ("sweep", "bytes_sent", "history", "best", "best_weights")  # in a checkpoint, as they are


@final
@dataclass
class Run:
    """The loop, its history, and the best row with its weights; the same on all ranks."""

    method: AbstractMethod
    judge: Judge
    comm: AbstractComm
    rows: AbstractRows
    clock: Clock
    stops: list[AbstractStop]
    sinks: list[AbstractSink]
    every: int
    checkpoints: Checkpoints | None = None
    checkpoint_every: int = 1
    sweep: int = 0
    bytes_sent: int = 0  # while training, not while evaluating
    history: list[Row] = field(default_factory=list)
    best: Row = field(default_factory=dict)
    best_weights: Weights = field(default_factory=dict)
    last_weights: Weights = field(default_factory=dict)  # whole, even if Ctrl-C came while they were being written

    def loop(self, max_sweeps: int) -> tuple[Outcome, str]:
        self.last_weights = self.judge.problem.read()
        outcome = self.decided() if self.history else self.record()  # before the sinks open: it refuses unknown names
        with ExitStack() as stack:
            for sink in self.sinks:
                sink.open(max_sweeps)
                stack.callback(sink.close)
            for row in self.history:
                self.tell(row)
            interrupted: list[int] = stack.enter_context(_interrupts()) if self.defers() else []
            try:
                return self.sweeps(max_sweeps, interrupted) if outcome is None else (outcome, str(outcome))
            except KeyboardInterrupt:
                if self.comm.size > 1:
                    raise
                return Outcome.INTERRUPTED, str(Outcome.INTERRUPTED)

    def defers(self) -> bool:
        """Is Ctrl-C to wait for the end of a sweep? One process leaves alone who ignores it, or has other plans."""
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return self.comm.size > 1 or (self.checkpoints is not None and usual)

    def sweeps(self, max_sweeps: int, interrupted: list[int]) -> tuple[Outcome, str]:
        while self.sweep < max_sweeps:
            W, broken = self.step()
            layer, stopped = self.comm.largest(broken, len(interrupted))  # all ranks end together
            if layer:
                message = f"{Outcome.NON_FINITE}: layer {layer}, sweep {self.sweep}"
                warnings.warn(f"{message}; the model is left at its best finite weights", RuntimeWarning, stacklevel=4)
                return Outcome.NON_FINITE, message
            self.last_weights = dict(W)
            self.judge.problem.write(W)
            outcome = None
            if self.sweep % self.every == 0 or self.sweep == max_sweeps:
                outcome = self.record()
                self.tell(self.history[-1])
            if stopped:
                outcome = outcome or Outcome.INTERRUPTED
            if self.sweep % self.checkpoint_every == 0 or self.sweep == max_sweeps or outcome is not None:
                self.save()
            if outcome is not None:
                return outcome, str(outcome)
        return Outcome.MAX_SWEEPS, str(Outcome.MAX_SWEEPS)

    def step(self) -> tuple[Weights, int]:
        """One sweep; the weights, and the first layer that is not finite, or 0."""
        before = self.comm.bytes_sent
        with self.clock, conditions(self.judge.problem.device, self.comm):
            self.method.step()
            W = self.method.weights()
            broken = _non_finite(W)  # waits for the device, so it belongs inside the clock
        self.bytes_sent += self.comm.bytes_sent - before
        self.sweep += 1
        return W, broken

    def record(self) -> Outcome | None:
        seconds = self.comm.from_first_(torch.tensor([self.clock.seconds], dtype=torch.float64))
        row: Row = {"sweep": self.sweep, "seconds": float(seconds)}
        if self.comm.size > 1:
            row["bytes_sent"] = float(self.bytes_sent)
        with conditions(self.judge.problem.device, self.comm):
            row = self.judge.judge({**row, **self.method.measures()})
        key = self.judge.monitor
        if not self.best or is_better(key, row[key], self.best[key]):
            self.best, self.best_weights = row, self.judge.problem.read()
        self.history.append(row)
        return self.decided()

    def decided(self) -> Outcome | None:
        """What the rules say to the history; a rule may look at anything, so that of rank 0 counts."""
        said = [rule.check(self.history, self.judge.monitor) for rule in self.stops]
        code = next((OUTCOMES.index(outcome) for outcome in said if outcome is not None), -1)
        code = int(self.comm.from_first_(torch.tensor([code])))
        return None if code < 0 else OUTCOMES[code]

    def tell(self, row: Row) -> None:
        for sink in self.sinks:
            sink.write(row)

    def save(self) -> None:
        if self.checkpoints is None:
            return
        state = self.method.state_dict()
        by_row = {name: state.pop(name) for name in self.method.by_row}
        shared = {name: getattr(self, name) for name in STORED}
        more = {"seconds": self.clock.seconds, "monitor": self.judge.monitor, "method": state}
        self.checkpoints.save(self.sweep, shared | more, by_row, self.span)

    def fits(self, state: dict[str, Any]) -> None:
        """Is it a state of this run, as far as one rank can tell by itself? Nothing changes."""
        monitor, now = state["monitor"], self.judge.watched(state["monitor"])
        if now != monitor:
            raise CheckpointError(of_another_run("monitor", monitor, now))
        check_part(state["best_weights"], self.judge.problem.read(), "best_weights")
        self.method.check_state(state["method"])

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from what `save` wrote, on any number of ranks."""
        self.method.load_state_dict(state["method"])  # first: it may not take the state up
        self.judge.resume(state["monitor"])
        self.judge.problem.write(self.method.weights())
        self.clock = Clock(state["seconds"])
        for name in STORED:
            setattr(self, name, state[name])
        self.best_weights = {l: W.to(self.judge.problem.device) for l, W in self.best_weights.items()}

    @property
    def span(self) -> Span:
        return Span(self.rows.first, self.rows.count, self.rows.total)


@contextmanager
def conditions(device: torch.device, comm: AbstractComm) -> Iterator[None]:
    """Outside autocast: sums and solves in half precision would train nothing. The same bits need one thread."""
    threads = torch.get_num_threads()
    with torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext():
        try:
            if comm.deterministic:
                torch.set_num_threads(1)
            yield
        finally:
            if comm.deterministic:
                torch.set_num_threads(threads)


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C is kept until all ranks can hear of it, and the state be saved; a second one is for the impatient."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _non_finite(W: Weights) -> int:
    flags = torch.stack([torch.isfinite(W_l).all() for W_l in W.values()]).tolist()
    return next((l for l, fine in zip(W, flags, strict=True) if not fine), 0)
