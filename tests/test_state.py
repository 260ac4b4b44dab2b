"""A state that does not fit is refused before anything of the run has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import blobs, net, same
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, fit


def copies(value: Any) -> Any:
    """Of a state: tensors in nested dicts."""
    if isinstance(value, dict):
        return {name: copies(part) for name, part in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


LAST = {"BregmanADMM": ("sweeps", "z"), "AnchoredADMM": ("steps", "kept_mean")}  # a number, and a part that comes late


@pytest.mark.parametrize("method", [BregmanADMM("logistic"), AnchoredADMM("logistic")])
@pytest.mark.parametrize("fault", ["number", "layer", "shape"])
def test_what_does_not_fit_changes_nothing(method: AbstractMethod, fault: str) -> None:
    run = fit(net(4, 3, 1), blobs(60), method, max_sweeps=2, sinks=()).method
    name = type(method).__name__
    number, part = LAST[name]
    before = copies(run.state_dict())
    state = copies(before)
    for tensors in state.values():
        if isinstance(tensors, dict):
            for key in tensors:
                tensors[key] = tensors[key] + 1 if isinstance(tensors[key], Tensor) else tensors[key]
    if fault == "number":
        del state[number]
        message = rf"state has no '{number}'; one that {name}\.state_dict\(\) gave is expected"
    elif fault == "layer":
        del state[part][2]
        message = rf"state: {part}\[2\] is nothing; \(\d+, \d+\) is expected"
    else:
        state[part][2] = torch.zeros(3)
        message = rf"state: {part}\[2\] is \(3,\); \(\d+, \d+\) is expected"
    with pytest.raises(ValueError, match=message):
        run.load_state_dict(state)
    assert same(run.state_dict(), before)


@pytest.mark.parametrize(
    ("moment", "message"),
    [
        (None, r"state: residuals\[1\] is not that of a moment"),
        ({"refreshes": "many"}, r"state: residuals\[1\] is not that of a moment"),
        ({"refreshes": 1, "G": torch.eye(3)}, r"state: residuals\[1\]\.P is nothing; \(3, 3\) is expected"),
        ({"refreshes": 1, "G": torch.eye(1)}, r"state: residuals\[1\]\.G is \(1, 1\); \(3, 3\) is expected"),
    ],
)
def test_moments_are_checked_too(moment: Any, message: str) -> None:
    """One row for three would be taken as that for each."""
    run = fit(net(4, 3, 1), blobs(60), AnchoredADMM("logistic"), max_sweeps=2, sinks=()).method
    before = copies(run.state_dict())
    state = copies(before)
    state["residuals"][1] = moment
    with pytest.raises(ValueError, match=message):
        run.load_state_dict(state)
    assert same(run.state_dict(), before)
