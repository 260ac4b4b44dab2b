"""`fit` with a folder of checkpoints: it goes on from them to the same bits, and from nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import blobs, net
from torch_admm import AnchoredADMM, BregmanADMM, Outcome, fit
from torch_admm.errors import CheckpointError


def run(folder: Path, sweeps: int = 2, **changes: Any) -> Any:
    known: dict[str, Any] = {
        "model": net(4, 6, 1),
        "data": blobs(60),
        "method": AnchoredADMM("logistic"),
        "resume": "auto",
        "max_sweeps": sweeps,
    }
    return fit(**{**known, **changes}, sinks=(), checkpoint=folder, restore_best=False)


@pytest.mark.parametrize("make", [AnchoredADMM, BregmanADMM])
def test_a_run_that_goes_on_is_one_that_never_stopped(make: Callable[[str], Any], tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", 6, method=make("logistic"))
    run(tmp_path / "parts", 4, method=make("logistic"))
    parts = run(tmp_path / "parts", 6, method=make("logistic"))
    for a, b in zip(straight.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(a, b)
    timed = ("seconds",)
    assert [{k: v for k, v in row.items() if k not in timed} for row in parts.history] == [
        {k: v for k, v in row.items() if k not in timed} for row in straight.history
    ]
    assert [row["seconds"] for row in parts.history] == sorted(row["seconds"] for row in parts.history)


def test_a_run_that_is_done_does_nothing_more(tmp_path: Path) -> None:
    first, again = run(tmp_path), run(tmp_path)
    assert again.outcome is Outcome.MAX_SWEEPS
    assert again.history == first.history
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))


def _changed(which: int) -> tuple[Tensor, Tensor]:
    """The same data but for one entry of X or y."""
    x, y = blobs(60)
    if which < len(x):
        x[which, 2] += 1e-3
    else:
        y[3] = 1 - y[3]
    return x, y


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "width": ("net was 4-6-1 when it was saved, and is 4-7-1", {"model": net(4, 7, 1)}),
    "activation": (
        r"model was Sequential\(.*ReLU.*\) when it was saved, and is Sequential\(.*Tanh",
        {"model": net(4, 6, 1, act=nn.Tanh)},
    ),
    "dtype": (
        "dtype was torch.float32 when it was saved, and is torch.float64",
        {"model": net(4, 6, 1, dtype=torch.float64), "data": blobs(60, dtype=torch.float64)},
    ),
    "loss": ("loss was logistic when it was saved, and is hinge", {"method": AnchoredADMM("hinge")}),
    "method": ("method was AnchoredADMM when it was saved, and is BregmanADMM", {"method": BregmanADMM("logistic")}),
    "rows": ("number of rows was 60 when it was saved, and is 59", {"data": tuple(t[:59] for t in blobs(60))}),
    **{
        where: ("data was [0-9a-f]{8} .* when it was saved, and is [0-9a-f]{8} ", {"data": _changed(which)})
        for where, which in {"first X": 0, "some X": 37, "last X": 59, "y": 60}.items()
    },
    "setting": (
        "AnchoredADMM.refresh was 40 when it was saved, and is 7",
        {"method": AnchoredADMM("logistic", refresh=7)},
    ),
    "deterministic": ("deterministic was False when it was saved, and is True", {"deterministic": True}),
    "monitor": ("monitor was train_accuracy when it was saved, and is loss", {"monitor": "loss"}),
    "batch size": ("batch_size was None when it was saved, and is 16", {"batch_size": 16}),
    "seed": ("seed was 0 when it was saved, and is 1", {"seed": 1}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused_by_what_differs(name: str, tmp_path: Path) -> None:
    message, changes = OTHERS[name]
    run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=f"{tmp_path}/sweep-00000002 is of another run: {message}.* now$"):
        run(tmp_path, 3, **changes)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_checkpoints_that_are_there_are_not_written_over(tmp_path: Path) -> None:
    run(tmp_path)
    said = r'has checkpoints of a run already; resume="auto" \(--resume auto\) resumes from them'
    with pytest.raises(CheckpointError, match=said):
        run(tmp_path, resume=False)


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint to go on from"):
        run(tmp_path, resume=True)
