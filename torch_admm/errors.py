"""The package's own exceptions. Bad arguments are plain `ValueError`s."""

from __future__ import annotations

__all__ = ["ConversionError", "DataError"]


class ConversionError(ValueError):
    """A model, activation or loss that cannot be split into closed-form steps."""


class DataError(ValueError):
    """Rows that cannot be used as they are: the message names the file, or the argument, and the row."""
