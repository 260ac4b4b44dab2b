"""Room for much state: other pages, the same numbers."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

from torch_admm import BregmanADMM, fit, pages

from .helpers import blobs, net

CPU = torch.device("cpu")


class Stubborn(mmap.mmap):
    """Of a system without large pages."""

    def madvise(self, *args: Any) -> None:
        raise OSError(22, "Invalid argument")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [mmap.mmap, Stubborn])
def test_large_room_is_like_any_other(kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LARGE", 1000)
    monkeypatch.setattr(mmap, "mmap", kind)
    found = pages.room((300, 7), dtype, CPU)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((300, 7), dtype, True)
    found.fill_(3.0)
    assert found.sum() == 6300
    assert pages.room((0, 7), dtype, CPU).shape == (0, 7)


def _trained() -> list[list[float]]:
    model = net(4, 7, 5, 1)
    fit(model, blobs(97, 4), BregmanADMM("hinge", warm_start=1), max_sweeps=4, sinks=())
    return [p.tolist() for p in model.parameters()]


def test_trains_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, taken = _trained(), []
    make = mmap.mmap

    def noted(*args: Any, **kwargs: Any) -> Any:
        taken.append(args)
        return make(*args, **kwargs)

    monkeypatch.setattr(pages, "LARGE", 1)
    monkeypatch.setattr(mmap, "mmap", noted)
    assert _trained() == usual
    assert len(taken) == 5 or not hasattr(mmap, "MADV_HUGEPAGE")  # a_1, a_2, z_1, z_2, z_3
