"""The one training loop, for ADMM and baselines alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, final

from torch import nn

from .anchored import AnchoredADMM
from .arguments import choice, fraction, multiple, positive_int
from .checkpoint import Checkpoints
from .comm import AbstractComm, current
from .data import AbstractRows, has_floating_targets, rows_of
from .data.shards import SHARDS
from .errors import CheckpointError
from .identity import fingerprint, identity, in_words
from .judge import Judge
from .method import AbstractMethod
from .precision import suited
from .problem import Problem, from_module
from .record import AbstractSink, Clock, ProgressBar, Row
from .run import Run, conditions
from .stop import AbstractStop, Outcome

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
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    keep: int = 2,
    resume: bool | Literal["auto"] = False,
    deterministic: bool = False,
    shards: int = SHARDS,
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

    - `checkpoint`: a folder for the whole state of the run, every `checkpoint_every` sweeps and at the end; the last
      `keep` stay there. `resume=True` goes on from the newest one, "auto" too if there is any.
    - `deterministic`: any number of ranks gives the same bits, on one kind of CPU; slower, as each rank takes one
      thread and smaller sums.
    - `shards`: parts that the rows are cut into, of which each rank has some; a multiple of 24. With the same shards up
      to so many ranks get the same sums; more ranks have a shard each, and other sums (and cannot be `deterministic`).

    Within `with torch_admm.comm.start():` under torchrun, mpirun or srun all ranks train one model together. Each calls
    `fit` with the same arguments and data, and works on its part of the rows; the weights of rank 0 are what training
    starts from. Sinks, and an `evaluate` that is a function, are called on rank 0 only. The history is the same on all
    ranks, and has the bytes that each handed over while training (`bytes_sent`).

    Arguments are checked before anything in the model changes. Training runs outside autocast, whatever surrounds it.
    AnchoredADMM's sweeps over few rows train a float32 model in float64, where it costs next to nothing.
    Ctrl-C ends the run and returns what there is, once the first row has been recorded. With checkpoints it does so
    after the sweep, whose state is saved; a second one ends it at once.
    """
    comm = current()
    with comm.together():
        _set_shards(comm, deterministic, shards)
        max_sweeps = positive_int("max_sweeps", max_sweeps)
        every = positive_int("evaluate_every", evaluate_every)
        seed = positive_int("seed", seed, least=0)
        batch_size = None if batch_size is None else positive_int("batch_size", batch_size)
        stops = _several("stop", stop, AbstractStop)
        outlets = _several("sinks", ProgressBar() if sinks is None else sinks, AbstractSink)
        keep, save_every = positive_int("keep", keep), positive_int("checkpoint_every", checkpoint_every)
        _check_folder(checkpoint, resume)
        method = _checked_method(_default_method(model, data) if method is None else method)
        problem = from_module(model, method.loss)
        rows, held = _rows(data, problem, batch_size, validation, seed)
        compared = comm.size > 1 or checkpoint is not None  # with other ranks, or with the run that was saved
        about = identity(problem, method, rows, batch_size, seed) if compared else {}
        about |= {"deterministic": str(deterministic), "shards": str(shards)} if compared else {}
        method.comm = comm
        mine, rows = method.part(problem, rows, batch_size), comm.part(rows)
        judge = Judge(problem, rows, held, evaluate, monitor, comm)
        held_out = judge.about() if compared else {}
        drawn = rows.drawn if comm.size > 1 else ""
    if comm.size > 1:
        settings: dict[str, Any] = {"max_sweeps": max_sweeps, "evaluate_every": every, "restore_best": restore_best}
        settings |= {"checkpoint": checkpoint, "checkpoint_every": save_every, "resume": resume, "monitor": monitor}
        settings |= {"keep": keep, "stop": [in_words(rule) for rule in stops], "batches are drawn": drawn}
        common = None if state is None else {name: v for name, v in state.items() if name not in method.by_row}
        comm.same(about | settings | {"evaluated rows": judge.measured(), "state": fingerprint(common)} | held_out)
        problem.write({l: comm.from_first_(W) for l, W in problem.read().items()})
    about |= held_out
    checkpoints = None if checkpoint is None else Checkpoints(checkpoint, comm, about, keep, make=resume is not True)
    with checkpoints or nullcontext():
        clock = Clock()
        with clock, conditions(problem.device, comm):
            little = not deterministic and method.is_little(problem, rows, batch_size)
            method.init(*suited(problem, mine, little), batch_size=batch_size, seed=seed)
            if state is not None:
                method.load_state_dict(state)
                problem.write(method.weights())
        outlets = outlets if comm.rank == 0 else []
        run = Run(method, judge, comm, mine, clock, stops, outlets, every, checkpoints, save_every)
        if checkpoints is not None:
            _take_up(run, checkpoints, resume)
        outcome, message = run.loop(max_sweeps)
    problem.write(run.best_weights if restore_best or outcome is Outcome.NON_FINITE else run.last_weights)
    return Result(model, outcome, message, run.history, run.best, method)


def _take_up(run: Run, checkpoints: Checkpoints, resume: bool | str) -> None:
    """Go on from the newest checkpoint, if that is wanted; never write over those of another run."""
    if not resume:
        if checkpoints.there():
            said = 'resume="auto" (--resume auto) resumes from them; to start afresh, name another folder'
            raise CheckpointError(f"{checkpoints.folder} has checkpoints of a run already; {said}")
        return
    found = checkpoints.load(run.span, run.fits, run.resume, stacklevel=4)  # a warning is for the caller of `fit`
    if found is None and resume is True:
        raise CheckpointError(checkpoints.nothing)


def _set_shards(comm: AbstractComm, deterministic: bool, shards: int) -> None:
    comm.deterministic = choice("deterministic", deterministic, (False, True))
    comm.shards = multiple("shards", shards, SHARDS)
    if deterministic and comm.is_many:
        enough = -(-comm.size // SHARDS) * SHARDS
        said = f"shards={enough} (--shards {enough}) gives the same bits on any number of ranks up to that"
        raise ValueError(f"deterministic is True, but there are {comm.size} ranks and only {shards} shards; {said}")


def _check_folder(checkpoint: str | os.PathLike[str] | None, resume: bool | str) -> None:
    if choice("resume", resume, (False, True, "auto")) and checkpoint is None:
        raise ValueError(f"resume is {resume!r}, but there is no checkpoint; name its folder (--checkpoint)")
    if checkpoint is not None and not os.fspath(checkpoint):
        raise ValueError("checkpoint is ''; the path of a folder is expected")


def _checked_method(method: Any) -> AbstractMethod:
    if not isinstance(method, AbstractMethod):
        raise ValueError(f"method is {method!r}; an AbstractMethod such as BregmanADMM(loss) is expected")
    return method


def _default_method(model: nn.Module, data: Any) -> AbstractMethod:
    """Floating targets: squared error. Classes: logistic loss for one output, cross-entropy for several."""
    if has_floating_targets(data):
        return AnchoredADMM("squared")
    return AnchoredADMM("logistic" if from_module(model, "squared").outputs == 1 else "cross_entropy")


def _rows(
    data: Any, problem: Problem, batch_size: int | None, validation: float | None, seed: int
) -> tuple[AbstractRows, AbstractRows | None]:
    """Those to train on, of all ranks, and those kept out for validation."""
    rows = rows_of(data, problem)
    if batch_size is not None and rows.batch_size not in (None, batch_size):
        said = f"the batches of the DataLoader have {rows.batch_size} rows"
        raise ValueError(f"batch_size is {batch_size}, but {said}")
    return (rows, None) if validation is None else rows.parted(_part(validation, rows.count), seed)


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
