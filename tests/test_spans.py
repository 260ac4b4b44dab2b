"""How rows of leaves lie, and which are looked at."""

from __future__ import annotations

import pytest
import torch

from torch_admm.spans import ROWS, START, Spans, looked_at

from .helpers import rng

CPU = torch.device("cpu")


@pytest.mark.parametrize("counts", [[], [0], [1], [32, 32], [5, 0, 3], [30, 31, 33], [64, 64, 64]])
def test_aligned_leaves_start_and_end_where_they_should(counts: list[int]) -> None:
    spans, rows = Spans(counts, aligned=True), torch.arange(1.0, sum(counts) + 1).unsqueeze(1)
    starts = [sum(spans.sizes[:i]) for i in range(len(counts))]
    assert all(start % START == 0 for start in starts)
    assert spans.rows % ROWS == 0
    laid = spans.laid_out(rows)
    assert len(laid) == (spans.rows if len(rows) else 0)
    assert (laid is rows) == (spans.whole or not len(rows))
    if len(rows):
        assert [part.flatten().tolist() for part in spans.parts(laid)] == [
            part.flatten().tolist() for part in rows.split(counts)
        ]


@pytest.mark.parametrize("count", [5, 32])
def test_leaves_that_are_alike_can_be_had_at_once(count: int) -> None:
    spans, rows = Spans([count] * 3, aligned=True), torch.randn(3 * count, 2, generator=rng(0))
    assert spans.alike
    assert not Spans([count, count + 1], aligned=True).alike
    assert torch.equal(spans.stacked(spans.laid_out(rows)), rows.view(3, count, 2))


def test_leaves_that_need_not_be_aligned_lie_as_they_came() -> None:
    spans, rows = Spans([3, 5]), torch.randn(8, 2, generator=rng(0))
    assert spans.laid_out(rows) is rows
    assert spans.sizes == [3, 5]


@pytest.mark.parametrize("aligned", [False, True])
def test_sums_and_products_are_those_of_each_leaf(aligned: bool) -> None:
    counts = [3, 0, 6]
    spans, rows = Spans(counts, aligned=aligned), torch.randn(9, 4, generator=rng(0))
    laid = spans.laid_out(rows)
    for i, part in enumerate(rows.split(counts)):
        torch.testing.assert_close(spans.sums(laid)[i], part.sum(0))
        torch.testing.assert_close(spans.products(laid[:, :2], laid)[i], part[:, :2].T @ part)


@pytest.mark.parametrize(
    ("counts", "rows", "expected"),
    [
        ([100], 100, [*range(100)]),  # few rows: all of them
        ([512], 512, [*range(128)]),
        ([2048], 2048, [*range(512)]),  # many: a quarter
        ([12, 8], 1024, [0, 1, 2, 12, 13]),  # the same share of each shard
        ([1, 0, 2], 4096, [0, 1]),  # but at least one row
    ],
)
def test_which_rows_of_a_batch_are_looked_at(counts: list[int], rows: int, expected: list[int]) -> None:
    looked = looked_at(counts, Spans([sum(counts)]), rows, CPU)
    assert looked.which is not None
    assert looked.which.tolist() == expected
    assert looked.spans.counts == [len(expected)]


@pytest.mark.parametrize("counts", [[], [7, 8, 9, 9], [0, 0, 40, 41], [3, 0, 0, 0], [32] * 4])
def test_aligned_leaves_are_looked_at_where_they_lie(counts: list[int]) -> None:
    """Two shards a leaf; of each, half the rows."""
    rows = torch.arange(sum(counts), dtype=torch.float32).unsqueeze(1)
    spans = Spans([sum(counts[i : i + 2]) for i in range(0, len(counts), 2)], aligned=True)
    looked = looked_at(counts, spans, 256, CPU)
    assert looked.which is not None
    assert len(looked.which) == looked.spans.rows
    assert looked.spans.aligned
    expected = [part[: -(-len(part) // 2)].flatten().tolist() for part in rows.split(counts)]
    if len(rows):
        found = [part.flatten().tolist() for part in looked.spans.parts(looked.of(spans.laid_out(rows)))]
        assert found == [a + b for a, b in zip(expected[::2], expected[1::2], strict=True)]
