"""The package's own exceptions. Bad arguments are plain `ValueError`s."""

from __future__ import annotations

__all__ = ["CheckpointError", "CommError", "ConversionError", "DataError", "RankError"]


class ConversionError(ValueError):
    """A model, activation or loss that cannot be split into closed-form steps."""


class DataError(ValueError):
    """Rows that cannot be used as they are: the message names the file, or the argument, and the row."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or of another run: the message names the file."""


class RankError(ValueError):
    """Ranks that were given different things, or one of which failed: raised on every rank."""


class CommError(ConnectionError):
    """Ranks that cannot reach each other. The one that `speaks` tells people; the others are to be silent."""

    def __init__(self, message: str, *, speaks: bool = True) -> None:
        """`speaks`: is this the first of the ranks that are left?"""
        super().__init__(message)
        self.speaks = speaks
