"""torchvision beside a CPU-only torch.

Its wheels come with compiled operators that do not load there, and importing it then fails at the first Python code
that refers to one of them. Data sets and transforms call none: declaring the two names is enough.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .sources.base import needs

__all__ = ["declare", "torchvision"]

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OPERATORS = ("nms", "qnms")


def torchvision() -> Any:
    """The torchvision module; a DataError says how to get it."""
    try:
        return importlib.import_module("torchvision")
    except ImportError:
        return needs("torchvision")
    except RuntimeError as error:
        if not str(error).startswith("operator torchvision::"):
            raise
    declare()
    return importlib.import_module("torchvision")


def declare() -> list[str]:
    """Declare the operators that are missing, and only those; their names."""
    missing = [name for name in OPERATORS if not hasattr(torch.ops.torchvision, name)]
    for name in missing:
        torch.library.define(f"torchvision::{name}", SCHEMA)
    return missing
