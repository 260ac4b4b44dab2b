"""One model trained by several ranks: the answer of one, the same history everywhere, and one reason to stop."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baselines import CG, LBFGS, SGD, Adam
from torch_admm import AbstractMethod, AbstractSink, AbstractStop, AnchoredADMM, BregmanADMM, Outcome, TimeBudget, fit
from torch_admm.record import Row

from .helpers import blobs, net
from .ranks import in_group, on_ranks

ROWS = 331  # a prime: no number of ranks divides it

STEPS = 10
EPOCHS = 3  # of baselines

METHODS: dict[str, Any] = {
    "bregman": lambda: BregmanADMM("hinge", warm_start=2, gamma=1.0),
    "bregman-consistent": lambda: BregmanADMM("hinge", multiplier="consistent", chunk_rows=7),
    "anchored-full": lambda: AnchoredADMM("hinge", batch_size="full"),
    "anchored-by-64": lambda: AnchoredADMM("logistic", batch_size=64, refresh=7),
    "anchored-by-60": lambda: AnchoredADMM("logistic", batch_size=60, standardise=True),
}
BASELINES: dict[str, Any] = {
    "sgd-by-64": lambda: SGD("logistic", batch_size=64, average=True),
    "sgd-full": lambda: SGD("logistic", batch_size=ROWS, nesterov=True),
    "adam-by-60": lambda: Adam("logistic", lr=0.01, batch_size=60),
    "adamw-by-17": lambda: Adam("logistic", batch_size=17, weight_decay=0.1, decoupled=True),  # less than a row a shard
    "lbfgs": lambda: LBFGS("logistic", chunk_rows=5),
    "lbfgs-by-100": lambda: LBFGS("logistic", batch_size=100, hold=2),
    "cg": lambda: CG("logistic"),
    "cg-by-100": lambda: CG("logistic", batch_size=100, hold=2, average=True),
}
ALL = METHODS | BASELINES


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train(name: str) -> Any:
    """The weights, the history without what depends on the clock, and why it ended."""
    model = net(4, 9, 5, 1)
    result = fit(
        model,
        blobs(ROWS, 4),
        ALL[name](),
        max_sweeps=EPOCHS if name in BASELINES else STEPS,
        evaluate=blobs(50, 4),
        validation=0.1,
        restore_best=False,
        sinks=(),
        deterministic=True,
    )
    rest = [{k: v for k, v in row.items() if k not in ("seconds", "bytes_sent")} for row in result.history]
    return weights(model).tolist(), rest, result.outcome  # tensors would cross by shared memory


def train_all(_: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: train(name) for name in names}


def trained(size: int, names: Sequence[str]) -> dict[str, Any]:
    results = [train_all(None, names)] if size == 1 else on_ranks(size, in_group, train_all, names)
    for result in results:
        assert isinstance(result, dict), result
        assert result == results[0]  # weights and history are the same on all ranks
    return results[0]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return trained(1, list(ALL))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_any_number_of_ranks_gives_the_same_bits(size: int, alone: dict[str, Any]) -> None:
    names = list(ALL) if size < 8 else [*METHODS, "sgd-by-64", "lbfgs"]
    several = trained(size, names)
    for name in names:
        assert several[name] == alone[name], name


R = 9 * 5 + 5 * 10 + 1 * 6
BREGMAN = 8 * (sum(n * (n + 1) // 2 + n for n in (9, 5)) + R)  # of W_1, G belongs to the data, which never change
HEARD = 1 + 14 + 1  # rows, losses, an output
SEEN = HEARD + sum(n * n for n in (5, 10, 6, 9, 5))  # one column has no moment


def _bytes(ranks: Any) -> Any:
    """What was sent in three sweeps, and by the formula."""
    return [(_sent(BregmanADMM("hinge")), 3 * BREGMAN)]


def _bytes_of_batches(ranks: Any) -> Any:
    """One leaf, two, and eight, of which a rank of three has two branches of their tree.

    A loss that is higher than all before is compared with that of the first weights on the same rows: one more number.
    """
    found, compared, losses = [], list[int](), AnchoredADMM._first_losses

    def counted(*arguments: Any) -> Any:
        compared.append(1)
        return losses(*arguments)

    AnchoredADMM._first_losses = counted  # type: ignore[method-assign, assignment]
    for dtype, number in ((torch.float32, 4), (torch.float64, 8)):
        for rows, size, most in ((ROWS, 40, 1), (ROWS, 100, 1), (ROWS, ROWS - 1, 1), (2100, 2048, 1 + ranks.size % 2)):
            steps = 3 * -(-rows // size)
            looks = sum(step < steps for step in (0, 1, 12))
            compared.clear()
            sent = _sent(AnchoredADMM("hinge", batch_size=size, refresh=1000), dtype, rows)
            layers = 9 * 5, 5 * 10, 1 * 6
            lines = sum(-(-n * number // 64) * 64 for n in layers)  # they start at multiples of 64 bytes
            found.append((sent, most * (lines * steps + 8 * (SEEN * looks + len(compared)))))
    return found


def _bytes_by_shards(ranks: Any) -> Any:
    """The same, where shards are added up by a tree: as many times as the rank with most of them has branches."""
    branches, merged = {2: (1, 1), 3: (4, 2), 4: (1, 1)}[ranks.size]  # of 24 shards, and of 8 times 3
    found = [(_sent(BregmanADMM("hinge"), dtype=torch.float64), merged * 3 * BREGMAN)]
    for more in ({"dtype": torch.float64}, {"deterministic": True}):
        sent = _sent(AnchoredADMM("hinge", batch_size="full", refresh=1000), **more)
        found.append((sent, branches * 8 * (3 * R + 2 * SEEN)))
    return found


def _sent(method: AbstractMethod, dtype: torch.dtype = torch.float32, rows: int = ROWS, **more: Any) -> float:
    data = blobs(rows, 4, dtype=dtype)
    history = fit(net(4, 9, 5, 1, dtype=dtype), data, method, max_sweeps=3, sinks=(), **more).history
    return history[-1]["bytes_sent"] - history[0]["bytes_sent"]


@pytest.mark.parametrize(
    ("size", "task"),
    [(2, _bytes), *((size, task) for size in (2, 3, 4) for task in (_bytes_by_shards, _bytes_of_batches))],
)
def test_bytes_sent_are_those_of_the_formula(size: int, task: Any) -> None:
    for found in on_ranks(size, in_group, task):
        assert [sent for sent, _ in found] == [formula for _, formula in found], found


class AtThird(AbstractStop):
    """Ends the run on one rank, if that were asked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def check(self, history: Sequence[Row], monitor: str) -> Outcome | None:
        return Outcome.PATIENCE if len(history) > 3 and int(os.environ["RANK"]) == self.rank else None


