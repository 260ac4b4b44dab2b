"""Peak memory of training on rows that lie on disk: 10,500,000 x 28, the shape of HIGGS.

    python -m benchmarks.memory --folder /tmp/rows
    python -m benchmarks.memory --folder /tmp/rows --rows 1000000 --out results.json

The rows are made up by a non-linear rule, written in blocks to .npy files (1.2 GB for all) and mapped, not read. Peak
resident memory is that of a process that does nothing else; pages of the mapped files count in it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

import torch_admm
from benchmarks.kernels import network

FEATURES, BLOCK = 28, 250_000
TARGET_MIB = 2048


def make(folder: Path, rows: int) -> None:
    """x of unit Gaussians; y says whether a quadratic form and a sine of them, with noise, are positive."""
    folder.mkdir(parents=True, exist_ok=True)
    x = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=np.float32, shape=(rows, FEATURES))
    y = np.lib.format.open_memmap(folder / "y.npy", mode="w+", dtype=np.int64, shape=(rows,))
    for start in range(0, rows, BLOCK):
        rng = np.random.default_rng([0, start])
        part = rng.standard_normal((min(BLOCK, rows - start), FEATURES), dtype=np.float32)
        score = part[:, 0] * part[:, 1] + 2 * np.sin(part[:, 2]) + part[:, 3] + rng.standard_normal(len(part))
        x[start : start + len(part)], y[start : start + len(part)] = part, score > 0
    x.flush()
    y.flush()


def train(folder: Path) -> dict[str, float]:
    torch.manual_seed(0)
    x, y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")
    begin = perf_counter()
    result = torch_admm.fit(network([FEATURES, 300, 1]), (x, y), max_sweeps=1, sinks=())
    return {
        "rows": len(x),
        "accuracy": result.history[-1]["train_accuracy"],
        "training_seconds": result.history[-1]["seconds"],
        "all_seconds": perf_counter() - begin,
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=10_500_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        print(json.dumps(train(args.folder)))
        return
    make(args.folder, args.rows)
    command = [sys.executable, "-m", "benchmarks.memory", "--folder", str(args.folder), "--train"]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{figures['rows']:,} rows: peak {figures['peak_mib']:,} MiB (target {TARGET_MIB:,}), one epoch in", end=" ")
    print(f"{figures['training_seconds']:.0f} s of training, training accuracy {figures['accuracy']:.1%}")
    if args.out:
        args.out.write_text(json.dumps({"target_mib": TARGET_MIB, **figures}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
