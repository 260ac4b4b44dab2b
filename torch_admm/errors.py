"""The package's own exceptions. Bad arguments are plain `ValueError`s."""

from __future__ import annotations

__all__ = ["ConversionError"]


class ConversionError(ValueError):
    """A model, activation or loss that cannot be split into closed-form steps."""
