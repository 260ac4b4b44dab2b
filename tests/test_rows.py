"""Rows of every kind: all of them once, in the same batches whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import torch_admm
from tests.files import writer
from torch_admm.data import AbstractRows, rows_of
from torch_admm.data.shards import SHARDS, Shards, share

RANKS = [1, 2, 3, 4, 5, 8, 24, 30]
PROBLEM = torch_admm.from_module(nn.Linear(3, 4), "cross_entropy")


def numbered(count: int) -> tuple[Tensor, Tensor]:
    """Rows that tell their number, in features and target alike."""
    number = torch.arange(count)
    return torch.stack([number, -number, number % 7], 1).float(), number % 4


class Items(Dataset[tuple[Tensor, int]]):
    """Of a map-style data set of somebody's own."""

    def __init__(self, count: int) -> None:
        """Numbered rows."""
        self.x, self.y = numbered(count)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], int(self.y[i])


def file_of(folder: Path, count: int, chunk_bytes: int = 12 * 32) -> Path:
    path = folder / f"{count}_{chunk_bytes}.h5"
    x, y = numbered(count)
    with writer(path, chunk_bytes=chunk_bytes) as out:
        out.write(x.numpy(), y.numpy())
    return path


KINDS: dict[str, Callable[[Path, int], Any]] = {
    "memory": lambda folder, count: numbered(count),
    "dataset": lambda folder, count: Items(count),
    "loader": lambda folder, count: DataLoader(Items(count), 100, shuffle=True),
    "file": file_of,
    "file of one chunk": lambda folder, count: file_of(folder, count, 1 << 20),
}


@pytest.fixture(params=KINDS)
def rows_like(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], AbstractRows]:
    return lambda count: rows_of(KINDS[request.param](tmp_path, count), PROBLEM)


def numbers(x: Tensor, y: Tensor) -> list[int]:
    """Which rows they are; both columns have to agree."""
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert (y == x[:, 0].long() % 4).all()
    assert (x[:, 1] == -x[:, 0]).all()
    return [int(i) for i in x[:, 0]]


