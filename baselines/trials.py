"""One trial: a method with its settings on a problem, from a seed, for a time, in fresh processes, one a rank.

A trial has a process of its own, so that threads, memory and faults are its own. Processes are forked from a server
that has torch loaded and has not computed yet; the first steps, in which torch starts what it needs, are made on a few
rows before the clock runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, final

import torch

import torch_admm
from torch_admm import AbstractSink, AbstractStop, Outcome, Target, TimeBudget, comm, fit, from_module
from torch_admm.data import rows_of

from . import problems
from .journal import Record, plain
from .machine import fresh_peak_mib, peak_mib, versions
from .methods import Settings, build
from .parts import RARER, InParts

__all__ = ["DIVERGED", "FAILED", "GIVEN_UP", "REACHED", "TIMED_OUT", "Trial", "Watch", "run", "run_apart"]

REACHED, TIMED_OUT, GIVEN_UP, DIVERGED, FAILED = "reached", "timed out", "given up", "diverged", "failed"

SAMPLE = 1_000  # training rows whose loss is recorded: evaluating all, so often, would take longer than training
WARM_UP_ROWS, WARM_UP_SECONDS = 4_096, 0.1
PATIENCE, GRACE = 20.0, 60.0  # seconds on the wall that a trial may take: so many times its own, and so many more
SLOW_TO_LOAD = ("sklearn.datasets", "h5py")  # what reads data; the server loads it once, where it is there
TELL_EVERY = 0.25  # seconds between two lines of live progress
RARELY = 0.12  # of its time so far, between two looks at a trial of a search: coarser than what is published

Watch = Callable[[float, float], None]  # seconds and accuracy so far


@final
@dataclass(frozen=True)
class Trial:
    """All that defines a trial: equal trials have equal keys. The highest target is the one that counts."""

    problem: str
    method: str
    settings: Settings
    seed: int
    threads: int  # of each rank
    seconds: float
    targets: tuple[float, ...]
    data: str  # fingerprint
    to_the_end: bool = True  # for the whole time, not only until the target
    ranks: int = 1
    marks: tuple[tuple[float, float], ...] = ()  # (seconds, accuracy): given up unless it has got so far by then

    @property
    def key(self) -> str:
        task = dataclasses.asdict(problems.task(self.problem))
        everything = plain({**dataclasses.asdict(self), "task": task, **versions()})
        return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def named(self) -> Record:
        """For a journal, with its key."""
        return plain({"key": self.key, **dataclasses.asdict(self)})  # type: ignore[no-any-return]


def run(trial: Trial, folder: Path | None, watch: Watch | None = None) -> Record:
    """Run a trial in this process."""
    torch.set_num_threads(trial.threads)
    task, data = problems.task(trial.problem), problems.load(trial.problem, folder)
    if data.fingerprint != trial.data:
        raise ValueError(f"the data of {trial.problem} are {data.fingerprint}, but {trial.data} when this run began")
    idle = fresh_peak_mib()  # torch and the data; warming up already takes what training will
    _train(trial, task, data, WARM_UP_SECONDS, rows=WARM_UP_ROWS)
    result = _train(trial, task, data, trial.seconds, watch=watch)
    return {**_measured(trial, result), "peak_mib": peak_mib(), "idle_mib": idle}


def run_apart(trial: Trial, folder: Path | None, watch: Watch | None = None) -> Record:
    """Run a trial in processes of its own, one a rank, and give its record, whatever happens to it."""
    begin, limit = perf_counter(), PATIENCE * trial.seconds + GRACE
    mine, its = multiprocessing.get_context("forkserver").Pipe()
    ranks = [
        _server().Process(target=_child, args=(its if not rank else None, trial, folder, place), daemon=True)
        for rank, place in enumerate(_places(trial.ranks))
    ]
    try:
        for process in ranks:
            process.start()
        its.close()
        record = _listen(mine, begin + limit, watch)
    except EOFError:
        ranks[0].join()
        record = _failure(f"the process ended with {_ending(ranks[0].exitcode)}")
    except TimeoutError:
        record = {**_failure(f"no end after {limit:.0f} s on the wall"), "outcome": TIMED_OUT}
    finally:
        for process in ranks:
            process.kill()
            process.join()
        mine.close()
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return plain({**trial.named, **record, "wall": round(perf_counter() - begin, 3), "at": at})  # type: ignore[no-any-return]


def _places(ranks: int) -> list[dict[str, str]]:
    """For each rank what torchrun would put into its environment; nothing for one that is alone."""
    if ranks == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**here, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["baselines.trials", *SLOW_TO_LOAD])
    return context


def _child(connection: Connection | None, trial: Trial, folder: Path | None, place: dict[str, str]) -> None:
    """Rank 0 has the connection, and speaks for all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    warnings.simplefilter("ignore")  # a divergence is an outcome here
    os.environ.update(place)
    say = connection.send if connection else lambda _: None
    try:
        with comm.start(threads=trial.threads):
            record = run(trial, folder, lambda *row: say(("row", *row)))
    except Exception as error:
        record = _failure(f"{type(error).__name__}: {error}")
    say(("record", record))


