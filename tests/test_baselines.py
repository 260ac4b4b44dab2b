"""The bundled rivals are torch's own optimisers: the same steps as a loop written by hand."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

import examples.digits
from baselines import LBFGS, SGD
from tests.helpers import blobs, net
from torch_admm import fit
from torch_admm.data import rows_of
from torch_admm.problem import from_module

X, Y = blobs(100, 4, 3)


def test_sgd_is_a_plain_loop() -> None:
    model = net(4, 8, 3)
    mine = copy.deepcopy(model)
    rows = rows_of((X, Y), from_module(mine, "cross_entropy"))
    optimiser = torch.optim.SGD(mine.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(3):
        for x, y in rows.batches(32, 7, epoch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(mine(x), y).backward()
            optimiser.step()
    fit(model, (X, Y), SGD("cross_entropy", lr=0.2, batch_size=32), max_sweeps=3, seed=7, sinks=(), restore_best=False)
    for a, b in zip(model.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(a, b)


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


def test_batches_cover_every_row_once() -> None:
    rows = rows_of((X, Y), from_module(net(4, 8, 3), "cross_entropy"))
    epochs = [torch.cat([x for x, _ in rows.batches(33, 0, epoch)]) for epoch in (0, 0, 1)]
    assert [len(x) for x, _ in rows.batches(33, 0, 0)] == [33, 33, 33, 1]
    assert torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], epochs[2])
    assert torch.equal(epochs[2].sort(0).values, X.sort(0).values)


def test_demo_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["digits", "--sweeps", "3"])
    examples.digits.main()
    screen = capsys.readouterr().out
    assert "1347 training rows, 450 test rows, net 64-64-10" in screen
    for method in ("ADMM (Algorithm 1)", "L-BFGS", "SGD"):
        assert f"\n{method}" in screen
