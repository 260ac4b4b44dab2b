"""Rows of data: in memory, in HDF5 files, or from torch's Dataset and DataLoader."""

from . import hdf5, torch_data  # noqa: F401 (register what they read)
from .checks import pair_of
from .memory import Rows
from .rows import AbstractRows, Ahead, Chunk, has_floating_targets, rows_of, take

__all__ = ["AbstractRows", "Ahead", "Chunk", "Rows", "has_floating_targets", "pair_of", "rows_of", "take"]
