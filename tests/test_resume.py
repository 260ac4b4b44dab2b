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
from torch_admm.identity import settings_of

from .test_forged import Own


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
    "shards": ("shards was 24 when it was saved, and is 48", {"shards": 48}),
    "monitor": ("monitor was train_accuracy when it was saved, and is loss", {"monitor": "loss"}),
    "batch size": ("batch_size was None when it was saved, and is 16", {"batch_size": 16}),
    "test rows": (
        "number of test rows was not set when it was saved, and is 30",
        {"evaluate": blobs(30), "monitor": "train_accuracy"},
    ),
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
    with pytest.raises(CheckpointError, match="elsewhere has no checkpoint to go on from"):
        run(tmp_path / "elsewhere", resume=True)
    assert list(tmp_path.iterdir()) == []  # a name that was mistyped does not become a folder


@pytest.mark.parametrize(
    ("name", "kept", "other"),
    [
        ("number of test rows was 30 when it was saved, and is 29", {"evaluate": blobs(30)}, {"evaluate": blobs(29)}),
        ("test data was [0-9a-f]{8} .* and is", {"evaluate": blobs(60)}, {"evaluate": _changed(37)}),
        ("test data was [0-9a-f]{8} .* and is", {"evaluate": blobs(60)}, {"evaluate": _changed(60)}),
        ("number of test rows was 60 .* not set", {"evaluate": blobs(60), "monitor": "loss"}, {"monitor": "loss"}),
        ("number of rows was 48 .* and is 60", {"validation": 0.2}, {"validation": None}),
    ],
)
def test_figures_on_other_held_out_rows_do_not_follow(name: str, kept: Any, other: Any, tmp_path: Path) -> None:
    run(tmp_path, **kept)
    with pytest.raises(CheckpointError, match=f"sweep-00000002 is of another run: {name}"):
        run(tmp_path, 3, **other)
    assert len(run(tmp_path, 3, **kept).history) == 4


def _accuracy(model: nn.Module) -> dict[str, float]:
    return {"mine": 0.5}


def test_another_function_may_go_on_measuring(tmp_path: Path) -> None:
    run(tmp_path, evaluate=_accuracy)
    assert run(tmp_path, 3, evaluate=lambda model: {"mine": 0.25}).history[-1]["mine"] == 0.25


@pytest.mark.parametrize(
    ("before", "now"), [({"gamma": 1}, {"gamma": 1.0}), ({"gamma": 1, "beta": [2, 2.0]}, {"gamma": [1.0], "beta": 2})]
)
def test_the_same_penalties_in_other_words(before: Any, now: Any, tmp_path: Path) -> None:
    for method in (BregmanADMM("logistic", **before), BregmanADMM("logistic", **now)):
        run(tmp_path, method=method)
    with pytest.raises(CheckpointError, match=r"BregmanADMM.gamma was .* when it was saved, and is 2\.0 now"):
        run(tmp_path, method=BregmanADMM("logistic", gamma=2, **{"beta": now["beta"]} if "beta" in now else {}))


class Optioned(Own):
    def __init__(self, loss: str, options: dict[str, Any]) -> None:
        super().__init__(loss)
        self.options = options


def test_settings_in_a_dict_are_compared_by_content() -> None:
    one, same, other = (
        settings_of(Optioned("logistic", options))["Optioned.options"]
        for options in ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, {"a": 1, "b": [3]})
    )
    assert one == same == "{a: 1, b: [2]}"
    assert one != other