class Interrupts(AbstractSink):
    """Ctrl-C, on the rank that writes."""

    def write(self, row: Row) -> None:
        if row["sweep"] == 2:
            os.kill(os.getpid(), signal.SIGINT)


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
        fit(model, data, max_sweeps=50, **more | {"sinks": Interrupts()}),
        fit(model, blobs(3, 4), BregmanADMM("hinge"), max_sweeps=3, sinks=()),  # fewer rows than ranks
        fit(model, blobs(3, 4), AnchoredADMM("hinge"), max_sweeps=3, batch_size=2, sinks=()),
        fit(model, (data[0], data[0][:, 0]), max_sweeps=2, validation=0.2, sinks=()),  # r2
    ]
    return [(str(run.outcome), len(run.history), run.history) for run in found], weights(model).tolist()


def test_all_ranks_end_together_for_the_same_reason() -> None:
    first, *others = on_ranks(4, in_group, _ends)
    assert isinstance(first, tuple), first
    outcomes = [outcome for outcome, _, _ in first[0]]
    rows = [count for _, count, _ in first[0]]
    done = Outcome.MAX_SWEEPS
    expected = Outcome.PATIENCE, done, Outcome.TIME, Outcome.INTERRUPTED, done, done, done
    assert outcomes == [str(outcome) for outcome in expected]
    assert rows[:2] + rows[3:] == [4, 6, 4, 4, 4, 3]  # Ctrl-C ends the sweep that is under way
    for other in others:
        assert other == first  # all of the history, seconds and all


