"""Preparing: once, whole or not at all, whatever comes in between; and what a prepared folder is good for."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import pytest
from scipy.io import savemat

from tests.commands import command, wait_for
from torch_admm.data import hdf5, writer
from torch_admm.data.sources import SOURCES, AbstractSource, Block, Contents, option, prepare, prepared
from torch_admm.data.sources.base import Obtain
from torch_admm.data.sources.digits import Digits
from torch_admm.data.sources.synthetic import Synthetic, rule
from torch_admm.errors import DataError

SMALL = Synthetic(rows=3000, test_rows=200)


# --- the sources that need no file


def test_digits(tmp_path: Path) -> None:
    done = prepare(Digits(), tmp_path)
    assert (done.train.rows, done.test.rows, done.train.features) == (1347, 450, 64)
    x, _ = hdf5.read(done.parts.train)
    assert (x.min(), x.max()) == (0, 1)
    assert prepared("digits", tmp_path) == done.parts


def test_synthetic_rows_are_by_seed_and_row_only(tmp_path: Path) -> None:
    (x, y), (more_x, more_y) = (
        hdf5.read(prepare(Synthetic(rows=n, test_rows=10), tmp_path, name=str(n)).parts.train) for n in (3000, 70_000)
    )
    np.testing.assert_array_equal(x, more_x[:3000])
    np.testing.assert_array_equal(y, more_y[:3000])
    other = hdf5.read(prepare(Synthetic(rows=3000, test_rows=10, seed=1), tmp_path, name="b").parts.train)[0]
    assert (x != other).all()
    assert len(np.unique(more_x[:, 0])) > 69_000


def test_synthetic_classes_follow_the_rule_as_well_as_its_summary_says(tmp_path: Path) -> None:
    x, y = Synthetic().block(0, 0, 60_000)
    assert np.mean((rule(x) > 0) == y) == pytest.approx(0.85, abs=0.005)
    linear = np.linalg.lstsq(x, 2.0 * y - 1, rcond=None)[0]
    assert np.mean((x @ linear > 0) == y) == pytest.approx(0.79, abs=0.005)


@pytest.mark.parametrize("name", ["rows", "test_rows", "seed"])
def test_bad_numbers_for_synthetic(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=f"--{name.replace('_', '-')} is -1; a whole number of at least"):
        prepare(Synthetic(**{name: -1}), tmp_path)


# --- once


def test_a_second_run_does_nothing_and_another_recipe_asks_first(tmp_path: Path) -> None:
    first = prepare(SMALL, tmp_path)
    before = first.parts.train.stat()
    second = prepare(SMALL, tmp_path)
    assert (first.written, second.written) == (True, False)
    assert first.parts.train.stat() == before
    other = Synthetic(rows=2000, test_rows=200)
    with pytest.raises(DataError, match=r"train.h5 was prepared otherwise: rows 3000 then, 2000 now. --force replaces"):
        prepare(other, tmp_path)
    assert first.parts.train.stat() == before
    assert prepare(other, tmp_path, force=True).train.rows == 2000
    with pytest.raises(DataError, match=r"otherwise: storage float32 then, float16 now"):
        prepare(other, tmp_path, dtype="float16")
    assert prepare(other, tmp_path, name="half", dtype="float16").train.dtype == "float16"


@final
@dataclass(frozen=True)
class Lines(AbstractSource):
    """One number a line."""

    name: ClassVar[str] = "lines"
    summary: ClassVar[str] = "for the tests"
    jobs: int = option(1, "does not matter", recipe=False)

    def files(self, folder: Path, obtain: Obtain) -> tuple[Path, ...]:
        return (folder / "lines.txt",)

    def open(self, files: tuple[Path, ...]) -> Contents:
        return Contents(1, None, self.blocks(np.loadtxt(files[0], ndmin=2)))

    def blocks(self, x: Any) -> Iterator[Block]:
        yield Block("train", x, x[:, 0], 0.5)
        yield Block("test", x, x[:, 0], 1.0)


def test_the_recipe_knows_the_contents_of_files_and_not_their_times(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("1\n2\n", encoding="utf-8")
    assert prepare(Lines(), tmp_path).written
    os.utime(path, (1, 1))
    assert not prepare(Lines(jobs=2), tmp_path).written
    path.write_text("1\n3\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"prepared otherwise: files .*'sha256'"):
        prepare(Lines(), tmp_path)


def test_a_missing_half_is_made_again_and_a_foreign_one_is_not_used(tmp_path: Path) -> None:
    parts = prepare(SMALL, tmp_path).parts
    parts.test.unlink()
    with pytest.raises(DataError, match=r"test.h5 does not exist; prepare it first: python -m torch_admm data prepare"):
        prepared("synthetic", tmp_path)
    assert prepare(SMALL, tmp_path).written
    other = prepare(Synthetic(rows=2000, test_rows=200), tmp_path, name="other").parts
    other.train.replace(parts.train)
    with pytest.raises(DataError, match=r"train.h5 and test.h5 beside it were not prepared together; prepare them"):
        prepared("synthetic", tmp_path)


def test_a_file_by_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits/train.h5").write_bytes(b"something")
    with pytest.raises(DataError, match=r"digits/train.h5"):
        prepare(Digits(), tmp_path)
    assert (tmp_path / "digits/train.h5").read_bytes() == b"something"
    with hdf5.Writer(tmp_path / "digits/train.h5", features=1, source="me", classes=None) as file:
        file.write(np.zeros((2, 1), np.float32), np.zeros(2, np.float32))
    with pytest.raises(DataError, match=r"train.h5 was prepared otherwise: it carries no recipe. --force"):
        prepare(Digits(), tmp_path)
    assert prepare(Digits(), tmp_path, force=True).train.rows == 1347


def test_what_is_not_prepared_says_the_command(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"higgs/train.h5 does not exist; .*: python -m torch_admm data prepare higgs --"
    ):
        prepared("higgs", tmp_path)
    with pytest.raises(DataError, match=r"data prepare csv ... --as mine --data-dir \S+ \(sources are digits, .*csv\)"):
        prepared("mine", tmp_path)


def test_the_registry_has_what_is_promised() -> None:
    assert set(SOURCES) == {"higgs", "svhn", "mnist", "fashion-mnist", "cifar10", "digits", "csv", "synthetic"}


# --- whole or not at all


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_an_error_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Synthetic.block

    def failing(self: Synthetic, part: int, start: int, rows: int) -> Any:
        if part == 1:
            raise DataError("the raw file ends here")
        return real(self, part, start, rows)

    monkeypatch.setattr(Synthetic, "block", failing)
    with pytest.raises(DataError, match="the raw file ends here"):
        prepare(SMALL, tmp_path)
    assert files_in(tmp_path) == []


def test_an_error_leaves_the_older_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = prepare(SMALL, tmp_path).parts
    before = hdf5.read(parts.train)[0]
    monkeypatch.setattr(Synthetic, "block", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(Synthetic(rows=2000), tmp_path, force=True)
    np.testing.assert_array_equal(hdf5.read(parts.train)[0], before)
    assert files_in(tmp_path) == ["test.h5", "train.h5"]


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    monkeypatch.setattr(writer.Writer, "_flush", full)
    with pytest.raises(OSError, match="No space left on device"):
        prepare(SMALL, tmp_path)
    assert files_in(tmp_path) == []


SYNTHETIC = ["data", "prepare", "synthetic", "--test-rows", "1000", "--data-dir"]


def test_a_file_size_limit_in_a_real_process(tmp_path: Path) -> None:
    """The nearest thing to a full disk that needs no rights: writes beyond 4 MB fail with EFBIG."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20));"
        "from torch_admm.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, *SYNTHETIC, str(tmp_path), "--rows", "200000"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "train.h5" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(("blow", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_process_that_is_stopped_in_the_middle(tmp_path: Path, blow: signal.Signals, code: int) -> None:
    words = command(*SYNTHETIC, tmp_path, "--rows", 100_000_000)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(tmp_path / "synthetic/train.h5.part", 1 << 20, process)
            process.send_signal(blow)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    left = files_in(tmp_path)
    assert left == ([] if blow == signal.SIGINT else ["test.h5.part", "train.h5.part"])
    with pytest.raises(DataError, match="does not exist"):
        prepared("synthetic", tmp_path)
    assert prepare(SMALL, tmp_path).written
    assert files_in(tmp_path) == ["test.h5", "train.h5"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are looked up in /proc")
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent_however_it_ends(tmp_path: Path, blow: signal.Signals) -> None:
    random = np.random.default_rng(0)
    content = {"X": random.integers(0, 256, (32, 32, 3, 20_000), dtype=np.uint8), "y": np.arange(20_000) % 2 + 1}
    for name in ("train", "test"):
        savemat(tmp_path / f"{name}_32x32.mat", content)
    words = command("data", "prepare", "svhn", "--digits", 1, 2, "--workers", 2, "--data-dir", tmp_path)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(tmp_path / "svhn/train.h5.part", 1 << 20, process)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
            process.send_signal(blow)
            _, errors = process.communicate(timeout=60)  # until they have all let go of stderr
        finally:
            process.kill()
    assert len(children) == 2
    assert "Traceback" not in errors
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(tmp_path.rglob("*.h5"))
