"""The whole state of a run, in a folder, so that another process can go on from there.

    FOLDER/sweep-00000040/shared         what all ranks have in common: weights, momentum, moments, history, counters
    FOLDER/sweep-00000040/rows-0-20827   state that belongs to rows, of the rank that had these

A checkpoint is written under another name, which it loses when all of it is on the disk: it is whole or not there. Its
files have a token in common, so that one of another checkpoint is noticed. State that belongs to rows is stored with
their numbers, so that any number of ranks can take it up. All ranks must see the same folder; it is for one run. What
has other names is left alone.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from . import container, saved
from .comm import AbstractComm
from .errors import CheckpointError

__all__ = ["Checkpoints", "Span"]

PREFIX, ASIDE = "sweep-", ".part"
NAME = re.compile(rf"{PREFIX}[0-9]{{8,}}")
NAME_ASIDE = re.compile(NAME.pattern + re.escape(ASIDE))
ANOTHER = "is of another"  # how a reason starts that no older checkpoint can make up for

State = dict[str, Any]
Stretch = tuple[int, int]  # of rows: from .. to


@final
@dataclass(frozen=True)
class Span:
    """The rows of this rank, among those of all."""

    first: int
    count: int
    total: int


@final
class Checkpoints:
    """Saves and finds the checkpoints of one run."""

    def __init__(
        self, folder: str | os.PathLike[str], comm: AbstractComm, about: Mapping[str, str], keep: int = 2
    ) -> None:
        """Make the folder; what an interrupted save left there is removed. The newest `keep` are kept.

        `about` tells what run it is, by name: one of another is refused.
        """
        self.folder, self.comm, self.about, self.keep = Path(folder), comm, dict(about), keep
        with self._together():
            if comm.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in list(self.folder.iterdir()):
                    if NAME_ASIDE.fullmatch(left.name):
                        _remove(left)

    def at(self, sweep: int) -> Path:
        return self.folder / f"{PREFIX}{sweep:08d}"

    def there(self) -> list[Path]:
        """All that rank 0 sees, newest first."""
        found: list[str] = []
        with self._together():
            if self.comm.rank == 0:
                found = [path.name for path in _found(self.folder)]
        return [self.folder / name for name in self.comm.texts("\n".join(found))[0].split("\n") if name]

    def save(self, sweep: int, shared: State, by_row: Mapping[str, Any], span: Span) -> None:
        """Write a checkpoint, then forget the oldest. An error on one rank is one on all; older ones stay."""
        path = self.at(sweep)
        aside = path.with_name(path.name + ASIDE)
        try:
            token = self.comm.texts(secrets.token_hex(16) if self.comm.rank == 0 else "")[0]
            with self._together():
                if self.comm.rank == 0:
                    _remove(aside)
                    aside.mkdir()
                    facts = {"about": self.about, "rows": span.total, "by_row": bool(by_row), "token": token}
                    container.write(aside / "shared", {**shared, **facts})
            with self._together():
                self._same_folder(aside)
                if by_row and span.count:
                    named = aside / f"rows-{span.first}-{span.first + span.count}"
                    container.write(named, {"token": token, "by_row": dict(by_row)})
            with self._together():
                if self.comm.rank == 0:
                    self._commit(aside, path)
        except Exception:
            if self.comm.rank == 0:
                with suppress(OSError):
                    _remove(aside)
            raise

    def load(self, span: Span) -> State | None:
        """The newest checkpoint that all ranks can read, with the rows of this one; None where there is none.

        One that is damaged is passed over with a warning, unless there is no other.
        """
        reasons: list[str] = []
        for path in self.there():
            state, reason = self._tried(path, span)
            told = [text for text in self.comm.texts(reason) if text]
            if not told:
                if reasons and self.comm.rank == 0:
                    said = f"{'; '.join(reasons)}; going on from {path}"
                    warnings.warn(said, RuntimeWarning, stacklevel=3)
                return state
            for text in told:
                if text.startswith(ANOTHER):
                    raise CheckpointError(f"{path} {text}")
            reasons.append(told[0])
        if reasons:
            raise CheckpointError("; ".join(reasons))
        return None

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What is done to the folder fails on all ranks or on none, and names it."""
        with self.comm.together():
            try:
                yield
            except OSError as error:
                raise CheckpointError(f"{self.folder}: cannot hold checkpoints: {error.strerror or error}") from error

    def _tried(self, path: Path, span: Span) -> tuple[State, str]:
        """What can be read, or why it cannot."""
        try:
            shared = saved.read_shared(path / "shared")
            reason = self._foreign(shared.pop("about"))
            total, token = shared.pop("rows"), shared.pop("token")
            if shared.pop("by_row") and not reason:
                shared["method"] |= _rows(path, _files(path, total), token, span)
        except container.VersionError as error:
            return {}, f"{ANOTHER} torch_admm: {error}"
        except (CheckpointError, OSError) as error:
            return {}, str(error)
        return shared, reason

    def _foreign(self, about: Mapping[str, str]) -> str:
        """What tells it from a checkpoint of this run."""
        for name in {**about, **self.about}:
            theirs, ours = about.get(name, "not there"), self.about.get(name, "not there")
            if theirs != ours:
                return f"{ANOTHER} run: its {name} is {theirs}, here it is {ours}"
        return ""

    def _same_folder(self, aside: Path) -> None:
        if not aside.is_dir():
            raise CheckpointError(f"{self.folder} is another folder here than on rank 0; all ranks must see the same")

    def _commit(self, aside: Path, path: Path) -> None:
        _sync(aside)
        _remove(path)  # damaged, as what is above it
        aside.rename(path)
        _sync(self.folder)
        found = _found(self.folder)
        place = found.index(path)  # what is above it is damaged, or the run would have gone on from there
        for old in found[:place] + found[place + self.keep :]:
            gone = old.with_name(old.name + ASIDE)
            _remove(gone)
            old.rename(gone)  # a checkpoint that is half removed must not look like one
            _remove(gone)


