"""Rows of data, in memory."""

from .rows import Chunk, Rows, pair_of, rows_of, take

__all__ = ["Chunk", "Rows", "pair_of", "rows_of", "take"]
