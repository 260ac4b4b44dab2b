"""The package's own exceptions. Bad arguments are plain `ValueError`s."""

from __future__ import annotations

__all__ = ["CheckpointError", "CommError", "ConversionError", "DataError", "RankError", "told"]


class ConversionError(ValueError):
    """A model, activation or loss that cannot be split into closed-form steps."""


class DataError(ValueError):
    """Rows that cannot be used as they are: the message names the file, or the argument, and the row."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or of another run: the message names the file."""


class RankError(ValueError):
    """Ranks that were given different things, or one of which failed: raised on every rank."""


def told(error: BaseException) -> str:
    """What to tell people, and other ranks, of an error: sentences of bad input speak for themselves, others do not."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text, kind = str(error), type(error).__name__
    if not text:
        return kind
    return text if isinstance(error, ValueError | OSError | ImportError) else f"{kind}: {text}"


class CommError(ConnectionError):
    """Ranks that cannot reach each other. The one that `speaks` tells people; the others are to be silent."""

    def __init__(self, message: str, *, speaks: bool = True) -> None:
        """`speaks`: is this the first of the ranks that are left?"""
        super().__init__(message)
        self.speaks = speaks
