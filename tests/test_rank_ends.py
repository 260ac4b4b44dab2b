"""All ranks end together, for one reason and with one history."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from baselines import SGD
from torch_admm import AbstractStop, AnchoredADMM, BregmanADMM, Outcome, Patience, Target, TimeBudget, fit
from torch_admm.record import Row

from .helpers import blobs, net
from .ranks import in_group, on_ranks

ROWS = 331  # a prime: no number of ranks divides it


def _weights(model: nn.Module) -> list[float]:
    found: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return found


class AtThird(AbstractStop):
    """Ends the run on one rank, if that were asked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def check(self, history: Sequence[Row], monitor: str) -> Outcome | None:
        return Outcome.PATIENCE if len(history) > 3 and int(os.environ["RANK"]) == self.rank else None


class Interrupts(AbstractStop):
    """Ctrl-C, on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def check(self, history: Sequence[Row], monitor: str) -> Outcome | None:
        if history[-1]["sweep"] == 2 and int(os.environ["RANK"]) == self.rank:
            os.kill(os.getpid(), signal.SIGINT)
        return None


def _evaluate(model: nn.Module) -> dict[str, float]:
    return {"mine": float(os.getpid())}  # not the same on any two ranks


def _ends(ranks: Any) -> Any:
    model, data = net(4, 9, 5, 1), blobs(ROWS, 4)
    with torch.no_grad():
        model[0].weight += ranks.rank  # the weights of rank 0 are what counts
    more: dict[str, Any] = {"sinks": (), "method": AnchoredADMM("hinge"), "evaluate": _evaluate}
    found = [
        fit(model, data, max_sweeps=6, stop=AtThird(0), **more),
        fit(model, data, max_sweeps=5, stop=AtThird(1), **more),
        fit(model, data, max_sweeps=400, stop=TimeBudget(0.05), **more),
        fit(model, data, max_sweeps=50, stop=Interrupts(0), **more),
        fit(model, data, max_sweeps=50, stop=Interrupts(2), **more),
        fit(model, blobs(3, 4), BregmanADMM("hinge"), max_sweeps=3, sinks=()),  # fewer rows than ranks
        fit(model, blobs(3, 4), AnchoredADMM("hinge"), max_sweeps=3, batch_size=2, sinks=()),
        fit(model, (data[0], data[0][:, 0]), max_sweeps=2, validation=0.2, sinks=()),  # r2
    ]
    return [(str(run.outcome), len(run.history), run.history) for run in found], _weights(model)


def test_all_ranks_end_together_for_the_same_reason() -> None:
    first, *others = on_ranks(4, in_group, _ends)
    assert isinstance(first, tuple), first
    outcomes = [outcome for outcome, _, _ in first[0]]
    rows = [count for _, count, _ in first[0]]
    done = Outcome.MAX_SWEEPS
    expected = Outcome.PATIENCE, done, Outcome.TIME, Outcome.INTERRUPTED, Outcome.INTERRUPTED, done, done, done
    assert outcomes == [str(outcome) for outcome in expected]
    assert rows[:2] + rows[3:] == [4, 6, 4, 4, 4, 4, 3]  # Ctrl-C ends the sweep that is under way
    for other in others:
        assert other == first  # all of the history, seconds and all


def _ends_by_figures(_: Any) -> Any:
    """Figures and weights themselves end these; the last of each is what one process would say."""
    x, y = blobs(ROWS, 4)
    found = []
    for method, more in (
        (AnchoredADMM("hinge"), {"stop": Target(0.7)}),
        (AnchoredADMM("hinge", batch_size="full"), {"stop": Patience(2)}),
        (BregmanADMM("hinge"), {"stop": [Target(1.0), Patience(2)]}),
        (SGD("squared", lr=1e12, batch_size=ROWS), {}),
    ):
        model = net(4, 9, 5, 1)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            run = fit(model, (x, y.float()), method, max_sweeps=60, sinks=(), **more)
        history = [{k: v for k, v in row.items() if k not in ("seconds", "bytes_sent")} for row in run.history]
        said = [str(w.message) for w in warned if w.category is RuntimeWarning]
        found.append((str(run.outcome), run.message, len(history), repr(history), said, _weights(model)))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_figures_end_all_ranks_as_one_process(size: int) -> None:
    (alone,) = on_ranks(1, in_group, _ends_by_figures)
    assert isinstance(alone, list), alone
    expected = Outcome.TARGET, Outcome.PATIENCE, Outcome.PATIENCE, Outcome.NON_FINITE
    assert [run[0] for run in alone] == [str(outcome) for outcome in expected]
    assert all(run[2] < 60 for run in alone)
    *others, (_, message, _, _, said, _) = alone
    assert message.startswith(f"{Outcome.NON_FINITE}: layer ")
    assert said == [f"{message}; the model is left at its best finite weights"]
    ranks = on_ranks(size, in_group, _ends_by_figures)
    for found in ranks:
        assert isinstance(found, list), found
        assert found == ranks[0]
        assert found[:-1] == others
        assert found[-1][:3] == alone[-1][:3]
