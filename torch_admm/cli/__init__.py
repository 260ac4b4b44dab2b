"""The command line: `python -m torch_admm`, or `torch-admm` where the package is installed."""

from . import data, train  # noqa: F401 (they register their commands)
from .base import COMMANDS, Command, command, main

__all__ = ["COMMANDS", "Command", "command", "main"]
