"""From raw files to OUT/NAME/train.h5 and OUT/NAME/test.h5, once.

Each file carries its recipe: the raw files by name, size and sha256, and the options. A second run with the same recipe
does nothing; one with another recipe asks for `force`. Both files are written aside and renamed when whole.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Literal, NamedTuple

from tqdm.auto import tqdm

from ...errors import DataError
from ..hdf5 import Description, Writer, describe
from .base import SOURCES, AbstractSource, Block
from .download import obtain

__all__ = ["Parts", "Prepared", "prepare", "prepared"]

RECIPE = "recipe"  # the attribute's name
Recipe = Mapping[str, Any]


class Parts(NamedTuple):
    """The two files of a prepared data set."""

    train: Path
    test: Path


class Prepared(NamedTuple):
    """The files, what they hold, and whether this run wrote them."""

    parts: Parts
    train: Description
    test: Description
    written: bool


def parts_of(name: str, folder: Path) -> Parts:
    return Parts(folder / name / "train.h5", folder / name / "test.h5")


def prepared(name: str, folder: Path | str) -> Parts:
    """The files of a data set that has been prepared under `folder`; a DataError says how to prepare it."""
    parts = parts_of(name, Path(folder))
    if missing := [path for path in parts if not path.exists()]:
        source = name if name in SOURCES else f"csv ... --as {name}"
        known = "" if name in SOURCES else f" (sources are {', '.join(SOURCES)})"
        command = f"python -m torch_admm data prepare {source} --data-dir {folder}"
        raise DataError(f"{missing[0]} does not exist; prepare it first: {command}{known}")
    train, test = (describe(path).attributes.get(RECIPE) for path in parts)
    if train != test:
        raise DataError(
            f"{parts.train} and {parts.test.name} beside it were not prepared together; prepare them again with --force"
        )
    return parts


def prepare(
    source: AbstractSource,
    folder: Path | str,
    out: Path | str | None = None,
    *,
    name: str | None = None,
    dtype: Literal["float32", "float16"] = "float32",
    force: bool = False,
    offline: bool = False,
) -> Prepared:
    """Make the files of `source` under `out` (default: `folder`, where the raw files are), unless they are there.

    `name` is the folder's name, the source's by default. `offline` forbids downloads. A bar on a terminal shows rows,
    rows a second and the time left.
    """
    parts = parts_of(name or source.name, Path(folder if out is None else out))
    files = source.files(Path(folder), partial(obtain, folder=Path(folder), offline=offline))
    recipe = recipe_of(source, files, dtype)
    if not force and (found := look(parts, recipe)):
        return found
    parts.train.parent.mkdir(parents=True, exist_ok=True)
    write(source, files, parts, recipe)
    return Prepared(parts, describe(parts.train), describe(parts.test), True)


def write(source: AbstractSource, files: tuple[Path, ...], parts: Parts, recipe: Recipe) -> None:
    features, classes, blocks = source.open(files)
    with between_blocks() as check, ExitStack() as stack:
        stack.enter_context(closing(blocks))  # type: ignore[type-var]
        writers = {
            path.stem: stack.enter_context(
                Writer(
                    path,
                    features=features,
                    source=source.name,
                    classes=classes,
                    dtype=recipe["storage"],
                    attributes={RECIPE: json.dumps(recipe, sort_keys=True)},
                )
            )
            for path in parts
        }
        rows = dict.fromkeys(writers, 0)
        for block in shown(blocks, source.name):
            writers[block.part].write(block.x, block.y)
            rows[block.part] += len(block.y)
            check()
        if empty := [part for part, count in rows.items() if not count]:
            raise DataError(f"{source.name}: no rows for {empty[0]}.h5, {sum(rows.values()):,} in all")


@contextmanager
def between_blocks() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits for `check`, and only the second does not.

    An exception inside the callback of a weak reference is lost, and h5py spends much of its time in such callbacks.
    """
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    ours = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


def shown(blocks: Iterator[Block], label: str) -> Iterator[Block]:
    """The same blocks, with a bar: by share of the work, since a compressed file does not tell its rows."""
    layout = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]"
    with tqdm(total=1.0, desc=label, bar_format=layout, disable=None) as bar:
        rows = 0
        for block in blocks:
            yield block
            rows += len(block.y)
            bar.set_postfix_str(f"{rows:,} rows, {rows / max(bar.format_dict['elapsed'], 1e-9):,.0f} a second", False)
            bar.update(block.done - bar.n)


def recipe_of(source: AbstractSource, files: tuple[Path, ...], dtype: str) -> Recipe:
    prints = [{"name": path.name, "bytes": path.stat().st_size, "sha256": digest(path)} for path in files]
    about = {"source": source.name, "version": source.version, "storage": dtype}
    return {**about, "options": source.options(), "files": prints}


def digest(path: Path) -> str:
    with path.open("rb") as file:  # hashlib.file_digest came with Python 3.11
        sums = hashlib.sha256()
        while block := file.read(1 << 20):
            sums.update(block)
    return sums.hexdigest()


def look(parts: Parts, recipe: Recipe) -> Prepared | None:
    """What is there, if it is whole and of this recipe; None if a file is missing; a DataError if it is another."""
    found = [(path, describe(path)) for path in parts if path.exists()]
    for path, description in found:
        if difference := compare(str(description.attributes.get(RECIPE, "")), recipe):
            raise DataError(f"{path} was prepared otherwise: {difference}. --force replaces it, --as NAME keeps both")
    return Prepared(parts, found[0][1], found[1][1], False) if len(found) == len(parts) else None


def compare(stored: str, recipe: Recipe) -> str | None:
    """The first difference, in words."""
    try:
        before = dict(json.loads(stored))
    except ValueError:
        return "it carries no recipe"
    now = json.loads(json.dumps(recipe))
    before, now = ({**r, **r.get("options", {}), "options": None} for r in (before, now))
    return next((f"{k} {before.get(k)} then, {v} now" for k, v in now.items() if before.get(k) != v), None)
