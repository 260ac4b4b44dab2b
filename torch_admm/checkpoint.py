"""The whole state of a run, in a folder, so that another process can go on from there.

    FOLDER/sweep-00000040/shared         what all ranks have in common: weights, momentum, moments, history, counters
    FOLDER/sweep-00000040/rows-0-20827   state that belongs to rows, of the rank that had these
    FOLDER/in-use                        while a run has the folder: locked, with the process that holds it

A checkpoint is written under another name, which it loses when all of it is on the disk: it is whole or not there. Its
files have a token in common, so that one of another checkpoint is noticed. State that belongs to rows is stored with
their numbers, so that any number of ranks can take it up. All ranks must see the same folder; it is for one run at a
time. What has other names is left alone.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

from . import container, saved
from .comm import AbstractComm
from .errors import CheckpointError, told
from .identity import alike
from .lock import Lock

__all__ = ["Checkpoints", "Span", "of_another_run"]

PREFIX, ASIDE = "sweep-", ".part"
NAME = re.compile(rf"{PREFIX}[0-9]{{8,}}")
NAME_ASIDE = re.compile(NAME.pattern + re.escape(ASIDE))
ANOTHER = "is of another"  # how a reason starts that no older checkpoint can make up for

State = dict[str, Any]
Taken = Callable[[State], object]


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
        self,
        folder: str | os.PathLike[str],
        comm: AbstractComm,
        about: Mapping[str, str],
        keep: int = 2,
        *,
        make: bool = True,
    ) -> None:
        """The newest `keep` are kept. `about` tells what run it is, by name: another's is refused.

        The folder is made, if need be, or with `make=False` has to be there.
        """
        self.folder, self.comm, self.about, self.keep = Path(folder), comm, dict(about), keep
        self._lock: Lock | None = None
        with self._together():
            if comm.rank == 0 and not (make or self.folder.is_dir()):
                raise CheckpointError(self.nothing)
            if comm.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Checkpoints:
        """Keep other runs out; then, and not before, what an interrupted save left there is removed."""
        try:
            with self._together():
                if self.comm.rank == 0:
                    self._lock = Lock(self.folder)
                    for left in list(self.folder.iterdir()):
                        if NAME_ASIDE.fullmatch(left.name):
                            _remove(left)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def nothing(self) -> str:
        """In words."""
        return f"{self.folder} has no checkpoint to go on from"

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

    def load(self, span: Span, fits: Taken = bool, take: Taken = bool, stacklevel: int = 2) -> State | None:
        """The newest checkpoint that all ranks can read, with the rows of this one; None where there is none.

        `fits` looks at a state without a word to other ranks, and `take` takes up one that fits on all of them; where
        either raises, as where a file is damaged, it is passed over with a warning, unless there is no other.
        """
        reasons: list[str] = []
        for path in self.there():
            state, reason = self._tried(path, span, fits)
            why = self._agreed(path, reason) or self._agreed(path, _why_not(path, take, state))
            if not why:
                if reasons and self.comm.rank == 0:
                    said = f"{'; '.join(reasons)}; going on from {path}"
                    warnings.warn(said, RuntimeWarning, stacklevel=stacklevel + 1)
                return state
            reasons.append(why)
        if reasons:
            raise CheckpointError("; ".join(reasons))
        return None

    def _agreed(self, path: Path, reason: str) -> str:
        """The first reason that any rank has; one for which older checkpoints are no better is an error."""
        reasons = [text for text in self.comm.texts(reason) if text]
        for text in reasons:
            if text.startswith(ANOTHER):
                raise CheckpointError(f"{path} {text}")
        return reasons[0] if reasons else ""

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What is done to the folder fails on all ranks or on none, and names it."""
        with self.comm.together():
            try:
                yield
            except OSError as error:
                why = error.strerror or error
                raise CheckpointError(f"cannot write checkpoints to {self.folder}: {why}") from error

    def _tried(self, path: Path, span: Span, fits: Taken) -> tuple[State, str]:
        """What can be read, or why it cannot."""
        try:
            shared = saved.read_shared(path / "shared")
            reason = self._foreign(shared.pop("about"))
            total, token = shared.pop("rows"), shared.pop("token")
            if shared.pop("by_row") and not reason:
                shared["method"] |= saved.rows_of(path, total, token, span.first, span.first + span.count)
        except container.VersionError as error:
            return {}, f"{ANOTHER} torch_admm: {error}"
        except (CheckpointError, OSError) as error:
            return {}, str(error)
        return shared, reason or _why_not(path, fits, shared)

    def _foreign(self, about: Mapping[str, str]) -> str:
        """What tells it from a checkpoint of this run."""
        for name in {**about, **self.about}:
            theirs, ours = about.get(name, "not set"), self.about.get(name, "not set")
            if not alike(theirs, ours):
                return of_another_run(name, theirs, ours)
        return ""

    def _same_folder(self, aside: Path) -> None:
        if not aside.is_dir():
            said = "is not the folder that rank 0 sees; all ranks need one shared folder"
            raise CheckpointError(f"{self.folder} on this rank {said}")

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


def of_another_run(name: str, theirs: object, ours: object) -> str:
    return f"{ANOTHER} run: {name} was {theirs} when it was saved, and is {ours} now"


def _why_not(path: Path, take: Taken, state: State) -> str:
    """What speaks against a state; whatever it has in it, it must not end the run on one rank alone."""
    try:
        take(state)
    except CheckpointError as error:
        return str(error)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        return f"{path}: {told(error)}"
    return ""


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
