"""Rows of data, in memory."""

from .rows import Chunk, Rows, rows_of, take

__all__ = ["Chunk", "Rows", "rows_of", "take"]
