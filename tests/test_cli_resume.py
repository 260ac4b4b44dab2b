"""`train` that goes on from checkpoints: on another number of ranks, and from an older one if the newest is damaged."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from torch_admm.cli import main

from .ranks import on_ranks
from .test_cli_ranks import command


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classes that are told apart at once: no later row is better than the first that has them all right."""
    hdf5 = pytest.importorskip("torch_admm.data.hdf5")
    path: Path = tmp_path_factory.mktemp("data") / "rows.h5"
    x = np.random.default_rng(0).standard_normal((80, 3)).astype(np.float32)
    x[:, 0] += np.where(np.arange(80) % 2, 5, -5)
    with hdf5.Writer(path, features=3, source="made up", classes=["no", "yes"]) as writer:
        writer.write(x, np.arange(80) % 2)
    return path


def words(data: Path, saved: Path, epochs: int, *more: object) -> list[str]:
    argv = ["train", "--data", data, "--net", 5, "--checkpoint", saved, "--epochs", epochs, "--resume", "auto", *more]
    return [str(word) for word in argv]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_shows_what_there_is_of_rows_of_different_runs(before: int, after: int, data: Path, tmp_path: Path) -> None:
    """The last row has no bytes where the best one has, or the reverse."""
    assert [end[0] for end in on_ranks(before, command, words(data, tmp_path / "saved", 8))] == [0] * before
    (code, out, err), *_ = on_ranks(after, command, words(data, tmp_path / "saved", 9, "--save", tmp_path / "model.pt"))
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    names, best, last = (next(row for row in rows if row[:1] == [word]) for word in ("sweep", "best", "last"))
    at = names.index("bytes_sent") + 1
    assert int(best[1]) < 9 == int(last[1])
    assert (best[at] == "-", last[at] == "-") == (before == 1, after == 1)
    assert out.endswith(f"saved {tmp_path}/model.pt and model.json\n")
    assert (tmp_path / "model.pt").exists()


def test_a_damaged_checkpoint_is_a_warning_on_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(data, tmp_path, 2)) == 0
    (tmp_path / "sweep-00000002" / "shared").write_bytes(b"")
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(words(data, tmp_path, 2)) == 0
    (line,) = capsys.readouterr().err.splitlines()
    newest, older = tmp_path / "sweep-00000002", tmp_path / "sweep-00000001"
    assert line == f"torch-admm: warning: {newest}/shared: damaged, it is empty; going on from {older}"