def epoch_of(rows: AbstractRows, size: int, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    return [numbers(x, y) for x, y in rows.batches(size, seed, epoch)]


def joined(parts: list[AbstractRows], size: int, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    """The batches of all ranks, put together; every rank has to have as many."""
    batches = zip(*(epoch_of(part, size, seed, epoch) for part in parts), strict=True)
    return [[i for own in batch for i in own] for batch in batches]


# --- batches


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
@pytest.mark.parametrize("count", [1, 23, 24, 25, 997])
def test_every_row_comes_once_an_epoch(rows_like: Callable[[int], AbstractRows], count: int, size: int) -> None:
    rows = rows_like(count).part(0, 1)
    size = rows.batch_size or size
    batches = epoch_of(rows, size)
    assert [len(batch) for batch in batches] == [min(size, count - i) for i in range(0, count, size)]
    assert sorted(i for batch in batches for i in batch) == list(range(count))


@pytest.mark.parametrize("count", [10, 997])
def test_ranks_have_the_batches_of_one_process(rows_like: Callable[[int], AbstractRows], count: int) -> None:
    rows = rows_like(count)
    for size in (5, 100):
        alone = epoch_of(rows.part(0, 1), size, seed=3, epoch=2)
        of_more = epoch_of(rows.part(0, 1, shards=240), size, seed=3)
        for ranks in RANKS:
            together = joined([rows.part(rank, ranks) for rank in range(ranks)], size, seed=3, epoch=2)
            assert [len(batch) for batch in together] == [len(batch) for batch in alone]
            if ranks <= SHARDS:  # beyond, there are more shards
                assert together == alone
            assert joined([rows.part(rank, ranks, shards=240) for rank in range(ranks)], size, seed=3) == of_more
            assert sorted(i for batch in together for i in batch) == list(range(count))


def test_seeds_and_epochs_shuffle_otherwise_and_again_alike(rows_like: Callable[[int], AbstractRows]) -> None:
    rows = rows_like(997).part(0, 1)
    first, again, *others = (
        epoch_of(rows, 100, seed, epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0), (2**40, 0))
    )
    assert first == again
    assert all(first != other for other in others)
    assert first[0] != sorted(first[0])


def test_batches_are_from_all_over(rows_like: Callable[[int], AbstractRows]) -> None:
    """Rows that are sorted by anything give batches that are not: of 100 rows, 3 to 5 of each shard of 42."""
    for batch in epoch_of(rows_like(1008).part(0, 1), 100)[:-1]:
        counts = np.bincount(np.array(batch) // 42, minlength=24)
        assert {3, 4, 5} >= set(counts)


def test_small_batches_do_not_keep_to_a_few_shards() -> None:
    """With 8 rows a batch, three batches make a round of 24 shards; which go together has to change."""
    together = {frozenset(i // 100 for i in batch) for batch in epoch_of(rows_of(numbered(2400), PROBLEM), 8)}
    assert all(len(shards) == 8 for shards in together)
    assert len(together) == 300


def test_counts_tell_the_shards_of_each_batch_apart(rows_like: Callable[[int], AbstractRows]) -> None:
    for ranks in (1, 5, 30):
        for rank in range(ranks):
            part = rows_like(997).part(rank, ranks)
            borders = [share(997, i, part.split.number) for i in part.split.here]
            batches, counts = epoch_of(part, 100, 1, 4), list(part.batch_counts(100, 1, 4))
            assert [sum(count) for count in counts] == [*[100] * 9, 97]
            for batch, count in zip(batches, counts, strict=True):
                own = [sum(rows.start <= i < rows.stop for i in batch) for rows in borders]
                assert own == [count[i] for i in part.split.here]
                order = [next(k for k, rows in enumerate(borders) if rows.start <= i < rows.stop) for i in batch]
                assert order == sorted(order)


@pytest.mark.parametrize(("size", "shards"), [(n, 24) for n in (24, 36, 100, 256, 512, 1000, 2048)] + [(74, 72)])
def test_shards_and_their_neighbours_have_as_many_rows_of_a_batch(size: int, shards: int) -> None:
    """But for the last few batches: halves of the shards, quarters and so on differ by one row at most."""
    for counts in list(Shards(20 * size).part(0, 1, shards=shards).counts(size, 0, 0))[:-shards]:
        for together in (1, shards // 8, shards // 4, shards // 2):
            rows = {sum(counts[i : i + together]) for i in range(0, shards, together)}
            assert max(rows) - min(rows) <= 1


def test_shards_that_go_together_are_on_one_rank() -> None:
    parts = [Shards(997).part(rank, 3, together=6).here for rank in range(3)]
    assert parts == [range(6), range(6, 12), range(12, 24)]
    assert [Shards(997).part(rank, 3, together=12).here for rank in range(3)] == [range(0), range(12), range(12, 24)]
    with pytest.raises(AssertionError, match="groups of one size"):
        Shards(997).part(0, 3, together=5)


# --- parts and shards


def _shards(part: AbstractRows) -> list[tuple[int, AbstractRows]]:
    """Each with its number among those of all ranks."""
    return [(i, part.stretch(rows)) for i, rows in zip(part.split.here, part.split.local(), strict=True)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("count", [3, 997])
def test_parts_are_runs_of_whole_shards(rows_like: Callable[[int], AbstractRows], count: int, ranks: int) -> None:
    parts = [rows_like(count).part(rank, ranks) for rank in range(ranks)]
    assert {part.total for part in parts} == {count}
    assert sum(part.count for part in parts) == count
    seen: list[int] = []
    shards: list[int] = []
    for part in parts:
        assert part.first == len(seen) or not part.count
        own = [i for chunk in part.chunks(10) for i in numbers(chunk.x, chunk.y)]
        assert len(own) == part.count
        by_shard = [[i for chunk in shard.chunks(4) for i in numbers(chunk.x, chunk.y)] for _, shard in _shards(part)]
        assert [i for shard in by_shard for i in shard] == own
        shards += [i for i, _ in _shards(part)]
        seen += own
    assert seen == list(range(count))
    assert shards == list(range(max(SHARDS, ranks)))


def test_the_shards_of_all_ranks_are_those_of_one(rows_like: Callable[[int], AbstractRows]) -> None:
    def shards(parts: Iterator[AbstractRows]) -> dict[int, list[int]]:
        each = ((i, shard) for part in parts for i, shard in _shards(part))
        return {i: [n for c in shard.chunks(50) for n in numbers(c.x, c.y)] for i, shard in each}

    rows = rows_like(997)
    alone = shards(iter([rows]))
    assert all(shards(rows.part(rank, ranks) for rank in range(ranks)) == alone for ranks in (2, 5, 24))


def test_more_ranks_than_rows(rows_like: Callable[[int], AbstractRows]) -> None:
    parts = [rows_like(3).part(rank, 30) for rank in range(30)]
    assert sorted(part.count for part in parts) == [0] * 27 + [1] * 3
    empty = next(part for part in parts if not part.count)
    assert list(empty.chunks(5)) == []
    (batch,) = empty.batches(100, 0, 0)
    assert [tuple(t.shape) for t in batch] == [(0, 3), (0,)]
    assert numbers(*batch) == []


def test_a_part_of_a_validation_split(rows_like: Callable[[int], AbstractRows]) -> None:
    """Held out first, shared out afterwards: the batches of ranks are again those of one process."""
    kept, held = rows_like(997).parted(97, seed=5)
    out = [i for chunk in held.chunks(50) for i in numbers(chunk.x, chunk.y)]
    assert (kept.total, kept.count, len(set(out))) == (900, 900, 97)
    alone = epoch_of(kept.part(0, 1), 100)
    assert sorted([i for batch in alone for i in batch] + out) == list(range(997))
    assert joined([kept.part(rank, 5) for rank in range(5)], 100) == alone


def test_rows_are_held_out_at_other_places_of_every_chunk(tmp_path: Path) -> None:
    """A file of 32 rows a chunk, half of them held out: data with a period of 32 rows must not notice."""
    _, held = rows_of(file_of(tmp_path, 320), PROBLEM).parted(160, seed=5)
    out = [i for chunk in held.chunks(50) for i in numbers(chunk.x, chunk.y)]
    places = {tuple(i % 32 for i in out if i // 32 == chunk) for chunk in range(10)}
    assert len(places) == 10
    assert {len(some) for some in places} == {16}


def test_a_stretch_is_data_of_its_own(rows_like: Callable[[int], AbstractRows]) -> None:
    part = rows_like(997).part(1, 2).stretch(slice(10, 60))
    assert (part.count, part.total, part.first) == (50, 50, 997 * 12 // 24 + 10)
    assert sorted(i for batch in epoch_of(part, 7) for i in batch) == list(range(508, 558))


# --- loaders


def test_a_loader_as_it_is_and_in_parts() -> None:
    """Its own batches alone; in parts those by seed, or in order if it does not shuffle."""
    plain = rows_of(DataLoader(Items(250), 100), PROBLEM)
    alone = epoch_of(plain, 7)
    assert alone == [list(range(100)), list(range(100, 200)), list(range(200, 250))]
    for ranks in (1, 3, 24):
        assert joined([plain.part(rank, ranks) for rank in range(ranks)], 7) == alone
    assert next(plain.part(0, 1).batch_counts(7, 0, 0)) == [10, 10, 11, 10, 11, 10, 10, 11, 10, 7, *[0] * 14]
    mixed = rows_of(DataLoader(Items(250), 100, shuffle=True, generator=torch.Generator().manual_seed(0)), PROBLEM)
    assert epoch_of(mixed, 7) != epoch_of(mixed, 7)
    with pytest.raises(AssertionError, match="the batches of a loader are its own"):
        mixed.batch_counts(7, 0, 0)


def test_a_part_of_a_loader_collates_as_the_loader_does() -> None:
    """Items that only the user's own function can put together."""

    def collate(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        return torch.stack([-x for x, _ in items]), torch.tensor([y for _, y in items])

    rows = rows_of(DataLoader(Items(50), 10, collate_fn=collate), PROBLEM)
    whole = torch.cat([x for x, _ in rows.batches(10, 0, 0)])
    assert torch.equal(whole, -numbered(50)[0])
    assert torch.equal(torch.cat([chunk.x for chunk in rows.chunks(7)]), whole)
    parts = [rows.part(rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([chunk.x for part in parts for chunk in part.chunks(7)]), whole)


# --- the plan


@pytest.mark.parametrize("at_once", [1, 50, 1 << 16])
def test_a_plan_does_not_depend_on_how_much_of_it_is_made_at_once(at_once: int) -> None:
    for total, size in ((1003, 5), (1003, 23), (1003, 24), (1003, 170), (5, 2), (1, 1)):
        plans = [list(Shards(total).cuts(size, 3, 1, rows)) for rows in (at_once, 400)]
        lines, others = (np.concatenate([blocks[0][:1], *(block[1:] for block in blocks)]) for blocks in plans)
        np.testing.assert_array_equal(lines, others)
        assert (np.diff(lines, axis=0) >= 0).all()
        assert lines[-1].tolist() == [rows.stop - rows.start for rows in Shards(total).local()]
        assert lines.sum(1).tolist() == [*range(0, total, size), total]


def test_rows_are_shared_out_once() -> None:
    with pytest.raises(AssertionError, match="shared out once"):
        rows_of(numbered(100), PROBLEM).part(1, 2).part(0, 2)
