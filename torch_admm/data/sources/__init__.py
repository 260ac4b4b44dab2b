"""Public data sets and files of one's own, made into HDF5: `python -m torch_admm data prepare NAME --data-dir DIR`."""

from . import digits, images, svhn, synthetic, tables  # noqa: F401 (they register themselves)
from .base import SOURCES, AbstractSource, Block, Contents, option, register
from .prepare import Parts, Prepared, prepare, prepared

__all__ = [
    "SOURCES",
    "AbstractSource",
    "Block",
    "Contents",
    "Parts",
    "Prepared",
    "option",
    "prepare",
    "prepared",
    "register",
]
