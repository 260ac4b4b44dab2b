"""A fixed order of additions: floating-point sums then come out the same wherever their terms were made.

The terms 0..n-1 are the leaves of a binary tree that halves its range again and again. A rank that holds a stretch of
them adds up the largest whole branches within it; only these cross, and everybody adds them up by the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import final

import torch
from torch import Tensor

__all__ = ["ONE_LEAF", "Branch", "Growing", "Order", "branches", "tree_sum"]

Branch = tuple[int, int]  # of the leaves from .. to
ONE_LEAF: Branch = (0, 1)


@final
@dataclass(frozen=True, eq=False)
class Order:
    """In which order things are added: by a tree of which each rank has some leaves, or none.

    It is open where each rank has one thing, whose place in the sum nobody says.
    """

    tree: Branch
    held: Sequence[Branch]  # by rank
    is_open: bool = False

    @cached_property
    def owned(self) -> list[tuple[Branch, ...]]:
        """The branches of each rank; with thousands of ranks this takes longer than a sweep."""
        return [branches(self.tree, held) for held in self.held]

    @cached_property
    def most(self) -> int:
        """Branches that a rank has."""
        return max(map(len, self.owned))

    @cached_property
    def is_one_each(self) -> bool:
        """Has every rank one branch?"""
        return all(len(own) == 1 for own in self.owned)

    def total(self, sums: Sequence[Tensor]) -> Tensor:
        """The sum of all, from those of the branches, rank by rank."""
        return tree_sum(self.tree, dict(zip(chain.from_iterable(self.owned), sums, strict=True)))


@lru_cache(maxsize=1024)
def branches(tree: Branch, stretch: Branch) -> tuple[Branch, ...]:
    """The largest branches of the tree that lie within the stretch."""
    if stretch[0] <= tree[0] and tree[1] <= stretch[1]:
        return (tree,) if tree[0] < tree[1] else ()
    if tree[1] <= stretch[0] or stretch[1] <= tree[0]:
        return ()
    left, right = _halves(tree)
    return *branches(left, stretch), *branches(right, stretch)


def tree_sum(tree: Branch, known: dict[Branch, Tensor]) -> Tensor:
    """The sum of a branch, from those that are known; they reach down far enough."""
    if tree in known:
        return known[tree]
    left, right = _halves(tree)
    return tree_sum(left, known) + tree_sum(right, known)


def _halves(tree: Branch) -> tuple[Branch, Branch]:
    middle = (tree[0] + tree[1]) // 2
    return (tree[0], middle), (middle, tree[1])


@final
class Growing:
    """Sums of the branches of a stretch, made while its leaves come, in order: only what is whole so far is there.

    A leaf is several tensors, all leaves have the same, and they are used up.
    """

    def __init__(self, order: Order, rank: int, dtype: torch.dtype, like: Sequence[Tensor] = ()) -> None:
        """Leaves are added as numbers of `dtype`; where none may come, `like` has what they would be like."""
        self.order, self.stretch, self.dtype, self.like = order, order.held[rank], dtype, like
        self.count = 0  # leaves that came
        self.came: Sequence[torch.dtype] = [t.dtype for t in like]  # the dtypes of their tensors
        self.sums: list[list[Tensor]] = []  # by branch

    def add(self, leaf: Sequence[Tensor]) -> None:
        """The next leaf; a branch that it makes whole takes the place of its parts."""
        self.count, self.came = self.count + 1, [t.dtype for t in leaf]
        self.sums.append([t.to(self.dtype) for t in leaf])
        begin = self.stretch[0]
        self._join(len(branches(self.order.tree, (begin, begin + self.count))))

    def total(self) -> list[Tensor]:
        """The sum of all leaves that came, row by row in memory as what has crossed is: products round by that."""
        if not self.sums:
            return [torch.zeros_like(t, dtype=self.dtype, memory_format=torch.contiguous_format) for t in self.like]
        self._join(1)
        return [t.contiguous() for t in self.sums[0]]

    def _join(self, most: int) -> None:
        """Down to so many sums: the halves of a branch that a leaf makes whole are the last two."""
        while len(self.sums) > most:
            last = self.sums.pop()
            torch._foreach_add_(self.sums[-1], last)
