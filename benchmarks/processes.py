"""Several processes of one thread, as ranks or each by itself, and what they print."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import final

__all__ = ["Others", "outputs"]


@final
class Others:
    """How much of the cores processes took that are neither this one nor started by it; 0 where no one can say."""

    def __init__(self) -> None:
        self.began, self.before = perf_counter(), self._spent()

    def share(self) -> float:
        """Since this was made."""
        spent = self._spent() - self.before
        return max(0.0, spent / (perf_counter() - self.began) / (os.cpu_count() or 1))

    @staticmethod
    def _spent() -> float:
        place = Path("/proc/stat")
        if not place.exists():
            return 0.0
        user, nice, system = map(int, place.read_text(encoding="ascii").split()[1:4])
        mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return (user + nice + system) / os.sysconf("SC_CLK_TCK") - sum(r.ru_utime + r.ru_stime for r in mine)


def outputs(arguments: Sequence[str], size: int, *, apart: bool = False) -> list[str]:
    """What `python -m ARGUMENTS` prints, by rank, in so many processes; `apart` ones know nothing of each other.

    Each may print what a pipe holds, 64 kB, but for rank 0.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=env if apart else env | place | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {size} ended with {[rank.returncode for rank in ranks]}")
    return said