def _listen(connection: Connection, until: float, watch: Watch | None) -> Record:
    while True:
        if not connection.poll(max(0.0, until - perf_counter())):
            raise TimeoutError
        kind, *parts = connection.recv()
        if kind == "record":
            record: Record = parts[0]
            return record
        if watch:
            watch(*parts)


def _train(
    trial: Trial,
    task: problems.Task,
    data: problems.Data,
    seconds: float,
    *,
    rows: int | None = None,
    watch: Any = None,
) -> torch_admm.Result:
    model, method = problems.network(task.widths, trial.seed), build(trial.method, task.loss, trial.settings)
    x, y = (values[:rows] for values in data.train)
    train = rows_of((x, y), from_module(model, method.loss))
    stop: list[AbstractStop] = [TimeBudget(seconds), _Behind(trial.marks)]
    if not trial.to_the_end:
        stop.append(Target(max(trial.targets)))
    return fit(
        model,
        (x[:SAMPLE], y[:SAMPLE]),
        InParts(method, train, RARER if trial.to_the_end else RARELY),
        max_sweeps=sys.maxsize,
        batch_size=task.batch_size(len(x)),
        evaluate=data.test,
        stop=stop,
        sinks=[_Tell(watch)] if watch else (),
        seed=trial.seed,
    )


def _measured(trial: Trial, result: torch_admm.Result) -> Record:
    curve = [[r["seconds"], r["epochs"], r["test_accuracy"], r["loss"]] for r in result.history]
    reached = {f"{target:g}": _first(curve, target) for target in trial.targets}
    there = reached[f"{max(trial.targets):g}"] is not None
    return {
        "outcome": ENDINGS.get(result.outcome, REACHED if there else TIMED_OUT),
        "message": result.message,
        "reached": reached,
        "best_accuracy": result.best["test_accuracy"],
        "trained_seconds": result.history[-1]["seconds"],
        "epochs": result.history[-1]["epochs"],
        "curve": [[float(f"{v:.5g}") for v in row] for row in curve],
    }


ENDINGS = {Outcome.NON_FINITE: DIVERGED, Outcome.PATIENCE: GIVEN_UP}


def _first(curve: list[list[float]], target: float) -> list[float] | None:
    """Seconds and epochs at the first evaluation there."""
    return next(([seconds, epochs] for seconds, epochs, accuracy, _ in curve if accuracy >= target), None)


def _failure(message: str) -> Record:
    return {"outcome": FAILED, "message": message, "reached": {}, "best_accuracy": None, "curve": []}


def _ending(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


@final
class _Behind(AbstractStop):
    """Ends a trial that has not got as far as it should have by some time."""

    def __init__(self, marks: Sequence[tuple[float, float]]) -> None:
        self.marks = marks

    def check(self, history: Sequence[torch_admm.record.Row], monitor: str) -> Outcome | None:
        now = history[-1]["seconds"]
        wanted = max((accuracy for seconds, accuracy in self.marks if seconds <= now), default=0.0)
        return Outcome.PATIENCE if max(row[monitor] for row in history) < wanted else None


@final
class _Tell(AbstractSink):
    """Passes on a row now and then."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.next = watch, 0.0

    def write(self, row: torch_admm.record.Row) -> None:
        if perf_counter() >= self.next:
            self.watch(row["seconds"], row["test_accuracy"])
            self.next = perf_counter() + TELL_EVERY
