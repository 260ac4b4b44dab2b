"""One model trained by several ranks: the answer of one and the same history everywhere, or all are told why not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from baselines import CG, LBFGS, SGD, Adam
from torch_admm import AnchoredADMM, BregmanADMM, Patience, Target, fit

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
    several = trained(size, list(ALL))
    for name in ALL:
        assert several[name] == alone[name], name


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
        {"shards": 24 if one else 48},
        {"shards": 20 if one else 24},
        {"evaluate": None if one else data},
        {"checkpoint": "here" if one else None},
        {"data": (data[0], torch.cat([data[1][:200], 1 - data[1][200:]])) if one else data},
        {"restore_best": one},
        {"monitor": "loss" if one else None},
        {"state": {"W": {1: torch.ones(2)}, "a": {1: torch.zeros(ranks.rank)}} if one else None},
        {"method": BregmanADMM("hinge", gamma=3.0 if one else [10.0])},
        {"method": BregmanADMM(nn.HuberLoss(delta=2.0 if one else 1.0))},
        {"evaluate": (data[0], 1 - data[1]) if one else data},
        {"keep": 3 if one else 2},
        {"stop": Target(0.9 if one else 0.8)},
        {"stop": Patience(3) if one else ()},
        {"data": DataLoader(TensorDataset(*data), 32, shuffle=one), "method": AnchoredADMM("hinge")},
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
    "ranks differ in shards: 48 on rank 0, 24 on rank 1",
    "(rank 1: )?shards is 20; a multiple of 24 is expected",
    "ranks differ in evaluated rows: .*'test_': 331.* on rank 0, .* on rank 1",
    "ranks differ in checkpoint: None on rank 0, here on rank 1",
    "ranks differ in data: .* on rank 0, .* on rank 1",
    "ranks differ in restore_best: False on rank 0, True on rank 1",
    "ranks differ in monitor: None on rank 0, loss on rank 1",
    r"ranks differ in state: none on rank 0, [0-9a-f]{8} \(CRC-32\) on rank 1",
    r"ranks differ in BregmanADMM\.gamma: \[10\.0\] on rank 0, 3\.0 on rank 1",
    r"ranks differ in huber\.delta: 1\.0 on rank 0, 2\.0 on rank 1",
    r"ranks differ in test data: .* on rank 0, .* on rank 1",
    "ranks differ in keep: 2 on rank 0, 3 on rank 1",
    r"ranks differ in stop: \['Target\(value=0\.8, .*\)'\] on rank 0, \['Target\(value=0\.9, .*\)'\] on rank 1",
    r"ranks differ in stop: \[\] on rank 0, \['Patience\(evaluations=3, key=None\)'\] on rank 1",
    "ranks differ in batches are drawn: in order on rank 0, at random on rank 1",
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