def _differ(ranks: Any) -> Any:
    """What each rank is told."""
    one = ranks.rank == 1
    data = blobs(ROWS, 4)
    calls: list[dict[str, Any]] = [
        {"model": net(4, 8 if one else 9, 1)},
        {"model": net(4, 9, 1, act=nn.Tanh if one else nn.ReLU)},
        {"method": AnchoredADMM("hinge", eta=0.1 if one else 0.2)},
        {"method": AnchoredADMM("hinge") if one else BregmanADMM("hinge")},
        {"data": blobs(ROWS + 1 if one else ROWS, 4)},
        {"data": (data[0].flip(0), data[1].flip(0)) if one else data},
        {"max_sweeps": 3 if one else 4},
        {"max_sweeps": 0 if one else 4},
        {"batch_size": 10 if one else 20, "method": AnchoredADMM("hinge")},
        {"deterministic": one},
        {"evaluate": None if one else data},
        {"checkpoint": "here" if one else None},
        {"data": (data[0], torch.cat([data[1][:200], 1 - data[1][200:]])) if one else data},
        {"restore_best": one},
        {"monitor": "loss" if one else None},
        {"state": {"W": {1: torch.ones(2)}, "a": {1: torch.zeros(ranks.rank)}} if one else None},
        {"method": BregmanADMM("hinge", gamma=3.0 if one else [10.0])},
        {"method": BregmanADMM(nn.HuberLoss(delta=2.0 if one else 1.0))},
    ]
    told = []
    for call in calls:
        args: dict[str, Any] = {"model": net(4, 9, 1), "data": data, "method": BregmanADMM("hinge"), "sinks": ()}
        with pytest.raises(ValueError) as caught:
            fit(**args | call)
        told.append(str(caught.value))
    return told


DIFFER = [
    "ranks differ in net: 4-9-1 on rank 0, 4-8-1 on rank 1",
    r"ranks differ in model: Sequential\( .*ReLU.* on rank 0, Sequential.*Tanh.* on rank 1",
    r"ranks differ in AnchoredADMM\.eta: 0\.2 on rank 0, 0\.1 on rank 1",
    "ranks differ in method: BregmanADMM on rank 0, AnchoredADMM on rank 1",
    "ranks differ in number of rows: 331 on rank 0, 332 on rank 1",
    "ranks differ in data: .* on rank 0, .* on rank 1",
    "ranks differ in max_sweeps: 4 on rank 0, 3 on rank 1",
    "(rank 1: )?max_sweeps is 0; a whole number of at least 1 is expected",
    "ranks differ in batch_size: 20 on rank 0, 10 on rank 1",
    "ranks differ in deterministic: False on rank 0, True on rank 1",
    "ranks differ in evaluated rows: .*'test_': 331.* on rank 0, .* on rank 1",
    "ranks differ in checkpoint: None on rank 0, here on rank 1",
    "ranks differ in data: .* on rank 0, .* on rank 1",
    "ranks differ in restore_best: False on rank 0, True on rank 1",
    "ranks differ in monitor: None on rank 0, loss on rank 1",
    r"ranks differ in state: none on rank 0, [0-9a-f]{8} \(CRC-32\) on rank 1",
    r"ranks differ in BregmanADMM\.gamma: \[10\.0\] on rank 0, 3\.0 on rank 1",
    r"ranks differ in huber\.delta: 1\.0 on rank 0, 2\.0 on rank 1",
]


def test_ranks_that_differ_are_told_what_differs() -> None:
    for told in on_ranks(3, in_group, _differ):
        assert len(told) == len(DIFFER), told
        for text, match in zip(told, DIFFER, strict=True):
            assert re.fullmatch(match, text), text


def _resumed(ranks: Any, folder: Path, name: str, sweeps: int, resume: bool) -> Any:
    model = net(4, 9, 5, 1)
    more: dict[str, Any] = {"checkpoint": folder / name, "resume": resume, "deterministic": True, "sinks": ()}
    result = fit(model, blobs(ROWS, 4), ALL[name](), max_sweeps=sweeps, evaluate=blobs(50, 4), **more)
    rest = [{k: v for k, v in row.items() if k not in ("seconds", "bytes_sent")} for row in result.history]
    return weights(model).tolist(), rest


def _resume_all(ranks: Any, folder: Path, part: int, resume: bool) -> Any:
    """As far as so many thirds of a run."""
    sweeps = {name: part * (EPOCHS if name in BASELINES else 9) // 3 for name in ALL}
    return {name: _resumed(ranks, folder, name, sweeps[name], resume) for name in ALL}


def test_goes_on_from_a_checkpoint_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Three ranks, then two, then one: the same bits as in one go."""
    whole = _resume_all(None, tmp_path / "whole", 3, False)
    for result in on_ranks(3, in_group, _resume_all, tmp_path / "parts", 1, False):
        assert isinstance(result, dict), result
    for result in on_ranks(2, in_group, _resume_all, tmp_path / "parts", 2, True):
        assert isinstance(result, dict), result
    assert _resume_all(None, tmp_path / "parts", 3, True) == whole
