"""Linear maps: what a layer does between one activation and the next."""

from .base import AbstractLinearMap, InputSolve
from .dense import Dense, map_of

__all__ = ["AbstractLinearMap", "Dense", "InputSolve", "map_of"]
