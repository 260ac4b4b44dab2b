"""Files of checkpoints: whole or not there, every flipped byte noticed, and any number of ranks can read them."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_admm import container
from torch_admm.checkpoint import Checkpoints, Span
from torch_admm.comm import Solo
from torch_admm.errors import CheckpointError

from .helpers import rng
from .ranks import on_ranks

CONTENT: dict[Any, Any] = {
    **{"none": None, "flag": True, "number": -3, "large": 2**70, "half": 0.1, "text": "größe", "empty": {}},
    "floats": [float("inf"), -float("inf"), 1e-320],
    "betas": (0.9, (0.999, "x")),
    7: {1: torch.arange(6.0).view(2, 3), "scalar": torch.tensor(2.5, dtype=torch.float64)},
    "odd": [torch.arange(5, dtype=torch.uint8), torch.zeros(0, 4), torch.randn(3, 3, generator=rng(0)).T],
    "kinds": {name: torch.ones(3).to(dtype) for name, dtype in container.DTYPES.items()},
}
SPAN = Span(0, 5, 5)
ABOUT = {"model": "4-8-1", "seed": "0"}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


def test_gives_back_what_was_written(tmp_path: Path) -> None:
    container.write(tmp_path / "file", CONTENT)
    assert _same(container.read(tmp_path / "file"), CONTENT)
    container.write(tmp_path / "nan", [float("nan")])
    assert math.isnan(*container.read(tmp_path / "nan"))


def test_notices_every_flipped_bit_and_every_cut(tmp_path: Path) -> None:
    path = tmp_path / "file"
    container.write(path, {"W": torch.arange(20.0), "sweep": 3})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            container.read(path)
        path.write_bytes(whole[:place])
        with pytest.raises(CheckpointError, match="damaged"):
            container.read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="its checksum does not match"):
        container.read(path)


@pytest.mark.parametrize(
    ("version", "header", "match"),
    [
        (2, b"1", "version 2 of the format; this torch_admm reads version 1"),
        (1, b"{", "its checksum matches, but it makes no sense"),
        (1, b'{"code": []}', "makes no sense"),
        (1, b'{"tensor": ["float32", [1000000], 0]}', "makes no sense"),
        (1, b'{"tensor": ["object", [1], 0]}', "makes no sense"),
        (1, b"[" * 100_000, "makes no sense"),
    ],
)
def test_refuses_a_made_up_file(version: int, header: bytes, match: str, tmp_path: Path) -> None:
    raw = container.MAGIC + version.to_bytes(4, "little") + len(header).to_bytes(8, "little") + header
    (tmp_path / "file").write_bytes(raw + hashlib.sha256(raw).digest())
    with pytest.raises(CheckpointError, match=match):
        container.read(tmp_path / "file")


def test_refuses_what_is_not_plain(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tensors and plain values, not Random"):
        container.write(tmp_path / "file", {"state": __import__("random").Random()})
    with pytest.raises(CheckpointError, match="nothing: No such file"):
        container.read(tmp_path / "nothing")
    container.write(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match="file: cannot be written: File exists"):
        container.write(tmp_path / "file", 2)


def _checkpoints(folder: Path, keep: int = 2, **about: str) -> Checkpoints:
    return Checkpoints(folder, Solo(), ABOUT | about, keep)


def _save(to: Checkpoints, sweep: int) -> None:
    to.save(sweep, {"sweep": sweep, "method": {"W": torch.full((3,), sweep)}}, {"z": torch.arange(5.0) + sweep}, SPAN)


def _loaded(folder: Path, span: Span = SPAN) -> Any:
    state = _checkpoints(folder).load(span)
    assert state is not None
    assert _same(state["method"]["W"], torch.full((3,), state["sweep"]))
    assert _same(state["method"]["z"], torch.arange(5.0)[span.first : span.first + span.count] + state["sweep"])
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
    with pytest.raises(CheckpointError, match=f"sweep-00000002/{name}: damaged, its checksum does not match"):
        _checkpoints(tmp_path).load(SPAN)


def _damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def test_a_checkpoint_of_another_run_is_named(tmp_path: Path) -> None:
    _save(_checkpoints(tmp_path), 1)
    _save(_checkpoints(tmp_path), 2)
    with pytest.raises(CheckpointError, match="sweep-00000002 is of another run: its model is 4-8-1, here it is 4-9-1"):
        _checkpoints(tmp_path, model="4-9-1").load(SPAN)


def test_rows_are_found_whoever_had_them(tmp_path: Path) -> None:
    _save(_checkpoints(tmp_path), 7)
    folder = tmp_path / "sweep-00000007"
    (folder / "rows-0-5").unlink()
    for first, end in ((0, 2), (2, 3), (3, 5)):
        container.write(folder / f"rows-{first}-{end}", {"z": torch.arange(5.0)[first:end] + 7})
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
