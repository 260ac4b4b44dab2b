"""Ranks of one machine: sums through memory that they share, whatever is under way, and nothing left behind."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_admm.comm import AbstractComm, Group, near
from torch_admm.errors import CommError

from .helpers import rng
from .ranks import in_group, on_ranks

LARGE = near.STRIPED // 4 + 7  # float32 numbers that each rank adds a part of


def _mine(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=rng(rank))


def _way(ranks: AbstractComm) -> str:
    assert isinstance(ranks, Group)
    return "gloo" if ranks.near is None else "memory"


def _exchange(ranks: AbstractComm) -> dict[str, Any]:
    large = ranks.sum_(_mine(ranks.rank, LARGE))
    several = [ranks.sum_later(torch.full((i + 1,), float(i))) for i in range(2 * near.SLOTS + 1)]
    sums = [pending.wait()[-1].item() for pending in reversed(several)]
    ranks.sum_later(torch.ones(2))  # nobody waits for it
    beyond = ranks.sum_(torch.ones(near.ROOM // 4 + 1))
    nothing = ranks.sum_(torch.ones(0))
    shaped = ranks.gather_later(torch.full((2, 3), ranks.rank)).wait()
    found = {"large": large.numpy().tobytes(), "several": sums, "beyond": beyond.unique().tolist()}
    return found | {"nothing": len(nothing), "shape": tuple(shaped.shape), "way": _way(ranks)}


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_exact_and_the_same_on_all_ranks(size: int) -> None:
    parts = [_mine(rank, LARGE) for rank in range(size)]
    in_order = parts[0] + parts[1] if size == 2 else parts[0] + parts[1] + parts[2]
    for said in on_ranks(size, in_group, _exchange):
        assert isinstance(said, dict), said
        assert said["way"] == "memory"
        assert said["large"] == in_order.numpy().tobytes()
        assert said["several"] == [float(size * i) for i in reversed(range(2 * near.SLOTS + 1))]
        assert said["beyond"] == [float(size)]
        assert (said["nothing"], said["shape"]) == (0, (size, 2, 3))


def _parts(rank: int, rows: int) -> list[torch.Tensor]:
    return [_mine(rank, 15).view(3, 5).T, _mine(rank + 9, rows).double(), _mine(rank, 1).squeeze()]


def _several(ranks: AbstractComm, rows: int) -> tuple[list[Any], int]:
    before = ranks.bytes_sent
    pending = ranks.sums_later(_parts(ranks.rank, rows), torch.float64)
    return [t.numpy() for t in (*pending.wait(), *pending.wait())], ranks.bytes_sent - before


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [7, LARGE])
def test_several_tensors_cross_at_once(size: int, rows: int) -> None:
    first, *others = (_parts(rank, rows) for rank in range(size))
    for part in others:
        first = [(a.double() + b.double()) for a, b in zip(first, part, strict=True)]
    expected = [t.to(like.dtype) for t, like in zip(first, _parts(0, rows), strict=True)]
    for sums, sent in on_ranks(size, in_group, _several, rows):
        assert sent == 8 * (15 + rows + 1)
        for got, wanted in zip(map(torch.as_tensor, sums), expected * 2, strict=True):
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            assert torch.equal(got, wanted)


def _slowly(ranks: AbstractComm, slow: int) -> list[float]:
    found, pending = [], []
    for i in range(3 * near.RING):
        pending.append(ranks.sum_later(torch.full((100,), float(i))))
        if ranks.rank == slow:
            time.sleep(0.005)
        if ranks.rank == slow or i % 5 == 4:
            found += [p.wait().sum().item() for p in pending]
            pending.clear()
    return found + [p.wait().sum().item() for p in pending]


@pytest.mark.parametrize("slow", [0, 1])
def test_nobody_overwrites_what_a_slower_rank_has_not_read(slow: int) -> None:
    assert on_ranks(2, in_group, _slowly, slow) == [[200.0 * i for i in range(3 * near.RING)]] * 2


def _by(backend: str, folder: Path | None = None) -> str:
    tempfile.tempdir = str(folder) if folder else None
    return str(in_group(_way, backend=backend))


def _elsewhere(_: Any) -> str:
    near._machine = lambda: os.environ["RANK"]
    return _by("auto")


def test_gloo_alone_is_what_its_name_says() -> None:
    assert on_ranks(2, _by, "gloo") == ["gloo", "gloo"]


def test_ranks_of_several_machines_take_the_network() -> None:
    assert on_ranks(2, _elsewhere, None) == ["gloo", "gloo"]


def test_a_folder_in_which_no_socket_can_be_is_no_error(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 40)  # paths of sockets are short
    deep.mkdir()
    assert on_ranks(2, _by, "auto", deep) == ["gloo", "gloo"]
    assert list(deep.iterdir()) == []


def _differ(ranks: AbstractComm) -> str:
    try:
        ranks.sum_(torch.ones(3 + ranks.rank))
    except CommError as error:
        return str(error)
    return "added up"


def test_sizes_that_differ_are_an_error_on_all_ranks() -> None:
    first, second = on_ranks(2, in_group, _differ)
    assert first.endswith("rank 1 sent 16 bytes, rank 0 12")
    assert second.endswith("rank 0 sent 12 bytes, rank 1 16")


def _die(ranks: AbstractComm) -> str:
    ranks.sum_(torch.ones(3))
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.sum_(torch.ones(3))
    except CommError as error:
        return str(error)
    return "went on"


def _die_in(folder: Path) -> Any:
    tempfile.tempdir = str(folder)
    return in_group(_die)


def test_a_killed_rank_leaves_nothing_behind(tmp_path: Path) -> None:
    left, killed = on_ranks(2, _die_in, tmp_path)
    assert killed == -signal.SIGKILL
    assert left == "rank 1 is missing, ended or stuck; rank 0 was told: rank 1 closed its connection"
    assert list(tmp_path.iterdir()) == []
