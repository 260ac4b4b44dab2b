"""Without `deterministic`, other numbers of ranks give the same bits all the same, in sweeps and in mini-batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baselines import CG, LBFGS, SGD, Adam
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, comm, fit
from torch_admm.data.hdf5 import Writer
from torch_admm.precision import LITTLE_SWEEP

from .helpers import blobs, net, rng
from .ranks import in_group, on_ranks

DTYPES = (torch.float32, torch.float64)
CLOSE_TO = {torch.float32: 1e-6, torch.float64: 1e-12}
NOISE = (
    28  # dimensions: a circle in so many cannot be learnt from a few thousand rows, and training makes most of noise
)


@dataclass(frozen=True)
class Case:
    make: Callable[[], AbstractMethod]
    widths: tuple[int, ...]
    rows: int
    sweeps: int = 10  # epochs, of mini-batches
    in_batches: bool = False
    act: type[nn.Module] = nn.ReLU

    def is_little(self) -> bool:
        return self.rows * sum(p.numel() for p in net(*self.widths).parameters()) <= LITTLE_SWEEP


BREGMAN = {
    "bregman": lambda: BregmanADMM("hinge", warm_start=2, gamma=1.0),
    "consistent": lambda: BregmanADMM("hinge", multiplier="consistent", chunk_rows=70),
}
ANCHORED = {
    "anchored": lambda: AnchoredADMM("logistic", batch_size="full"),
    "long steps": lambda: AnchoredADMM("logistic", batch_size="full", eta=1.0, refresh=1),  # make most of any rounding
}
FULL = {**BREGMAN, **ANCHORED}
SIZES = {
    "few": ((4, 9, 5, 1), 3),  # of three ranks or more some have none
    "odd": ((4, 9, 5, 1), 331),
    "noise": ((NOISE, 30, 1), 1500),
}


def batches(of: int, *widths: int, loss: str = "logistic", refresh: int = 3, **more: Any) -> Case:
    method = lambda: AnchoredADMM(loss, batch_size=of, refresh=refresh)  # noqa: E731
    return Case(method, widths, in_batches=True, **({"rows": 5 * of + of // 3} | more))


BATCHES = {
    "batches of 34": batches(34, 4, 9, 5, 1, rows=331),  # one leaf: all but one rank have nothing to do
    "batches of 2": batches(2, 4, 9, 5, 1, rows=3),
    "batches of 70": batches(70, 4, 9, 5, 1, rows=331),  # two leaves, of odd sizes
    "batches of 128, smooth": batches(128, 12, 40, 20, 1, act=nn.Tanh),
    "fewer rows than directions": batches(7, 70, 90, 1, rows=70),
    "classes": batches(256, 8, 16, 5, loss="cross_entropy"),
    "wide classes": batches(2100, 100, 30, 10, 3, loss="cross_entropy", rows=5000),
    "inputs as they lie, hinge": batches(300, 41, 7, 1, loss="hinge"),  # longer than six times the outputs
    "squared": batches(1024, NOISE, 31, 90, 1, loss="squared"),
    "large batches": batches(512, NOISE, 100, 1),
    "larger batches": batches(2048, NOISE, 300, 1, rows=5117),
    "largest batches": batches(12_288, NOISE, 50, 1, rows=25_001, sweeps=3),
}
SEARCHES: dict[str, Any] = {  # a search may take another turn for one bit
    "l-bfgs": lambda: LBFGS("logistic", chunk_rows=50),
    "cg": lambda: CG("logistic"),
    "l-bfgs by 100": lambda: LBFGS("logistic", batch_size=100, hold=2),
    "cg by 67": lambda: CG("logistic", batch_size=67, hold=2, average=True),
}
DESCENTS: dict[str, Any] = {  # loops as anybody writes them: they add up gradients in whatever order
    "sgd by 64": lambda: SGD("logistic", batch_size=64),
    "sgd by 512": lambda: SGD("logistic", batch_size=512, nesterov=True, average=True),
    "adam by 60": lambda: Adam("logistic", lr=0.01, batch_size=60),
}
CASES: dict[str, Case] = {
    **{name: Case(make, (8, 20, 1), 331, in_batches=True) for name, make in SEARCHES.items()},
    "cg by 30": Case(lambda: CG("logistic", batch_size=30), (8, 20, 1), 131, in_batches=True),  # one piece
    "l-bfgs, by shards": Case(SEARCHES["l-bfgs"], (8, 20, 1), 6301, in_batches=True),
    "cg by 4200": Case(lambda: CG("logistic", batch_size=4200), (8, 20, 1), 9000, in_batches=True),
    **{f"{name}, {size}": Case(make, *SIZES[size]) for name, make in FULL.items() for size in SIZES},
    "long steps, more rows than are taken at once": Case(ANCHORED["long steps"], (3, 800, 1), 1100),
    "long steps, smooth": Case(ANCHORED["long steps"], (5, 16, 1), 700, act=nn.Sigmoid),
    "anchored, by shards": Case(ANCHORED["anchored"], (NOISE, 100, 1), 6001),
    "bregman, by shards": Case(BREGMAN["bregman"], (NOISE, 100, 1), 6001),
    "anchored, by more shards": Case(ANCHORED["anchored"], (NOISE, 31, 90, 1), 6301),
    "anchored, inputs as they lie": Case(ANCHORED["anchored"], (41, 7, 1), 1501),  # and not where they should
    "bregman, by shards, a solve each": Case(BREGMAN["bregman"], (410, 100, 1), 600),
    **BATCHES,
}


CLOSE = {name: Case(make, (8, 20, 1), 1001, in_batches=True) for name, make in DESCENTS.items()}


def weights(case: Case, dtype: torch.dtype, **options: Any) -> Tensor:
    """After ten sweeps, or as many as the case has."""
    model = net(*case.widths, dtype=dtype, act=case.act)
    for i, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, 0.0, 0.3, generator=rng(i))
    x, y = blobs(case.rows, case.widths[0], max(2, case.widths[-1]), dtype=dtype)
    method = case.make()
    y = x.select(1, 0) if method.loss.name == "squared" else y
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have: how products and solves are shared out decides how they round
    try:
        options = {"max_sweeps": case.sweeps, "evaluate_every": 99} | options
        fit(model, (x, y), method, restore_best=False, sinks=(), **options)
    finally:
        torch.set_num_threads(threads)
    return torch.cat([W.double().flatten() for W in method.weights().values()])  # of a little run, in double precision


def apart(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max() / first.abs().max())


def runs(_: Any, names: Sequence[str], options: dict[str, Any] | None = None) -> dict[Any, Any]:
    """Lists, as tensors would cross by shared memory."""
    return {
        (name, dtype): weights(case, dtype, **(options or {})).tolist()
        for name, case in (CASES | CLOSE).items()
        if name in names
        for dtype in DTYPES
    }


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    return runs(None, [*CASES, *CLOSE])


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_ranks_end_in_the_same_bits(size: int, alone: dict[Any, Any]) -> None:
    results = on_ranks(size, in_group, runs, list(CASES))
    for result in results:
        assert isinstance(result, dict), result
        assert result == results[0]
    for (name, dtype), found in results[0].items():
        one = alone[name, dtype]
        difference = apart(*(torch.tensor(w, dtype=torch.float64) for w in (one, found)))
        assert found == one, (name, dtype, difference)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_sgd_and_adam_end_within_rounding(size: int, alone: dict[Any, Any]) -> None:
    for result in on_ranks(size, in_group, runs, list(CLOSE)):
        assert isinstance(result, dict), result
        for (name, dtype), found in result.items():
            one, many = (torch.tensor(w, dtype=torch.float64) for w in (alone[name, dtype], found))
            assert apart(one, many) < CLOSE_TO[dtype], (name, dtype)


@pytest.mark.parametrize("size", [5, 7])
def test_so_do_odd_numbers_of_ranks(size: int, alone: dict[Any, Any]) -> None:
    """Leaves do not divide among them evenly."""
    names = ["batches of 70", "wide classes", "large batches", "anchored, by more shards", "bregman, by shards"]
    names += [name for name in CASES if name.startswith(tuple(FULL)) and "shards" not in name]
    for result in on_ranks(size, in_group, runs, names):
        assert isinstance(result, dict), result
        assert {key: result[key] == alone[key] for key in result} == dict.fromkeys(result, True)


@pytest.mark.parametrize("size", [2, 3])
def test_so_do_ranks_that_talk_by_gloo(size: int, alone: dict[Any, Any]) -> None:
    names = ["batches of 34", "batches of 70", "large batches"]
    for result in on_ranks(size, _by_gloo, names):
        assert isinstance(result, dict), result
        assert {key: result[key] == alone[key] for key in result} == dict.fromkeys(result, True)


MANY = [  # each exchange takes long on so few cores: fewer sweeps, and no searches on many batches
    *["bregman, few", "consistent, odd", "long steps, odd", "long steps, more rows than are taken at once"],
    *["batches of 70", "wide classes", "anchored, by shards", "l-bfgs by 100", "bregman, by shards", "cg"],
    *["larger batches", "l-bfgs, by shards", "largest batches"],
]


@pytest.mark.parametrize(
    ("size", "names", "options"),
    [
        (9, MANY, {}),
        (17, MANY[1::2], {}),
        (24, MANY, {}),
        (26, MANY[::2], {"shards": 48}),
        (26, MANY[::2], {"shards": 48, "deterministic": True}),
    ],
)
def test_so_do_many_ranks(size: int, names: Sequence[str], options: dict[str, Any]) -> None:
    """Most have no leaf or piece of little runs, and take part all the same."""
    options = {"max_sweeps": 2} | options
    alone = runs(None, names, options)
    for result in on_ranks(size, in_group, runs, names, options):
        assert isinstance(result, dict), result
        assert {key: result[key] == alone[key] for key in result} == dict.fromkeys(alone, True)


def _too_many(ranks: Any) -> str:
    with pytest.raises(ValueError, match="deterministic") as failure:
        fit(net(4, 3, 1), blobs(30), sinks=(), deterministic=True)
    return str(failure.value)


def test_more_ranks_than_shards_cannot_be_deterministic() -> None:
    said = "deterministic is True, but there are 25 ranks and only 24 shards; shards=48 (--shards 48) gives "
    assert on_ranks(25, in_group, _too_many) == [said + "the same bits on any number of ranks up to that"] * 25


def _of_a_file(_: Any, path: str) -> dict[str, list[float]]:
    """Weights after batches that are not as long on every rank, and lie anywhere in what was read."""
    found = {}
    for dtype in DTYPES:
        model = net(7, 5, 1, dtype=dtype)
        method = AnchoredADMM("logistic", batch_size=255, refresh=3)
        fit(model, path, method, max_sweeps=3, restore_best=False, sinks=(), evaluate_every=99)
        found[str(dtype)] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_so_do_ranks_that_read_a_file(size: int, tmp_path: Path) -> None:
    path, (x, y) = str(tmp_path / "rows.h5"), blobs(2999, 7)
    with Writer(path, features=7, source="test", classes=["in", "out"], chunk_bytes=7 * 4 * 100) as out:
        out.write(x.numpy(), y.numpy())
    (alone,) = on_ranks(1, in_group, _of_a_file, path)
    assert isinstance(alone, dict), alone
    assert on_ranks(size, in_group, _of_a_file, path) == [alone] * size


@pytest.mark.parametrize(("batch_size", "rows", "deterministic"), [("full", 30_000, False), (100, 331, True)])
def test_runs_without_leaves_have_no_room_for_them(batch_size: Any, rows: int, deterministic: bool) -> None:
    """It would be as large as the weights, for each."""
    method = AnchoredADMM("logistic", batch_size=batch_size)
    fit(net(4, 30, 1), blobs(rows, 4), method, max_sweeps=1, sinks=(), deterministic=deterministic)
    assert len(method.leaves._lines) == 1


def _by_gloo(names: Sequence[str]) -> Any:
    return in_group(runs, names, backend="gloo")


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
        assert apart(torch.tensor(first), torch.tensor(second)) < 1e-12  # each rounds its own way


def test_the_cases_are_little_or_not_as_they_say() -> None:
    for name, case in CASES.items():
        assert case.in_batches or case.is_little() != ("shards" in name), name


def test_little_runs_are_done_in_double_precision_and_handed_back_as_they_came() -> None:
    method, model = AnchoredADMM("logistic", batch_size="full"), net(4, 9, 5, 1)
    fit(model, blobs(331, 4), method, max_sweeps=1, sinks=())
    assert {W.dtype for W in method.W.values()} == {torch.float64}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    fit(model, blobs(331, 4), method, max_sweeps=1, sinks=(), deterministic=True)
    assert {W.dtype for W in method.W.values()} == {torch.float32}
