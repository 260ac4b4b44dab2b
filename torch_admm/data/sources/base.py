"""What a source offers: its options, the raw files it needs, and the rows it makes of them."""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError

__all__ = ["SOURCES", "AbstractSource", "Block", "Contents", "Obtain", "Remote", "needs", "option", "register"]

Part = Literal["train", "test"]


class Block(NamedTuple):
    """Some rows of one part; `done` is the share of all the work that is behind us, for the bar."""

    part: Part
    x: NDArray[np.float32]
    y: NDArray[Any]
    done: float


class Contents(NamedTuple):
    """What the rows look like (classes None: a number is to be predicted), and the rows."""

    features: int
    classes: tuple[str, ...] | None
    blocks: Iterator[Block]


@final
@dataclasses.dataclass(frozen=True)
class Remote:
    """A file as its authors publish it: where it lies under the data folder, where it comes from, what is in it."""

    path: str
    url: str
    sha256: str


Obtain = Callable[[Remote], Path]  # the file under the data folder, downloaded if it was missing


def option(default: Any, text: str, *, recipe: bool = True, **how: Any) -> Any:
    """A field that is also a command-line option; `recipe` says whether the rows depend on it."""
    return dataclasses.field(default=default, metadata={"help": text, "recipe": recipe, "how": how})


class AbstractSource(abc.ABC):
    """A frozen dataclass whose fields are the options, made by `option`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    version: ClassVar[int] = 1  # raised when the same files and options come to give other rows

    @abc.abstractmethod
    def files(self, folder: Path, obtain: Obtain) -> tuple[Path, ...]:
        """The raw files, found under `folder` or obtained; all that can be said without reading them is checked."""

    @abc.abstractmethod
    def open(self, files: tuple[Path, ...]) -> Contents:
        """Begin to read. Whatever is wrong with a file is a DataError that names it, and the line or row."""

    def options(self) -> dict[str, Any]:
        """The options that the rows depend on, as JSON knows them."""
        fields = [f for f in dataclasses.fields(self) if f.metadata["recipe"]]  # type: ignore[arg-type]
        values = {f.name: getattr(self, f.name) for f in fields}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


SOURCES: dict[str, type[AbstractSource]] = {}

Source = TypeVar("Source", bound=type[AbstractSource])


def register(source: Source) -> Source:
    """Class decorator: make a source known by its name."""
    SOURCES[source.name] = source
    return source


def needs(module: str, extra: str = "data") -> Any:
    """An optional module, or the sentence that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f'{module} is needed here ({error}): pip install "torch-admm[{extra}]"') from None
