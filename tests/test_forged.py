"""Checkpoints with a right checksum and a state that no run has: passed over like damage, on all ranks together."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import blobs, net
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, Problem, container, fit
from torch_admm.data import AbstractRows
from torch_admm.errors import CheckpointError
from torch_admm.losses import loss_of
from torch_admm.problem import Weights

from .ranks import in_group, on_ranks

Change = Callable[[dict[str, Any]], object]


def method(**changes: Any) -> Change:
    return lambda shared: shared["method"].update(changes)


def shared(**changes: Any) -> Change:
    return lambda content: content.update(changes)


def without(name: str) -> Change:
    return lambda content: content["by_row"].pop(name)


WHOLE = "a whole number of at least 0 is expected"
ANCHORED: dict[str, tuple[Change, str]] = {
    "no weights": (method(W=3), "state: W is 3; tensors by layer are expected"),
    "a weight": (method(W={1: 3, 2: 3}), "state: W[1] is 3; (6, 5) is expected"),
    "a word": (method(steps="many"), f"state: steps is 'many'; {WHOLE}"),
    "below zero": (method(steps=-5), f"state: steps is -5; {WHOLE}"),
    "a truth": (method(alive=1), "state: alive is 1; True or False is expected"),
    "a length": (method(shorter=None), "state: shorter is nothing; a number is expected"),
    "no scaling": (method(scaling=5), "state: scaling is 5; tensors by layer are expected"),
    "a scale": (method(scaling={"shift": torch.ones(4)}), "state: scaling[scale] is nothing; (4,) is expected"),
    "no moments": (method(residuals=None), "state: residuals is nothing; tensors by layer are expected"),
    "a moment": (
        lambda content: content["method"]["inputs"][1].update(refreshes=-1),
        f"state: refreshes is -1; {WHOLE}",
    ),
    "no best": (shared(best_weights={}), "state: best_weights[1] is nothing; (6, 5) is expected"),
    "another best": (
        shared(best_weights={1: torch.ones(3), 2: torch.ones(1, 7)}),
        "state: best_weights[1] is (3,); (6, 5) is expected",
    ),
}
BREGMAN: dict[str, tuple[Change, str]] = {
    "no weights": (method(W=3), "state: W is 3; tensors by layer are expected"),
    "a word": (method(sweeps="many"), f"state: sweeps is 'many'; {WHOLE}"),
    "below zero": (method(sweeps=-5), f"state: sweeps is -5; {WHOLE}"),
}


def run(folder: Path, make: Any, sweeps: int = 2) -> Any:
    return fit(net(4, 6, 1), blobs(60), make("logistic"), max_sweeps=sweeps, sinks=(), checkpoint=folder, resume="auto")


def forge(file: Path, change: Change) -> None:
    content = container.read(file)
    change(content)
    file.unlink()
    container.write(file, content)


CASES = [(AnchoredADMM, *case) for case in ANCHORED.values()] + [(BregmanADMM, *case) for case in BREGMAN.values()]


@pytest.mark.parametrize(("make", "change", "message"), CASES, ids=[*ANCHORED, *(f"bregman {n}" for n in BREGMAN)])
def test_what_does_not_fit_is_passed_over(make: Any, change: Change, message: str, tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", make)
    run(folder := tmp_path / "forged", make)
    newest, older = folder / "sweep-00000002", folder / "sweep-00000001"
    forge(newest / "shared", change)
    said = f"{newest}: {message}; going on from {older}"
    with pytest.warns(RuntimeWarning, match=f"^{re.escape(said)}$") as caught:
        again = run(folder, make)
    assert [warning.filename for warning in caught] == [__file__]  # whoever called `fit`
    assert all(torch.equal(a, b) for a, b in zip(straight.model.parameters(), again.model.parameters(), strict=True))
    for file in (newest, older):
        forge(file / "shared", change)
    with pytest.raises(CheckpointError, match=f"^{re.escape(f'{newest}: {message}; {older}: {message}')}$"):
        run(folder, make)


def test_rows_without_a_variable_are_passed_over(tmp_path: Path) -> None:
    run(tmp_path, BregmanADMM)
    forge(tmp_path / "sweep-00000002" / "rows-0-60", without("a"))
    said = "sweep-00000002: state has no 'a'; one that .* gave is expected; going on from .*sweep-00000001"
    with pytest.warns(RuntimeWarning, match=said):
        assert len(run(tmp_path, BregmanADMM).history) == 3


class Own(AbstractMethod):
    """A method of a user's, which looks at nothing before it takes a state up."""

    def __init__(self, loss: str) -> None:
        self.loss, self.total = loss_of(loss), 0

    def init(self, problem: Problem, rows: AbstractRows, *, batch_size: int | None, seed: int) -> None:
        self.problem, self.total = problem, 0

    def step(self) -> None:
        self.total += 1

    def weights(self) -> Weights:
        return {l: W + self.total for l, W in self.problem.read().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = 0 + state["total"]


def test_so_is_what_a_method_cannot_take_up(tmp_path: Path) -> None:
    run(tmp_path, Own)
    forge(tmp_path / "sweep-00000002" / "shared", method(total="many"))
    with pytest.warns(RuntimeWarning, match=r"sweep-00000002: TypeError: .*; going on from .*sweep-00000001"):
        again = run(tmp_path, Own)
    assert again.method.state_dict() == {"total": 2}


def _resumed(ranks: Any, folder: Path, make: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(folder, make, 3)
    return [row["sweep"] for row in result.history], [str(warning.message) for warning in caught]


@pytest.mark.parametrize("make", [BregmanADMM, Own])
def test_ranks_pass_over_what_does_not_fit_one_of_them(make: Any, tmp_path: Path) -> None:
    on_ranks(2, in_group, _resumed, tmp_path, make)
    newest = tmp_path / "sweep-00000003"
    if make is BregmanADMM:
        forge(max(newest.glob("rows-*"), key=lambda file: int(file.name.split("-")[1])), without("a"))
    else:
        forge(newest / "shared", method(total=None))
    (first, warned), (second, silent) = on_ranks(2, in_group, _resumed, tmp_path, make)
    assert first == second == [0, 1, 2, 3]
    assert re.match(rf"{newest}: .*; going on from .*sweep-00000002", *warned)
    assert silent == []
