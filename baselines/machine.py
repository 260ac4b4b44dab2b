"""What gave the figures: the machine, the versions, the load."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

import torch_admm

__all__ = ["about", "fresh_peak_mib", "peak_mib", "versions"]

PACKAGES = ("numpy", "optuna", "matplotlib", "scikit-learn")


def versions() -> dict[str, str]:
    """Those that figures may depend on."""
    return {"python": platform.python_version(), "torch": torch.__version__, "torch_admm": torch_admm.__version__}


def about() -> dict[str, str | int | float]:
    """One line each; what cannot be found out is left out."""
    others = {name: v for name in PACKAGES if (v := _version(name))}
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_before": round(os.getloadavg()[0], 2),
        **versions(),
        **others,
        **_commit(),
    }


def peak_mib() -> float:
    """The most memory that this process has had resident."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def fresh_peak_mib() -> float:
    """Forget the peak so far, where the system can, and give what is resident now: loading takes more for a moment."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_mib()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _commit() -> dict[str, str]:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": done.stdout.strip()}
