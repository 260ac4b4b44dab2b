"""A fixed order of additions: floating-point sums then come out the same wherever their terms were made.

The terms 0..n-1 are the leaves of a binary tree that halves its range again and again. A rank that holds a stretch of
them adds up the largest whole branches within it; only these cross, and everybody adds them up by the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

__all__ = ["branches", "stretches", "tree_sum"]

Branch = tuple[int, int]  # of the leaves from .. to


def stretches(counts: Sequence[int]) -> list[Branch]:
    """The leaves of each rank, where the first has counts[0] of them, and so on."""
    ends = list(accumulate(counts))
    return [(end - count, end) for count, end in zip(counts, ends, strict=True)]


def branches(tree: Branch, stretch: Branch) -> list[Branch]:
    """The largest branches of the tree that lie within the stretch."""
    if stretch[0] <= tree[0] and tree[1] <= stretch[1]:
        return [tree] if tree[0] < tree[1] else []
    if tree[1] <= stretch[0] or stretch[1] <= tree[0]:
        return []
    left, right = _halves(tree)
    return [*branches(left, stretch), *branches(right, stretch)]


def tree_sum(tree: Branch, known: dict[Branch, Tensor]) -> Tensor:
    """The sum of a branch, from those that are known; they reach down far enough."""
    if tree in known:
        return known[tree]
    left, right = _halves(tree)
    return tree_sum(left, known) + tree_sum(right, known)


def _halves(tree: Branch) -> tuple[Branch, Branch]:
    middle = (tree[0] + tree[1]) // 2
    return (tree[0], middle), (middle, tree[1])
