"""Commands of the package in processes of their own, for the tests that stop them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

__all__ = ["command", "wait_for"]

# a test run in the background of a shell has SIGINT ignored, and its children would ignore it, too
CODE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from torch_admm.cli import main; sys.exit(main(sys.argv[1:]))"
)


def command(*words: object) -> list[str]:
    return [sys.executable, "-c", CODE, *map(str, words)]


def wait_for(path: Path, size: int, process: subprocess.Popen[str]) -> None:
    """Until so many bytes of a file have been written."""
    deadline = time.monotonic() + 100
    while not (path.exists() and path.stat().st_size > size):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
