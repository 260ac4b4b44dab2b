"""Commands of the package in processes of their own, for the tests that stop them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["command", "end", "finished", "wait_for"]

# a test run in the background of a shell has SIGINT ignored, and its children would ignore it, too
CODE = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from torch_admm.cli import main; sys.exit(main(sys.argv[1:]))"
)


def command(*words: object) -> list[str]:
    return [sys.executable, "-c", CODE, *map(str, words)]


def finished(words: Sequence[str], env: dict[str, str], seconds: float = 200) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end; if it does not come to one, its ranks are ended with it."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        said, errors = process.communicate(timeout=seconds)
    finally:
        end(process)
    return subprocess.CompletedProcess(words, process.returncode, said, errors)


def end(process: subprocess.Popen[str]) -> None:
    """With all processes of the session that it began."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def wait_for(path: Path, size: int, process: subprocess.Popen[str]) -> None:
    """Until so many bytes of a file have been written."""
    deadline = time.monotonic() + 100
    while not (path.exists() and path.stat().st_size > size):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
