"""The command line on several ranks: one of them speaks, and bad input ends all of them with the same code."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from torch_admm.cli import main
from torch_admm.data.sources import SOURCES, prepare

from .ranks import on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("h5py")
    path = tmp_path_factory.mktemp("data")
    prepare(SOURCES["digits"](), path)
    return path


def command(argv: list[str], full: int | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; the disk of rank `full` is full."""
    if full == int(os.environ["RANK"]):
        os.fsync = _no_space  # type: ignore[assignment]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def _no_space(descriptor: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def words(folder: Path, *more: object) -> list[str]:
    return ["train", "--data", "digits", "--data-dir", str(folder), "--epochs", "2", *map(str, more)]


def test_trains_and_saves_once(folder: Path, tmp_path: Path) -> None:
    argv = words(
        folder, "--net", "9", "--save", tmp_path / "model.pt", "--log", tmp_path / "run.jsonl", "--deterministic"
    )
    first, *others = on_ranks(3, command, argv)
    assert first[0] == 0, first
    assert "on 3 ranks" in first[1]
    assert [other[:2] for other in others] == [(0, "")] * 2
    assert json.loads((tmp_path / "model.json").read_text())["widths"] == [64, 9, 10]
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 3


def test_bad_input_is_one_sentence_of_rank_0(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    keeps = ["--method", "bregman", "--checkpoint", str(saved)]
    assert [code for code, _, _ in on_ranks(2, command, words(folder, "--net", "9", *keeps))] == [0, 0]
    cases: list[tuple[list[str], int | None, str]] = [
        (words(folder, "--net", "9", *keeps), None, "saved has checkpoints of a run already; resume=.auto. goes on"),
        (
            words(folder, "--net", "8", *keeps, "--resume", "auto"),
            None,
            "of another run: its net is 64-9-10, here it is 64-8-10",
        ),
        (
            words(folder, "--method", "bregman", "--checkpoint", tmp_path / "n"),
            1,
            "cannot be written: No space left on device",
        ),
        (words(folder, "--data-dir", tmp_path), None, "--data-dir is given twice"),
        (words(folder, "--resume", "auto"), None, "resume is 'auto', but there is no checkpoint"),
    ]
    for argv, full, match in cases:
        first, second = on_ranks(2, command, argv, full)
        assert (first[0], second[0]) == (2, 2), (first, second)
        assert re.search(match, first[2]), first
        assert second[1:] == ("", "")
    assert not list((tmp_path / "n").iterdir())
