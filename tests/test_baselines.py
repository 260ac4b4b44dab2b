"""The bundled rivals are torch's own optimisers: the same steps as a loop written by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baselines import CG, LBFGS, SGD, Adam
from tests.helpers import blobs, net
from tests.ranks import in_group, on_ranks
from torch_admm import AbstractMethod, fit
from torch_admm.comm import AbstractComm, Solo
from torch_admm.data import rows_of
from torch_admm.problem import from_module

X, Y = blobs(100, 4, 3)

Builder = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


PLAIN: dict[str, tuple[Any, Builder]] = {
    "sgd": (SGD("cross_entropy", lr=0.2), lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9)),
    "no momentum": (SGD("cross_entropy", momentum=0), lambda p: torch.optim.SGD(p, lr=0.1)),
    "nesterov": (
        SGD("cross_entropy", momentum=0.8, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "adam": (Adam("cross_entropy"), torch.optim.Adam),
    "adam, decay": (
        Adam("cross_entropy", lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    ),
    "adamw": (
        Adam("cross_entropy", lr=0.01, betas=(0.8, 0.99), weight_decay=0.1, decoupled=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    ),
}


def by_hand(model: nn.Module, build: Builder, epochs: int = 3) -> Iterator[None]:
    """A training loop as everybody writes it, in batches of 32; comes back after each."""
    rows = rows_of((X, Y), from_module(model, "cross_entropy"))
    optimiser = build(model.parameters())
    for epoch in range(epochs):
        for x, y in rows.batches(32, 7, epoch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
            yield


def run(method: AbstractMethod, sweeps: int = 3, **options: Any) -> nn.Module:
    """A net trained through `fit`."""
    model = net(4, 8, 3)
    fit(model, (X, Y), method, max_sweeps=sweeps, seed=7, sinks=(), restore_best=False, **options)
    return model


@pytest.mark.parametrize("name", PLAIN)
def test_mini_batches_are_a_plain_loop(name: str) -> None:
    method, build = PLAIN[name]
    model, mine = run(method, batch_size=32), net(4, 8, 3)
    for _ in by_hand(mine, build):
        pass
    for a, b in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("epochs", [1, 40])
def test_average_by_hand(epochs: int) -> None:
    """From the start on; 40 epochs of 4 batches get to where the weight stays at 0.99. Training is as without."""
    method, mine = SGD("cross_entropy", batch_size=32, average=True), net(4, 8, 3)
    averages = [p.detach().clone() for p in mine.parameters()]
    for k, _ in enumerate(by_hand(mine, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), epochs), start=1):
        keep = min(0.99, (1 + k) / (10 + k))
        averages = [keep * mean + (1 - keep) * p.detach() for mean, p in zip(averages, mine.parameters(), strict=True)]
    model = run(method, epochs)
    assert method.updates == 4 * epochs
    for a, b, mean in zip(method.model.parameters(), mine.parameters(), averages, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(mean, b, rtol=1e-3)
    for a, mean in zip(model.parameters(), averages, strict=True):
        torch.testing.assert_close(a, mean, rtol=1e-4, atol=1e-5)


RESUMABLE: dict[str, Callable[[], AbstractMethod]] = {
    "nesterov": lambda: SGD("cross_entropy", nesterov=True, weight_decay=0.01, batch_size=32),
    "sgd, averaged": lambda: SGD("cross_entropy", batch_size=32, average=True),
    "adam": lambda: Adam("cross_entropy", lr=0.01, batch_size=32),
    "adamw, averaged": lambda: Adam("cross_entropy", weight_decay=0.1, decoupled=True, batch_size=32, average=True),
    "lbfgs": lambda: LBFGS("cross_entropy"),
    "cg": lambda: CG("cross_entropy"),
    "lbfgs, batches": lambda: LBFGS("cross_entropy", batch_size=32, hold=2, average=True),
}


@pytest.mark.parametrize("name", RESUMABLE)
def test_resuming_is_going_on(name: str, tmp_path: Path) -> None:
    """Bit for bit, through a file; and the state is left as it was, so that it serves again."""
    straight, first = run(RESUMABLE[name](), 12), RESUMABLE[name]()
    run(first, 5)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for _ in range(2):
        resumed = run(RESUMABLE[name](), 7, state=state)
        for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_state_without_average_is_refused() -> None:
    plain, averaged = SGD("cross_entropy"), SGD("cross_entropy", average=True)
    run(plain, 1)
    with pytest.raises(ValueError, match=r"state has no 'average'; one of SGD with average=True is expected"):
        run(averaged, 1, state=plain.state_dict())


SETTINGS: list[tuple[Callable[..., AbstractMethod], dict[str, Any], str]] = [
    (SGD, {"lr": 0}, r"lr is 0; a finite number above 0 is expected"),
    (SGD, {"momentum": 1.0}, r"momentum is 1\.0; a number of at least 0 and below 1 is expected"),
    (SGD, {"momentum": -0.1}, r"momentum is -0\.1; a number of at least 0 and below 1"),
    (SGD, {"momentum": "heavy"}, r"momentum is 'heavy'; a number of at least 0 and below 1"),
    (SGD, {"momentum": True}, r"momentum is True; a number of at least 0 and below 1"),
    (SGD, {"weight_decay": -1e-4}, r"weight_decay is -0\.0001; a finite number of at least 0 is expected"),
    (SGD, {"weight_decay": math.inf}, r"weight_decay is inf; a finite number of at least 0"),
    (SGD, {"nesterov": "yes"}, r"nesterov is 'yes'; one of False, True is expected"),
    (SGD, {"nesterov": True, "momentum": 0}, r"momentum is 0; a number above 0 is expected with nesterov=True"),
    (SGD, {"average": "ema"}, r"average is 'ema'; one of False, True is expected"),
    (SGD, {"batch_size": 0}, r"batch_size is 0; a whole number of at least 1"),
    (Adam, {"lr": math.nan}, r"lr is nan; a finite number above 0"),
    (Adam, {"betas": 0.9}, r"betas is 0\.9; two numbers of at least 0 and below 1 are expected"),
    (Adam, {"betas": (0.9, 0.99, 0.999)}, r"betas is \(0\.9, 0\.99, 0\.999\); two numbers"),
    (Adam, {"betas": (1.0, 0.99)}, r"betas\[0\] is 1\.0; a number of at least 0 and below 1"),
    (Adam, {"betas": (0.9, -1)}, r"betas\[1\] is -1; a number of at least 0 and below 1"),
    (Adam, {"weight_decay": -1}, r"weight_decay is -1; a finite number of at least 0"),
    (Adam, {"decoupled": None}, r"decoupled is None; one of False, True is expected"),
    (Adam, {"batch_size": 1.5}, r"batch_size is 1\.5; a whole number of at least 1"),
    (LBFGS, {"history_size": 0}, r"history_size is 0; a whole number of at least 1"),
    (LBFGS, {"lr": -1}, r"lr is -1; a finite number above 0"),
    (LBFGS, {"max_evals": 0}, r"max_evals is 0; a whole number of at least 1"),
    (LBFGS, {"hold": 0}, r"hold is 0; a whole number of at least 1"),
    (LBFGS, {"chunk_rows": 0.5}, r"chunk_rows is 0\.5; a whole number of at least 1"),
    (CG, {"batch_size": 0}, r"batch_size is 0; a whole number of at least 1"),
    (CG, {"average": 1.5}, r"average is 1\.5; one of False, True"),
    (CG, {"c2": 1}, r"c2 is 1; a number of at least 0 and below 1"),
    (CG, {"c2": 0.0}, r"c2 is 0\.0; a number above 0\.0001 and below 1 is expected"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), SETTINGS)
def test_settings(kind: Callable[..., AbstractMethod], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind("hinge", **settings)


def test_searches_on_batches_are_a_plain_loop() -> None:
    """Three iterations on each batch of 40, averaged by hand."""
    method, mine = LBFGS("cross_entropy", batch_size=40, hold=3, average=True), net(4, 8, 3, dtype=torch.float64)
    data, averages = (X.double(), Y), [p.detach().clone() for p in mine.parameters()]
    optimiser = torch.optim.LBFGS(
        mine.parameters(), max_iter=1, max_eval=26, history_size=20, line_search_fn="strong_wolfe"
    )

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(mine(x), y)
        loss.backward()
        return loss

    batches = rows_of(data, from_module(mine, "cross_entropy")).batches(40, 7, 0)
    for k, batch in enumerate((batch for batch in batches for _ in range(3)), start=1):
        optimiser.step(partial(loss_of, *batch))
        keep = (1 + k) / (10 + k)
        averages = [keep * m + (1 - keep) * p.detach() for m, p in zip(averages, mine.parameters(), strict=True)]
    model = net(4, 8, 3, dtype=torch.float64)
    fit(model, data, method, max_sweeps=1, seed=7, sinks=(), restore_best=False)
    assert method.updates == 9
    for a, b in zip(model.parameters(), averages, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [LBFGS, CG])
def test_a_batch_of_all_rows_is_all_rows(kind: Callable[..., AbstractMethod]) -> None:
    straight, batched = run(kind("cross_entropy")), run(kind("cross_entropy", batch_size=5), batch_size=len(X))
    for a, b in zip(straight.parameters(), batched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_lbfgs_is_a_plain_loop() -> None:
    model = net(4, 8, 3, act=nn.Tanh, dtype=torch.float64)
    mine = copy.deepcopy(model)
    x = X.double()
    optimiser = torch.optim.LBFGS(
        mine.parameters(), max_iter=8, max_eval=999, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(mine(x), Y)
        loss.backward()
        return loss

    optimiser.step(closure)
    fit(model, (x, Y), LBFGS("cross_entropy"), max_sweeps=8, sinks=(), restore_best=False)
    for a, b in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_lbfgs_evaluates_no_point_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    evaluate = LBFGS._evaluate

    def counted(self: LBFGS) -> float:
        counts.append(1)
        return evaluate(self)

    monkeypatch.setattr(LBFGS, "_evaluate", counted)
    fit(net(4, 8, 3), (X, Y), LBFGS("cross_entropy"), max_sweeps=8, sinks=())
    mine = net(4, 8, 3)
    optimiser = torch.optim.LBFGS(
        mine.parameters(), max_iter=8, max_eval=999, history_size=20, line_search_fn="strong_wolfe"
    )
    seen: list[int] = []

    def closure() -> torch.Tensor:
        seen.append(1)
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(mine(X), Y)
        loss.backward()
        return loss

    optimiser.step(closure)
    assert len(counts) == len(seen)


@pytest.mark.parametrize("kind", [LBFGS, CG])
def test_searches_evaluate_no_point_twice(kind: type[LBFGS | CG], monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[torch.Tensor] = []
    evaluate = kind._evaluate

    def noted(self: LBFGS | CG) -> float:
        points.append(nn.utils.parameters_to_vector(self.model.parameters()).detach().clone())
        return evaluate(self)

    monkeypatch.setattr(kind, "_evaluate", noted)
    run(kind("cross_entropy"), 8)
    assert len(points) > 8
    assert len(torch.stack(points).unique(dim=0)) == len(points)


def test_batches_cover_every_row_once() -> None:
    rows = rows_of((X, Y), from_module(net(4, 8, 3), "cross_entropy"))
    epochs = [torch.cat([x for x, _ in rows.batches(33, 0, epoch)]) for epoch in (0, 0, 1)]
    assert [len(x) for x, _ in rows.batches(33, 0, 0)] == [33, 33, 33, 1]
    assert torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], epochs[2])
    assert torch.equal(epochs[2].sort(0).values, X.sort(0).values)


RANKED: dict[str, tuple[Callable[[], AbstractMethod], int | None]] = {
    "sgd, averaged": (lambda: SGD("cross_entropy", lr=0.2, average=True), 32),
    "adam": (lambda: Adam("cross_entropy"), 7),
    "lbfgs": (lambda: LBFGS("cross_entropy"), None),
    "cg on batches": (lambda: CG("cross_entropy", hold=2), 40),
}


def trained(comm: AbstractComm, names: list[str]) -> dict[str, list[Any]]:
    """The weights of each after three sweeps, in double precision."""
    found = {}
    for name in names:
        make, batch_size = RANKED[name]
        model = net(4, 8, 3, act=nn.Tanh, dtype=torch.float64)
        options: dict[str, Any] = {"max_sweeps": 3, "seed": 7, "sinks": (), "restore_best": False}
        fit(model, (X.double(), Y), make(), batch_size=batch_size, **options)
        found[name] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return found


def test_several_ranks_take_the_same_steps_as_one() -> None:
    """With 100 rows in 24 shards, batches of 7 leave three ranks with two rows or three, and at times with none."""
    alone, ranks = trained(Solo(), list(RANKED)), on_ranks(3, in_group, trained, list(RANKED))
    for rank in ranks:
        assert isinstance(rank, dict), rank
        for name, weights in alone.items():
            assert rank[name] == pytest.approx(weights, rel=1e-6, abs=1e-8), name
            assert rank[name] == ranks[0][name], name


@pytest.mark.parametrize("kind", [SGD, Adam, LBFGS, CG])
@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_may_lie_anyhow_in_memory(kind: Callable[..., AbstractMethod], deterministic: bool) -> None:
    models = net(4, 8, 3), net(4, 8, 3)
    turned = models[1][0]
    assert isinstance(turned, nn.Linear)
    turned.weight = nn.Parameter(turned.weight.detach().T.contiguous().T)
    for model in models:
        fit(model, (X, Y), kind("cross_entropy"), max_sweeps=3, sinks=(), deterministic=deterministic)
    for usual, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(usual, other)
    assert not turned.weight.is_contiguous()
