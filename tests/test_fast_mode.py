"""Without `deterministic`, other numbers of ranks differ by rounding: 1e-6 (float32), 1e-12 (float64) after 10 sweeps.

A sweep is one update of all layers, over all rows; here over one mini-batch, too. The difference is that of the weights
in the largest norm, relative to the largest weight.

Some iterations make more of a rounding than that: where labels are noise, or rows few for so many columns, steps have a
length but no direction. There mini-batches may differ as much as one process differs from itself when each value of the
data moves by one unit in its last place. Sweeps over all rows need no such excuse: but for float32 ones that are done
in double precision, they give the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, comm, fit
from torch_admm.precision import LITTLE_STEP, LITTLE_SWEEP

from .helpers import blobs, net, rng
from .ranks import in_group, on_ranks

BOUNDS = {torch.float32: 1e-6, torch.float64: 1e-12}
NOISE = 28  # dimensions: a circle in so many cannot be learnt from a few thousand rows
AS_ONE_UNIT = 30  # times: both differences are those of a chaotic iteration


@dataclass(frozen=True)
class Case:
    make: Callable[[], AbstractMethod]
    widths: tuple[int, ...]
    rows: int
    sweeps: int = 10  # as `fit` counts them: epochs, of mini-batches
    seeds: int = 2
    in_batches: bool = False

    def may_differ_as_one_unit(self) -> bool:
        return self.in_batches and self.widths[0] >= NOISE

    def has_the_same_bits(self, dtype: torch.dtype) -> bool:
        little = self.rows * sum(p.numel() for p in net(*self.widths).parameters()) <= LITTLE_SWEEP
        return not self.in_batches and (dtype == torch.float64 or not little)


BREGMAN = {
    "bregman": lambda: BregmanADMM("hinge", warm_start=2, gamma=1.0),
    "consistent": lambda: BregmanADMM("hinge", multiplier="consistent", chunk_rows=70),
}
FULL = {**BREGMAN, "anchored": lambda: AnchoredADMM("logistic", batch_size="full")}
SIZES = {
    "few": ((4, 9, 5, 1), 3),  # of three ranks or more some have none
    "odd": ((4, 9, 5, 1), 331),
    "noise": ((NOISE, 30, 1), 1500),
}
BATCHES = {
    "batches of 34": Case(lambda: AnchoredADMM("logistic", batch_size=34, refresh=3), (4, 9, 5, 1), 331, sweeps=1),
    "batches of 2": Case(lambda: AnchoredADMM("logistic", batch_size=2), (4, 9, 5, 1), 3, sweeps=5),
    "fewer rows than directions": Case(
        lambda: AnchoredADMM("logistic", batch_size=7, refresh=3), (70, 90, 1), 70, sweeps=1
    ),
    "classes": Case(lambda: AnchoredADMM("cross_entropy", batch_size=16), (8, 16, 5), 157, sweeps=1),
    "large batches": Case(lambda: AnchoredADMM("logistic", batch_size=512), (NOISE, 100, 1), 5117, sweeps=1),
}
CASES: dict[str, Case] = {
    **{f"{name}, {size}": Case(make, *SIZES[size]) for name, make in FULL.items() for size in SIZES},
    "anchored, by shards": Case(FULL["anchored"], (NOISE, 100, 1), 6001, seeds=1),
    "bregman, by shards": Case(BREGMAN["bregman"], (NOISE, 100, 1), 6001, seeds=1),
    "anchored, by more shards": Case(FULL["anchored"], (NOISE, 31, 90, 1), 6301, seeds=1),
    "anchored, inputs as they lie": Case(FULL["anchored"], (41, 7, 1), 1501, seeds=1),  # and not where they should
    "bregman, by shards, a solve each": Case(BREGMAN["bregman"], (410, 100, 1), 600, seeds=1),
    **{name: replace(case, in_batches=True) for name, case in BATCHES.items()},
}


def weights(case: Case, seed: int, dtype: torch.dtype, moved: int = 0) -> Tensor:
    """After ten sweeps; with `moved`, data that differ by one unit in the last place, drawn by it."""
    model = net(*case.widths, dtype=dtype)
    for i, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, 0.0, 0.3, generator=rng(100 * seed + i))
    x, y = blobs(case.rows, case.widths[0], max(2, case.widths[-1]), dtype=dtype)
    if moved:
        x = x * (1 + torch.finfo(dtype).eps * torch.randn(x.shape, generator=rng(moved), dtype=dtype).sign())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have: how products and solves are shared out decides how they round
    try:
        data, sweeps = (x, y), case.sweeps
        fit(model, data, case.make(), max_sweeps=sweeps, seed=seed, restore_best=False, sinks=(), evaluate_every=99)
    finally:
        torch.set_num_threads(threads)
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def apart(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max() / first.abs().max())


def runs(_: Any, names: Sequence[str]) -> dict[Any, Any]:
    """Lists, as tensors would cross by shared memory."""
    return {
        (name, seed, dtype): weights(CASES[name], seed, dtype).tolist()
        for name in names
        for seed in range(CASES[name].seeds)
        for dtype in BOUNDS
    }


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    return runs(None, list(CASES))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_differ_by_rounding_only(size: int, alone: dict[Any, Any]) -> None:
    names = [name for name in CASES if size < 8 or "few" in name or "shards" in name]
    results = on_ranks(size, in_group, runs, names)
    for result in results:
        assert isinstance(result, dict), result
        assert result == results[0]
    for (name, seed, dtype), found in results[0].items():
        one = torch.tensor(alone[name, seed, dtype], dtype=torch.float64)
        difference = apart(one, torch.tensor(found, dtype=torch.float64))
        if CASES[name].has_the_same_bits(dtype):
            assert found == alone[name, seed, dtype], (name, seed, dtype, difference)
        if difference < BOUNDS[dtype]:
            continue
        assert CASES[name].may_differ_as_one_unit(), (name, seed, dtype, difference)
        unit = max(apart(one, weights(CASES[name], seed, dtype, moved)) for moved in range(1, 11))
        assert difference < AS_ONE_UNIT * unit, (name, seed, dtype, unit)


def _of_many_threads(threads: Sequence[int], backend: str) -> list[float]:
    """Weights of a wide layer after a few mini-batches, of ranks that have so many threads."""
    model, data = net(10, 30, 1, dtype=torch.float64), blobs(300, 10, dtype=torch.float64)
    with comm.start(backend, threads=threads[int(os.environ["RANK"])]):
        fit(model, data, AnchoredADMM("logistic", batch_size=60), max_sweeps=1, restore_best=False, sinks=())
    found: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return found


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_ranks_need_not_have_as_many_threads(backend: str) -> None:
    """What crosses is laid out alike, whatever products look like."""
    usual, *others = (on_ranks(2, _of_many_threads, threads, backend) for threads in ((1, 1), (1, 2), (2, 2)))
    for first, second in others:
        for found in (first, second):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(usual[0]), rtol=0, atol=1e-6)
        assert apart(torch.tensor(first), torch.tensor(second)) < BOUNDS[torch.float64]  # each rounds its own way


def test_the_cases_are_little_or_not_as_they_say() -> None:
    work = {name: case.rows * sum(p.numel() for p in net(*case.widths).parameters()) for name, case in CASES.items()}
    for name in CASES:
        assert (work[name] > LITTLE_SWEEP) == ("shards" in name), name
    assert work["large batches"] / 10 > LITTLE_STEP


def test_little_runs_are_done_in_double_precision_and_handed_back_as_they_came() -> None:
    method, model = AnchoredADMM("logistic", batch_size=34), net(4, 9, 5, 1)
    fit(model, blobs(331, 4), method, max_sweeps=1, sinks=())
    assert {W.dtype for W in method.W.values()} == {torch.float64}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    fit(model, blobs(331, 4), method, max_sweeps=1, sinks=(), deterministic=True)
    assert {W.dtype for W in method.W.values()} == {torch.float32}