def _files(path: Path, total: int) -> dict[Stretch, Path]:
    """The files of rows, in order; together they have all."""
    named = ((re.fullmatch(r"rows-(\d+)-(\d+)", file.name), file) for file in path.iterdir())
    files = sorted(((int(found[1]), int(found[2])), file) for found, file in named if found)
    if [0, *(end for (_, end), _ in files)] != [*(first for (first, _), _ in files), total]:
        raise CheckpointError(f"{path}: the state of some of its {total} rows is missing")
    return dict(files)


def _rows(path: Path, files: Mapping[Stretch, Path], token: str, span: Span) -> State:
    """The state of the rows of this rank, from the files that have some of them; no rows still have a width."""
    begin, end = span.first, span.first + span.count
    needed = [(first, stop) for first, stop in files if max(first, begin) < min(stop, end)]
    cuts = [(max(first, begin) - first, min(stop, end) - max(first, begin)) for first, stop in needed]
    if not needed:
        needed, cuts = list(files)[:1], [(0, 0)]
    parts = [saved.read_rows(files[first, stop], stop - first, token) for first, stop in needed]
    try:
        joined: State = _joined(parts, cuts)
    except (LookupError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its files of rows do not go together: {error}") from error
    return joined


def _joined(parts: list[Any], cuts: list[tuple[int, int]]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat([part.narrow(0, *cut) for part, cut in zip(parts, cuts, strict=True)])
    return {key: _joined([part[key] for part in parts], cuts) for key in parts[0]}


def _sync(folder: Path) -> None:
    """See the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _found(folder: Path) -> list[Path]:
    """Checkpoints, whole or not, newest first."""
    return sorted((p for p in folder.iterdir() if NAME.fullmatch(p.name)), key=lambda p: (_number(p), p), reverse=True)


def _number(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def _remove(path: Path) -> None:
    """Whatever is there, if anything; of a link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
