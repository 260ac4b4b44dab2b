"""Which settings of Algorithm 1 reach the paper's thresholds on real SVHN 0-vs-2 and HIGGS rows, and which do not.

    python -m benchmarks.bregman --data-dir .cache/prepared --out benchmarks/results/bregman.json

The rows are those of `python -m torch_admm data prepare`. Every setting runs from several seeds on the nets of the
paper.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import torch_admm
from baselines.problems import Data, load
from benchmarks.kernels import network

NETS = {"svhn": [648, 100, 50, 1], "higgs": [28, 300, 1]}
TARGETS = {"svhn": 0.95, "higgs": 0.64}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "svhn": [
        {},
        {"gamma": 3.0},
        {"gamma": 3.0, "warm_start": 0},
        {"gamma": 1.0},
        {"gamma": 1.0, "ridge": 0.01},
        {"gamma": 1.0, "ridge": 0.01, "multiplier": "consistent"},
        {"gamma": 1.0, "ridge": 0.01, "multiplier": "none"},
        {"ridge": 0.01},
    ],
    "higgs": [
        {},
        {"warm_start": 0},
        {"multiplier": "consistent"},
        {"multiplier": "none"},
        {"gamma": 1.0},
        {"gamma": 1.0, "ridge": 0.01},
    ],
}


def run(name: str, data: Data, settings: dict[str, Any], seed: int, sweeps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    method = torch_admm.BregmanADMM("hinge", **settings)
    result = torch_admm.fit(
        network(NETS[name]), data.train, method, max_sweeps=sweeps, evaluate=data.test, seed=seed, sinks=()
    )
    reached = next((row for row in result.history if row["test_accuracy"] >= TARGETS[name]), None)
    return {
        "best": result.best["test_accuracy"],
        "last": result.history[-1]["test_accuracy"],
        "reached_at_sweep": None if reached is None else int(reached["sweep"]),
        "reached_after_seconds": None if reached is None else reached["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="of the prepared files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sweeps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for name in ("higgs", "svhn"):
        data = load(name, args.data_dir)
        print(f"{name}: {len(data.train[0])} + {len(data.test[0])} rows, target {TARGETS[name]:.0%}")
        for settings in SETTINGS[name]:
            runs = [run(name, data, settings, seed, args.sweeps) for seed in range(args.seeds)]
            results.append({"problem": name, "settings": settings, "runs": runs})
            sweeps = [r["reached_at_sweep"] for r in runs]
            print(f"  {settings}: best {statistics.median(r['best'] for r in runs):.2%}, target at sweeps {sweeps}")
    if args.out:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "sweeps": args.sweeps}
        text = json.dumps({**about, "targets": TARGETS, "nets": NETS, "results": results}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
