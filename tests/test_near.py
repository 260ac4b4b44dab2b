"""Ranks of one machine: sums through memory that they share, whatever is under way, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest
import torch

from torch_admm.comm import AbstractComm, Group, Solo, meet, near, signals
from torch_admm.comm.tree import tree_sum
from torch_admm.data.shards import SHARDS, Shards
from torch_admm.errors import CommError

from .helpers import rng
from .ranks import Task, in_group, on_ranks

LARGE = near.STRIPED // 4 + 7  # float32 numbers that each rank adds a part of


def _mine(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=rng(rank))


def _way(ranks: AbstractComm) -> str:
    assert isinstance(ranks, Group)
    return "gloo" if ranks.near is None else "memory"


def _with(kind: type[signals.AbstractSignals], task: Task, *args: Any) -> Any:
    """In a group whose ranks tell each other how far they are in this way."""
    signals.in_order = lambda: kind is signals.Flags
    return in_group(_checked, kind, task, *args)


def _checked(ranks: AbstractComm, kind: type[signals.AbstractSignals], task: Task, *args: Any) -> Any:
    assert isinstance(ranks, Group)
    assert ranks.near is not None
    assert type(ranks.near.signals) is kind
    return task(ranks, *args)


both = pytest.mark.parametrize("kind", [signals.Flags, signals.Bytes])


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


@both
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_exact_and_the_same_on_all_ranks(size: int, kind: type[signals.AbstractSignals]) -> None:
    parts = [_mine(rank, LARGE) for rank in range(size)]
    in_order = parts[0] + parts[1] if size == 2 else parts[0] + parts[1] + parts[2]
    for said in on_ranks(size, _with, kind, _exchange):
        assert isinstance(said, dict), said
        assert said["way"] == "memory"
        assert said["large"] == in_order.numpy().tobytes()
        assert said["several"] == [float(size * i) for i in reversed(range(2 * near.SLOTS + 1))]
        assert said["beyond"] == [float(size)]
        assert (said["nothing"], said["shape"]) == (0, (size, 2, 3))


def _parts(rank: int, rows: int) -> list[torch.Tensor]:
    tall = _mine(rank, 15).view(5, 3) if rank else _mine(rank, 15).view(3, 5).T.clone()  # not as the others have it
    return [_mine(rank, 15).view(3, 5).T, _mine(rank + 9, rows).double(), _mine(rank, 1).squeeze(), tall]


def _several(ranks: AbstractComm, rows: int) -> tuple[list[Any], int, bool]:
    before = ranks.bytes_sent
    parts = _parts(ranks.rank, rows)
    pending = ranks.sums_later(parts, torch.float64)
    alike = all(t.stride() == part.stride() for t, part in zip(pending.wait(), parts, strict=True))
    return [t.numpy() for t in (*pending.wait(), *pending.wait())], ranks.bytes_sent - before, alike


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [7, LARGE])
def test_several_tensors_cross_at_once(size: int, rows: int) -> None:
    first, *others = (_parts(rank, rows) for rank in range(size))
    for part in others:
        first = [(a.double() + b.double()) for a, b in zip(first, part, strict=True)]
    expected = [t.to(like.dtype) for t, like in zip(first, _parts(0, rows), strict=True)]
    for sums, sent, laid_out_alike in on_ranks(size, in_group, _several, rows):
        assert sent == 8 * (15 + rows + 1 + 15)
        assert laid_out_alike
        for got, wanted in zip(map(torch.as_tensor, sums), expected * 2, strict=True):
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            assert torch.equal(got, wanted)


def _from_first(ranks: AbstractComm) -> tuple[list[Any], str]:
    values = _mine(ranks.rank, 15).view(5, 3)
    values = values if ranks.rank else values.T.contiguous().T
    found = ranks.from_first_(values)
    assert found is values
    return found.tolist(), _way(ranks)


def test_what_comes_from_the_first_may_lie_anyhow() -> None:
    assert on_ranks(3, in_group, _from_first) == [(_mine(0, 15).view(5, 3).tolist(), "memory")] * 3


def _standing(ranks: AbstractComm, rows: int) -> list[list[Any]]:
    """Sums of what was written where it crosses from, with others between them."""
    parts = _parts(ranks.rank, rows)
    standing = ranks.standing(parts, torch.float64, ranks.open_order())
    found, before = [], ranks.bytes_sent
    for i in range(2 * near.RING):
        for place, part in zip(standing.places()[0], parts, strict=True):
            place.copy_(part).add_(i)  # as float64, whatever came
        standing.start()
        if i % 2:
            ranks.largest(i)
        sums = standing.wait()
        found.append([t.clone().numpy() for t in sums])
        for t in sums:
            t.fill_(torch.nan)  # they are the caller's to use up
    if ranks.size > 1:
        assert ranks.bytes_sent - before == 8 * near.RING * (2 * sum(part.numel() for part in parts) + 1)
    return found


def _standing_by(backend: str, rows: int) -> Any:
    return in_group(_standing, rows, backend=backend)


def _held(size: int, rows: int, said: list[list[list[Any]]]) -> None:
    """Each rank must have found the sums of what all have written."""
    for found in said:
        for i, sums in enumerate(found):
            total, *others = ([part.double() + i for part in _parts(rank, rows)] for rank in range(size))
            for part in others:
                total = [a + b for a, b in zip(total, part, strict=True)]
            for got, wanted in zip(map(torch.as_tensor, sums), total, strict=True):
                assert torch.equal(got, wanted)


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [7, LARGE])
def test_a_standing_sum_is_made_where_it_crosses_from(size: int, rows: int, backend: str) -> None:
    _held(size, rows, on_ranks(size, _standing_by, backend, rows))


def test_a_standing_sum_of_one_process() -> None:
    _held(1, 7, [_standing(Solo(), 7)])


def _in_order(ranks: AbstractComm, leaves: int, size: int) -> list[bytes]:
    """Sums of so many leaves, of which some ranks may have none."""
    order = ranks.batch_order(Shards(100).part(ranks.rank, ranks.size, SHARDS // leaves))
    standing, found = ranks.standing([torch.empty(size)], torch.float32, order), []
    for i in range(near.RING + 1):
        known = {(k, k + 1): torch.randn(size, generator=rng(100 * i + k)) for k in range(leaves)}
        for branch, (place,) in zip(order.owned[ranks.rank], standing.places(), strict=True):
            place.copy_(tree_sum(branch, known))
        standing.start()
        found.append(standing.wait()[0].numpy().tobytes())
    return found


def _in_orders(backend: str) -> Any:
    """Of the longer ones, ranks of one machine add up a stripe each."""
    return in_group(lambda ranks: [_in_order(ranks, *case) for case in ORDERED], backend=backend)


ORDERED = [(leaves, size) for leaves in (1, 2, 4, 8) for size in (7, 20_000)]


@pytest.mark.parametrize("backend", ["auto", "gloo"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_standing_sum_has_an_order(size: int, backend: str) -> None:
    alone = [_in_order(Solo(), *case) for case in ORDERED]
    assert on_ranks(size, _in_orders, backend) == [alone] * size


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


@both
@pytest.mark.parametrize("slow", [0, 1])
def test_nobody_overwrites_what_a_slower_rank_has_not_read(slow: int, kind: type[signals.AbstractSignals]) -> None:
    assert on_ranks(2, _with, kind, _slowly, slow) == [[200.0 * i for i in range(3 * near.RING)]] * 2


def _many(ranks: AbstractComm) -> float:
    return sum(ranks.sum_(torch.ones(3))[0].item() for _ in range(2000))


@both
def test_more_ranks_than_cores_are_woken_up(kind: type[signals.AbstractSignals]) -> None:
    """Each exchange has somebody asleep; were nobody woken up, 2,000 naps would take longer than a test may."""
    assert on_ranks(4, _with, kind, _many) == [8000.0] * 4


def _by(backend: str) -> str:
    return str(in_group(_way, backend=backend))


def _elsewhere(_: Any) -> str:
    meet._machine = lambda: os.environ["RANK"]
    return _by("auto")


def _door_shut(_: Any) -> str:
    meet._opened = lambda door, address: os.environ["RANK"] == "0"
    return _by("auto")


def _of_another_user(_: Any) -> str:
    os.geteuid = lambda: 4321
    return _by("auto")


def test_gloo_alone_is_what_its_name_says() -> None:
    assert on_ranks(2, _by, "gloo") == ["gloo", "gloo"]


@pytest.mark.parametrize("task", [_elsewhere, _door_shut, _of_another_user])
def test_ranks_that_cannot_or_must_not_share_memory_take_the_network(task: Task) -> None:
    assert on_ranks(2, task, None) == ["gloo", "gloo"]


def _differ(ranks: AbstractComm) -> str:
    try:
        ranks.sum_(torch.ones(3 + ranks.rank))
    except CommError as error:
        return str(error)
    return "added up"


def test_sizes_that_differ_are_an_error_on_all_ranks() -> None:
    first, second = on_ranks(2, in_group, _differ)
    assert first.endswith("rank 1 is at a sum of 16 bytes, rank 0 at a sum of 12 bytes")
    assert second.endswith("rank 0 is at a sum of 12 bytes, rank 1 at a sum of 16 bytes")


def _die_standing(ranks: AbstractComm) -> str:
    """Between writing and telling."""
    standing = ranks.standing([torch.ones(3)], torch.float32, ranks.open_order())
    for i in range(4):
        standing.places()[0][0].fill_(i)
        if ranks.rank == 1 and i == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        standing.start()
        try:
            standing.wait()
        except CommError as error:
            return f"{i}: {error}"
    return "went on"


def test_a_rank_killed_in_a_standing_sum_is_named() -> None:
    left, killed = on_ranks(2, in_group, _die_standing)
    assert killed == -signal.SIGKILL
    assert left == "3: rank 1 is missing (it ended or is stuck); rank 0 reports: rank 1 closed its connection"


def _die(ranks: AbstractComm, pause: float) -> str:
    ranks.sum_(torch.ones(3))
    if ranks.rank == 1:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.sum_(torch.ones(3))
    except CommError as error:
        return str(error)
    return "went on"


@both
@pytest.mark.parametrize("pause", [0.0, 0.2])  # the other one is asking, or asleep
def test_a_killed_rank_is_named(pause: float, kind: type[signals.AbstractSignals]) -> None:
    left, killed = on_ranks(2, _with, kind, _die, pause)
    assert killed == -signal.SIGKILL
    assert left == "rank 1 is missing (it ended or is stuck); rank 0 reports: rank 1 closed its connection"


def test_what_was_told_before_leaving_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank tells something and goes while another falls asleep over it."""
    counts = [memoryview(bytearray(64)).cast("q") for _ in range(2)]
    link, end = socket.socketpair()
    with link, end:
        flags = signals.Flags(0, {1: link}, counts)

        def told_meanwhile(*_: Any) -> list[int]:
            counts[1][signals.WRITTEN] = 1
            end.close()
            return [1]

        monkeypatch.setattr(flags, "_readable", told_meanwhile)
        flags.sleep(flags.behind(signals.WRITTEN, 1), signals.WRITTEN, 1, 1.0)
        assert flags.behind(signals.WRITTEN, 1) == []
        with pytest.raises(RuntimeError, match="rank 1 closed its connection"):
            flags.sleep(flags.behind(signals.WRITTEN, 2), signals.WRITTEN, 2, 1.0)
