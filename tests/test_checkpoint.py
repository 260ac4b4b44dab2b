"""Folders of checkpoints: whole or not there, nothing odd is taken up, and any number of ranks can read them."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from torch_admm import container
from torch_admm.checkpoint import Checkpoints, Span
from torch_admm.comm import Solo
from torch_admm.errors import CheckpointError

from .helpers import same
from .ranks import in_group, on_ranks

SPAN = Span(0, 5, 5)
ABOUT = {"model": "4-8-1", "seed": "0"}


def _checkpoints(folder: Path, keep: int = 2, **about: str) -> Checkpoints:
    return Checkpoints(folder, Solo(), ABOUT | about, keep)


def _save(to: Checkpoints, sweep: int, other: Mapping[str, Any] = MappingProxyType({})) -> None:
    row = {"sweep": sweep, "seconds": 0.5, "loss": 1.0}
    shared = {"sweep": sweep, "bytes_sent": 0, "history": [row], "best": row, "best_weights": {1: torch.ones(3)}}
    shared |= {"seconds": 0.5, "monitor": "loss", "method": {"W": torch.full((3,), sweep)}}
    to.save(sweep, shared | dict(other), {"z": torch.arange(5.0) + sweep}, SPAN)


def _loaded(folder: Path, span: Span = SPAN) -> Any:
    with _checkpoints(folder) as saved:
        state = saved.load(span)
    assert state is not None
    assert same(state["method"]["W"], torch.full((3,), state["sweep"]))
    assert same(state["method"]["z"], torch.arange(5.0)[span.first : span.first + span.count] + state["sweep"])
    return state["sweep"]


def test_keeps_the_last_and_reads_the_newest(tmp_path: Path) -> None:
    saved = _checkpoints(tmp_path / "a" / "b", keep=3)
    assert saved.load(SPAN) is None
    for sweep in (2, 4, 100, 1000):
        _save(saved, sweep)
    assert [p.name for p in saved.there()] == ["sweep-00001000", "sweep-00000100", "sweep-00000004"]
    assert _loaded(tmp_path / "a" / "b") == 1000


@pytest.mark.parametrize("name", ["shared", "rows-0-5"])
def test_a_damaged_newest_falls_back_and_a_damaged_only_one_is_an_error(name: str, tmp_path: Path) -> None:
    saved = _checkpoints(tmp_path)
    _save(saved, 1)
    _save(saved, 2)
    _damage(tmp_path / "sweep-00000002" / name)
    with pytest.warns(RuntimeWarning, match=rf"sweep-00000002/{name}: damaged, .*; going on from .*sweep-00000001"):
        assert _loaded(tmp_path) == 1
    _save(saved, 2)  # takes the place of the damaged one
    assert _loaded(tmp_path) == 2
    for sweep in (1, 2):
        _damage(tmp_path / f"sweep-0000000{sweep}" / name)
    both = f"sweep-00000002/{name}: damaged, its checksum does not match; .*sweep-00000001/{name}: damaged"
    with pytest.raises(CheckpointError, match=both):
        _checkpoints(tmp_path).load(SPAN)


def _damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def test_a_checkpoint_of_another_run_is_named(tmp_path: Path) -> None:
    _save(_checkpoints(tmp_path), 1)
    _save(_checkpoints(tmp_path), 2)
    with pytest.raises(
        CheckpointError, match="sweep-00000002 is of another run: model was 4-8-1 when it was saved, and is 4-9-1 now"
    ):
        _checkpoints(tmp_path, model="4-9-1").load(SPAN)


def test_rows_are_found_whoever_had_them(tmp_path: Path) -> None:
    _save(_checkpoints(tmp_path), 7)
    folder = tmp_path / "sweep-00000007"
    (folder / "rows-0-5").unlink()
    token = container.read(folder / "shared")["token"]
    for first, end in ((0, 2), (2, 3), (3, 5)):
        by_row = {"z": torch.arange(5.0)[first:end] + 7}
        container.write(folder / f"rows-{first}-{end}", {"token": token, "by_row": by_row})
    for first in range(6):
        for count in range(6 - first):
            assert _loaded(tmp_path, Span(first, count, 5)) == 7
    (folder / "rows-2-3").unlink()
    with pytest.raises(CheckpointError, match="the state of some of its 5 rows is missing"):
        _checkpoints(tmp_path).load(SPAN)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = _checkpoints(tmp_path)
    _save(saved, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="shared: cannot be written: No space left on device"):
            _save(saved, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["sweep-00000001"]
    assert _loaded(tmp_path) == 1


DEADLY = ("fsync", "rename", "mkdir", "rmdir", "unlink", "open")


def _die_at(folder: Path, moment: int) -> None:
    """Save again and again, and be killed before the so-manieth call that touches the disk."""
    saved, left = _checkpoints(folder), [moment]

    def deadly(call: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in DEADLY:
        setattr(os, name, deadly(getattr(os, name)))
    for sweep in range(3, 6):
        _save(saved, sweep)


def test_killed_at_any_call_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    seen = set()
    for moment in range(0, 60, 3):
        folder = tmp_path / str(moment)
        saved = _checkpoints(folder)
        _save(saved, 1)
        _save(saved, 2)
        (end,) = on_ranks(1, _die_at, folder, moment)
        assert end in (-signal.SIGKILL, None)
        seen.add(_loaded(folder))
        assert not list(folder.glob("*.part"))
        if end is None:
            break
    assert {2, 3, 4, 5} == seen


def test_what_has_other_names_is_left_alone(tmp_path: Path) -> None:
    strays = ["notes", "sweep-7", "sweep-0000000x", "sweep-00000003.bak", "x.part", "sweep-00000009.part.tar"]
    for name in strays:
        (tmp_path / name).mkdir()
    saved = _checkpoints(tmp_path, keep=1)
    assert saved.load(SPAN) is None
    for sweep in (99_999_999, 100_000_000):  # in the order of numbers, not of letters
        _save(saved, sweep)
        assert _loaded(tmp_path) == sweep
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*strays, "sweep-100000000"])


def test_what_is_above_the_newest_good_one_goes_and_does_not_count(tmp_path: Path) -> None:
    saved = _checkpoints(tmp_path)
    for sweep in (3, 4):
        _save(saved, sweep)
    for sweep in (6, 7, 8):
        (tmp_path / f"sweep-0000000{sweep}").mkdir()
    with pytest.warns(RuntimeWarning, match="sweep-00000008.*sweep-00000007.*sweep-00000006.*going on from .*00000004"):
        assert _loaded(tmp_path) == 4
    _save(saved, 5)
    assert [p.name for p in saved.there()] == ["sweep-00000005", "sweep-00000004"]


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_takes_the_place_of_what_is_no_folder(kind: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    for name in ("sweep-00000002", "sweep-00000002.part"):
        if kind == "file":
            (tmp_path / name).touch()
        else:
            (tmp_path / name).symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    _save(_checkpoints(tmp_path), 2)
    assert _loaded(tmp_path) == 2
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write checkpoints to .*/file: File exists"):
        _checkpoints(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoints to .*/file/within: Not a directory"):
        _checkpoints(tmp_path / "file" / "within")
    saved = _checkpoints(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointError, match=r"cannot write checkpoints to .*/gone: No such file or directory"):
        _save(saved, 1)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("checkpoints", None, "has 'checkpoints', which no checkpoint has"),
        ("sweep", -1, "its sweep makes no sense"),
        ("sweep", True, "its sweep makes no sense"),
        ("bytes_sent", "many", "its bytes_sent makes no sense"),
        ("seconds", 1, "its seconds makes no sense"),
        ("history", [{"sweep": 1}], "its history makes no sense"),
        ("history", [{"sweep": 1, "seconds": "two"}], "its history makes no sense"),
        ("best", [], "its best makes no sense"),
        ("best_weights", {1: 3}, "its best_weights makes no sense"),
        ("method", [], "its method makes no sense"),
        ("monitor", "accuracy", "its best row has no accuracy"),
    ],
)
def test_odd_content_is_passed_over_like_damage(name: str, value: Any, match: str, tmp_path: Path) -> None:
    saved = _checkpoints(tmp_path)
    _save(saved, 1)
    _save(saved, 2, {name: value})
    with pytest.warns(RuntimeWarning, match=f"sweep-00000002/shared: {match}; going on from .*sweep-00000001"):
        assert _loaded(tmp_path) == 1


def test_a_file_of_something_else_is_passed_over(tmp_path: Path) -> None:
    saved = _checkpoints(tmp_path)
    for sweep in (1, 2):
        _save(saved, sweep)
    for content, match in ((["a list"], "is not the state of a run"), ({"sweep": 2}, "has no bytes_sent")):
        (tmp_path / "sweep-00000002" / "shared").unlink()
        container.write(tmp_path / "sweep-00000002" / "shared", content)
        with pytest.warns(RuntimeWarning, match=f"shared: {match}; going on from"):
            assert _loaded(tmp_path) == 1


def test_a_file_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    saved = _checkpoints(tmp_path)
    for sweep in (1, 2):
        _save(saved, sweep)
    one, two = (tmp_path / f"sweep-0000000{n}" / "rows-0-5" for n in (1, 2))
    two.write_bytes(one.read_bytes())
    with pytest.warns(RuntimeWarning, match="sweep-00000002/rows-0-5 belongs to another checkpoint; going on from"):
        assert _loaded(tmp_path) == 1


@pytest.mark.parametrize("by_row", [{"z": torch.zeros(4)}, {"z": 3}, {"z": torch.tensor(1.0)}, []])
def test_a_file_of_other_rows_than_its_name_says_is_noticed(by_row: Any, tmp_path: Path) -> None:
    _save(_checkpoints(tmp_path), 1)
    folder = tmp_path / "sweep-00000001"
    (folder / "rows-0-5").unlink()
    container.write(folder / "rows-0-5", {"token": container.read(folder / "shared")["token"], "by_row": by_row})
    with pytest.raises(CheckpointError, match="rows-0-5: it does not have the state of 5 rows"):
        _checkpoints(tmp_path).load(SPAN)


def test_files_of_rows_that_do_not_go_together(tmp_path: Path) -> None:
    _save(_checkpoints(tmp_path), 1)
    folder = tmp_path / "sweep-00000001"
    (folder / "rows-0-5").unlink()
    token = container.read(folder / "shared")["token"]
    for file, name in (("rows-0-3", "z"), ("rows-3-5", "a")):
        count = 3 if name == "z" else 2
        container.write(folder / file, {"token": token, "by_row": {name: torch.zeros(count)}})
    with pytest.raises(CheckpointError, match="sweep-00000001: its files of rows do not go together: 'z'"):
        _checkpoints(tmp_path).load(SPAN)


def test_one_by_a_later_version_is_refused_not_aged_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = _checkpoints(tmp_path)
    _save(saved, 1)
    with monkeypatch.context() as patch:
        patch.setattr(container, "VERSION", 2)
        _save(saved, 2)
    with pytest.raises(CheckpointError, match=r"sweep-00000002 is of another torch_admm: .*version 2 of the format"):
        _checkpoints(tmp_path).load(SPAN)


def _apart(ranks: Any, folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        _save(Checkpoints(folder / str(ranks.rank), ranks, ABOUT), 1)
    return str(caught.value)


def test_ranks_that_see_different_folders_are_told(tmp_path: Path) -> None:
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    said = f"{tmp_path}/1 on this rank is not the folder that rank 0 sees; all ranks need one shared folder"
    assert on_ranks(2, in_group, _apart, tmp_path) == [f"rank 1: {said}", said]
    assert not list((tmp_path / "0").iterdir())


def test_every_name_of_a_run_must_be_there(tmp_path: Path) -> None:
    _save(_checkpoints(tmp_path, net="4-8-1"), 1)
    with pytest.raises(CheckpointError, match="is of another run: net was 4-8-1 when it was saved, and is not set now"):
        _checkpoints(tmp_path).load(SPAN)
