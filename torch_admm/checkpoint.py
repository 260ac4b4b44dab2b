"""The whole state of a run, in a folder, so that another process can go on from there.

    FOLDER/sweep-00000040/shared         what all ranks have in common: weights, momentum, moments, history, counters
    FOLDER/sweep-00000040/rows-0-20827   state that belongs to rows, of the rank that had these

A checkpoint is written under another name, which it loses when all of it is on the disk: it is whole or not there.
State that belongs to rows is stored with their numbers, so that any number of ranks can take it up. All ranks must see
the same folder.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from . import container
from .comm import AbstractComm
from .errors import CheckpointError

__all__ = ["Checkpoints", "Span"]

PREFIX, ASIDE = "sweep-", ".part"
ANOTHER = "is of another run"

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
        with comm.together():
            if comm.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                for left in self.folder.glob(f"{PREFIX}*{ASIDE}"):
                    shutil.rmtree(left)

    def there(self) -> list[Path]:
        """All that rank 0 sees, newest first."""
        found = sorted((p.name for p in self.folder.glob(f"{PREFIX}*") if p.suffix != ASIDE), reverse=True)
        return [self.folder / name for name in self.comm.texts("\n".join(found))[0].split("\n") if name]

    def save(self, sweep: int, shared: State, by_row: Mapping[str, Any], span: Span) -> None:
        """Write a checkpoint, then forget the oldest. An error on one rank is one on all; older ones stay."""
        path = self.folder / f"{PREFIX}{sweep:08d}"
        aside = path.with_name(path.name + ASIDE)
        try:
            with self.comm.together():
                if self.comm.rank == 0:
                    aside.mkdir()
                    facts = {"about": self.about, "rows": span.total, "by_row": bool(by_row)}
                    container.write(aside / "shared", {**shared, **facts})
            with self.comm.together():
                self._same_folder(aside)
                if by_row and span.count:
                    container.write(aside / f"rows-{span.first}-{span.first + span.count}", dict(by_row))
            with self.comm.together():
                if self.comm.rank == 0:
                    self._commit(aside, path)
        except Exception:
            if self.comm.rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
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
            if told[0].startswith(ANOTHER):
                raise CheckpointError(f"{path} {told[0]}")
            reasons.append(told[0])
        if reasons:
            raise CheckpointError(reasons[0])
        return None

    def _tried(self, path: Path, span: Span) -> tuple[State, str]:
        """What can be read, or why it cannot."""
        try:
            shared: State = container.read(path / "shared")
            for name, theirs in shared.pop("about").items():
                if theirs != self.about[name]:
                    return {}, f"{ANOTHER}: its {name} is {theirs}, here it is {self.about[name]}"
            total = shared.pop("rows")
            if shared.pop("by_row"):
                shared["method"] |= _rows(_files(path, total), span)
        except CheckpointError as error:
            return {}, str(error)
        return shared, ""

    def _same_folder(self, aside: Path) -> None:
        if not aside.is_dir():
            raise CheckpointError(f"{self.folder} is another folder here than on rank 0; all ranks must see the same")

    def _commit(self, aside: Path, path: Path) -> None:
        _sync(aside)
        if path.exists():  # damaged, or the run would have gone on from it
            shutil.rmtree(path)
        aside.rename(path)
        _sync(self.folder)
        kept = sorted(p for p in self.folder.glob(f"{PREFIX}*") if p.suffix != ASIDE)
        for old in kept[: -self.keep]:
            gone = old.with_name(old.name + ASIDE)
            old.rename(gone)  # a checkpoint that is half removed must not look like one
            shutil.rmtree(gone)


def _files(path: Path, total: int) -> dict[Stretch, Path]:
    """The files of rows, in order; together they have all."""
    named = ((re.fullmatch(r"rows-(\d+)-(\d+)", file.name), file) for file in path.iterdir())
    files = sorted(((int(found[1]), int(found[2])), file) for found, file in named if found)
    if [0, *(end for (_, end), _ in files)] != [*(first for (first, _), _ in files), total]:
        raise CheckpointError(f"{path}: the state of some of its {total} rows is missing")
    return dict(files)


def _rows(files: Mapping[Stretch, Path], span: Span) -> State:
    """The state of the rows of this rank, from the files that have some of them; no rows still have a width."""
    begin, end = span.first, span.first + span.count
    needed = [(first, stop) for first, stop in files if max(first, begin) < min(stop, end)]
    cuts = [(max(first, begin) - first, min(stop, end) - max(first, begin)) for first, stop in needed]
    if not needed:
        needed, cuts = list(files)[:1], [(0, 0)]
    joined: State = _joined([container.read(files[rows]) for rows in needed], cuts)
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
