"""Sums in a fixed order: the tree, what of it crosses, and what is not gone through again."""

from __future__ import annotations

from functools import cached_property
from itertools import combinations, pairwise
from typing import final

import pytest
import torch

from torch_admm import comm
from torch_admm.comm import AbstractComm, Order, Solo
from torch_admm.comm.tree import Branch, Growing, branches, tree_sum
from torch_admm.data import Rows
from torch_admm.data.shards import SHARDS

from .helpers import rng


def test_the_tree_does_not_depend_on_who_holds_the_leaves() -> None:
    leaves = [torch.randn(50, generator=rng(i)) for i in range(24)]
    whole_tree = (0, 24)
    whole = tree_sum(whole_tree, {(i, i + 1): leaf for i, leaf in enumerate(leaves)})
    for cuts in ([24], [12, 24], [8, 16, 24], [6, 12, 18, 24], range(3, 25, 3), range(1, 25), [5, 5, 24], [0, 7, 24]):
        known: dict[tuple[int, int], torch.Tensor] = {}
        for stretch in pairwise([0, *cuts]):
            mine = {(i, i + 1): leaves[i] for i in range(*stretch)}
            known |= {branch: tree_sum(branch, mine) for branch in branches(whole_tree, stretch)}
        assert torch.equal(tree_sum(whole_tree, known), whole), cuts
    assert not torch.equal(torch.stack(leaves).sum(0), whole)  # so the order does matter


@pytest.mark.parametrize("number", [1, 2, 24, 25])
def test_leaves_that_come_one_by_one_make_the_same_sums(number: int) -> None:
    """Of every stretch, with few of them there at a time, whatever is added as float64."""
    whole = (0, number)
    leaves = [[torch.randn(7, generator=rng(i)), torch.randn(2, 3, generator=rng(-i - 1)).T] for i in range(number)]
    for begin, end in combinations(range(number + 1), 2):
        growing = Growing(Order(whole, [(begin, end)]), 0, torch.float64)
        for leaf in leaves[begin:end]:
            growing.add(leaf)
            assert len(growing.sums) <= 2 * number.bit_length() - 1
        wanted = branches(whole, (begin, end))
        assert len(growing.sums) == len(wanted)
        for branch, found in zip(wanted, growing.sums, strict=True):
            for i, total in enumerate(found):
                known = {(j, j + 1): leaves[j][i].double() for j in range(*branch)}
                assert torch.equal(total, tree_sum(branch, known)), (begin, end, branch)
        if begin == 0:
            assert len(branches(whole, (0, end))) <= number.bit_length()
    assert growing.came == [torch.float32, torch.float32]
    assert all(total.is_contiguous() for total in growing.total())


@final
class Counting(AbstractComm):
    """The first of several ranks, the others of which have zeros; says what it was asked for."""

    rank = 0

    def __init__(self, size: int, deterministic: bool) -> None:
        self.size, self.deterministic, self.asked = size, deterministic, list[str]()

    def sum_later(self, values: torch.Tensor) -> comm.Pending[torch.Tensor]:
        self.asked.append("sum")
        return comm.Pending(lambda: values)

    def gather_later(self, values: torch.Tensor) -> comm.Pending[torch.Tensor]:
        self.asked.append("gather")
        others = values.new_zeros(self.size - 1, *values.shape)
        return comm.Pending(lambda: torch.cat([values.unsqueeze(0), others]))

    def swap_later(self, values: torch.Tensor) -> comm.Pending[torch.Tensor]:
        raise NotImplementedError

    def largest(self, *values: int) -> list[int]:
        raise NotImplementedError

    def from_first_(self, values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("size", "count", "deterministic", "way"),
    [
        (2, 6144, False, "sum"),  # two branches can be added in one order only
        (3, 6144, False, "gather"),
        (3, 6143, False, "sum"),  # shards too small to be worth it: each rank has one part
        (3, 6143, True, "gather"),
        (8, 6144, False, "gather"),
        (24, 6144, False, "gather"),
        (25, 6400, False, "sum"),  # other shards than fewer ranks have: their order matters no more
    ],
)
def test_branches_are_gathered_where_the_order_matters(size: int, count: int, deterministic: bool, way: str) -> None:
    ranks = Counting(size, deterministic)
    rows = Rows(torch.zeros(count, 1), torch.zeros(count)).part(0, size)
    parts = [torch.full((2,), 1.0 + i) for i in range(len(ranks.pieces(rows)))]
    expected = sum(range(1, len(parts) + 1))
    assert ranks.total(parts, ranks.order(rows)).tolist() == [expected] * 2
    assert ranks.asked == [way]
    assert ranks.total([torch.ones(2)], ranks.open_order()).tolist() == [1, 1]
    assert ranks.asked == [way, "sum"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sum_does_not_go_through_thousands_of_ranks(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    """Who has which branch is found out once, if at all: it would take longer than a sweep over a rank's rows."""
    asked = []

    def counted(order: Order) -> list[tuple[Branch, ...]]:
        asked.append(order)
        return [branches(order.tree, held) for held in order.held]

    owned = cached_property(counted)
    owned.__set_name__(Order, "owned")
    monkeypatch.setattr(Order, "owned", owned)
    ranks, count = Counting(5000, deterministic), 5000
    ranks.shards = 5016 if deterministic else SHARDS
    rows = ranks.part(Rows(torch.zeros(count, 1), torch.zeros(count)))
    rows.cut = True
    for _ in range(3):
        assert ranks.total([torch.ones(2)], ranks.order(rows)).tolist() == [1, 1]
    assert len(asked) == (1 if deterministic else 0)


def test_a_piece_that_is_left_out_is_noticed() -> None:
    rows = Rows(torch.zeros(6144, 1), torch.zeros(6144))
    with pytest.raises(AssertionError, match="one part a piece"):
        Solo().total([torch.zeros(1)] * 23, Solo().order(rows))
