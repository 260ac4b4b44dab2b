"""The history of a run: rows of plain dicts, the clock that leaves out evaluation, and the sinks that read the rows."""

from __future__ import annotations

import abc
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import TracebackType
from typing import Any, TextIO, final

from tqdm.auto import tqdm

__all__ = ["AbstractSink", "Clock", "JSONLines", "ProgressBar", "Row", "TensorBoard"]

Row = dict[str, float]  # sweep, seconds, loss, residuals and metrics by name


@final
class Clock:
    """Seconds spent inside `with clock:` blocks."""

    def __init__(self, seconds: float = 0.0) -> None:
        """Start at `seconds`, standing still."""
        self._elapsed = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self._elapsed + (0.0 if self._since is None else perf_counter() - self._since)

    def __enter__(self) -> Clock:
        self._since = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._elapsed, self._since = self.seconds, None


class AbstractSink(abc.ABC):
    """Somewhere rows go. Sinks read rows; they never touch the model or the method."""

    def open(self, max_sweeps: int) -> None:  # noqa: B027 (a sink with nothing to open is fine)
        """Called once before the first row."""

    @abc.abstractmethod
    def write(self, row: Row) -> None:
        """One row of the history."""

    def close(self) -> None:  # noqa: B027
        """Called once at the end, also after an error or Ctrl-C."""


@final
class ProgressBar(AbstractSink):
    """A tqdm bar on stderr with the newest figures; silent where stderr is not a terminal, unless `always`."""

    def __init__(self, label: str = "", *, always: bool = False) -> None:
        """`label` opens the line."""
        self.label, self.always = label, always

    def open(self, max_sweeps: int) -> None:
        self._bar: Any = tqdm(
            total=max_sweeps, desc=self.label or None, unit="sweep", disable=False if self.always else None
        )

    def write(self, row: Row) -> None:
        shown = {k: f"{v:.4g}" for k, v in row.items() if k == "loss" or k.startswith(("train_", "test_"))}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(int(row["sweep"]) - self._bar.n)

    def close(self) -> None:
        self._bar.close()


@final
class JSONLines(AbstractSink):
    """One JSON object a line, flushed as it is written; a non-finite number becomes null. An old file is replaced."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Write to `path`, made anew when the run starts."""
        self.path = path

    def open(self, max_sweeps: int) -> None:
        self._file: TextIO = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, row: Row) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in row.items()}
        with self._named():
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        with self._named():
            self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A disk that is full does not say of which file."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(self.path)) from None


@final
class TensorBoard(AbstractSink):
    """Scalars for TensorBoard under `logdir`; needs the extra: pip install 'torch-admm[tensorboard]'."""

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        """Write event files under `logdir`."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard needs the extra: pip install 'torch-admm[tensorboard]'") from error
        self._make, self.logdir = SummaryWriter, os.fspath(logdir)

    def open(self, max_sweeps: int) -> None:
        self._writer: Any = self._make(self.logdir)

    def write(self, row: Row) -> None:
        for key, value in row.items():
            if key != "sweep":
                self._writer.add_scalar(key.replace("_", "/", 1), value, int(row["sweep"]), walltime=row["seconds"])

    def close(self) -> None:
        self._writer.close()
