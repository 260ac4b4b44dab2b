"""The command line on several ranks: one of them speaks, and bad input ends all of them with the same code."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torch_admm.cli import main
from torch_admm.comm import Group
from torch_admm.data.hdf5 import Writer
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


def stuck(argv: list[str], culprit: int) -> tuple[int, str, str]:
    """The command, in which one rank is stuck for a while before its so-manieth message."""
    seen, tried = [0], Group._tried

    def delayed(*args: Any) -> Any:
        seen[0] += 1
        if seen[0] == 40 and int(os.environ["RANK"]) == culprit:
            time.sleep(7)
        return tried(*args)

    Group._tried = delayed  # type: ignore[method-assign, assignment]
    return command(argv)


def without_mpi(argv: list[str]) -> tuple[int, str, str]:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    return command(argv)


def _no_space(descriptor: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def words(folder: Path, *more: object) -> list[str]:
    return ["train", "--data", "digits", "--data-dir", str(folder), "--epochs", "2", *map(str, more)]


def test_trains_and_saves_once(folder: Path, tmp_path: Path) -> None:
    argv = words(
        folder, "--net", "9", "--save", tmp_path / "model.pt", "--history", tmp_path / "run.jsonl", "--deterministic"
    )
    first, *others = on_ranks(3, command, argv)
    assert first[0] == 0, first
    assert "on 3 ranks" in first[1]
    assert re.search(r"bytes_sent .*\nbest +[12] +\d+\.\d+ +\d+ ", first[1]), first[1]
    assert [other[:2] for other in others] == [(0, "")] * 2
    assert json.loads((tmp_path / "model.json").read_text())["widths"] == [64, 9, 10]
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 3


def test_bad_input_is_one_sentence_of_rank_0(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    keeps = ["--method", "bregman", "--checkpoint", str(saved)]
    assert [code for code, _, _ in on_ranks(2, command, words(folder, "--net", "9", *keeps))] == [0, 0]
    cases: list[tuple[list[str], int | None, str]] = [
        (
            words(folder, "--net", "9", *keeps),
            None,
            "saved has checkpoints of a run already; resume=.auto. .--resume auto. resumes",
        ),
        (
            words(folder, "--net", "8", *keeps, "--resume", "auto"),
            None,
            "of another run: net was 64-9-10 when it was saved, and is 64-8-10 now",
        ),
        (
            words(folder, "--method", "bregman", "--checkpoint", tmp_path / "n"),
            1,
            "cannot be written: No space left on device",
        ),
        (
            words(folder, "--method", "bregman", "--checkpoint", tmp_path / "n"),
            0,
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


def _few(path: Path) -> Path:
    """A file of two rows."""
    with Writer(path, features=3, source="made up", classes=["no", "yes"]) as writer:
        writer.write(np.eye(2, 3, dtype=np.float32), np.arange(2))
    return path


def test_ranks_that_cannot_start_say_so_once(folder: Path, tmp_path: Path) -> None:
    """A port that somebody else has, a host without address, no MPI, more ranks than rows, one that is stuck."""
    short, mpi = words(folder, "--timeout", "0.05"), ["--backend", "mpi"]
    few = ["train", "--data", str(_few(tmp_path / "few.h5")), "--net", "4"]
    nowhere = {"MASTER_ADDR": "no.invalid"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases: list[tuple[str, list[Any]]] = [
            (f"port {port} is taken on 127.0.0.1", on_ranks(3, command, short, env={"MASTER_PORT": port})),
            ("MASTER_ADDR is 'no.invalid', which cannot be resolved", on_ranks(3, command, short, env=nowhere)),
            ('backend "mpi" needs mpi4py and an MPI library', on_ranks(3, without_mpi, [*short, *mpi])),
            ("few.h5 has 2 rows, fewer than the 3 ranks; start at most 2", on_ranks(3, command, few)),
            ("rank 1 is missing (it ended or is stuck); rank 0 reports", on_ranks(3, stuck, short, 1)),
        ]
    for match, (first, second, third) in cases:
        assert (first[0], second[0], third[0]) == (2, 2, 2), (first, second, third)
        assert match in first[2]
        assert first[2].count("\n") == 1, first
        assert third[2] == "", (first, third)
        assert second[2] == "" or "is stuck" in match, (first, second)  # who was stuck finds the others gone
