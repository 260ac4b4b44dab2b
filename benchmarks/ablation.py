"""What each part of AnchoredADMM is worth: steps until a target test accuracy, one setting changed at a time.

    python -m benchmarks.ablation --data-dir .cache/prepared --out benchmarks/results/ablation.json

Steps, not seconds, so that the machine has no say in it; mini-batches of the default size; evaluated every five steps;
medians over seeds. A run that does not get there in `--steps` counts as never.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_admm
from baselines.problems import PROBLEMS, Data, load
from benchmarks.kernels import network
from torch_admm.data import Rows, rows_of

NAMES = ("higgs", "svhn", "mnist")
BATCH = 512  # rows
OFF = 1e9  # a ridge so large that a side of the weight step is the identity
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no input side (`rho` infinite)": {"rho": OFF},
    "no residual side (`rho_residual` infinite)": {"rho_residual": OFF},
    "neither side": {"rho": OFF, "rho_residual": OFF},
    "`rho=0.3`": {"rho": 0.3},
    "`rho=10`": {"rho": 10.0},
    "`rho_residual=0.1`": {"rho_residual": 0.1},
    "`rho_residual=10`": {"rho_residual": 10.0},
    "no momentum": {"momentum": 0.0},
    "`momentum=0.9`": {"momentum": 0.9},
    "no averaging": {"average": False},
    "`eta=0.03`": {"eta": 0.03},
    "`eta=0.12`": {"eta": 0.12},
    "`half_life=1000`": {"half_life": 1000.0},
    "`beta=0.1`": {"beta": 0.1},
    "`gamma=0.1`": {"gamma": 0.1},
    "`amplify=False`": {"amplify": False},
    "`refresh=10`": {"refresh": 10},
    "initial weights x 0.5": {"init": 0.5},
    "initial weights x 2": {"init": 2.0},
    "initial weights orthogonal": {"init": "orthogonal"},
}


def initial(widths: list[int], init: float | str, seed: int) -> nn.Sequential:
    """torch's own initial weights, scaled, or orthogonal ones with zero biases."""
    torch.manual_seed(seed)
    model = network(widths)
    with torch.no_grad():
        for part in model:
            if isinstance(part, nn.Linear) and init == "orthogonal":
                nn.init.orthogonal_(part.weight)
                nn.init.zeros_(part.bias)
            elif isinstance(part, nn.Linear):
                part.weight.mul_(float(init))
    return model


def run(name: str, data: Data, settings: dict[str, Any], seed: int, limit: int) -> float:
    """Steps to the target, or infinity."""
    problem = PROBLEMS[name]
    settings = dict(settings)
    model = initial(list(problem.widths), settings.pop("init", 1.0), seed)
    method = torch_admm.AnchoredADMM(problem.loss, **settings)
    bound = method.bind(model)
    split = torch_admm.from_module(model, problem.loss)
    rows, test = rows_of(data.train, split), rows_of(data.test, split)
    assert isinstance(test, Rows)
    steps = 0
    while True:
        for batch in rows.batches(BATCH, seed, steps):
            bound.step(batch[0], y_of(batch[1]))
            steps += 1
            if steps % 5 == 0 and method.loss.score(model(test.x).detach(), test.y) >= max(problem.targets):
                return steps
            if steps >= limit:
                return math.inf


def y_of(encoded: torch.Tensor) -> torch.Tensor:
    """Targets as a user has them, from encoded ones."""
    return encoded.flatten() if encoded.is_floating_point() else encoded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="of the prepared files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    data = {name: load(name, args.data_dir) for name in NAMES}
    results: dict[str, dict[str, float | None]] = {}
    for variant, settings in VARIANTS.items():
        medians = {}
        for name in NAMES:
            seeds = [run(name, data[name], settings, s, args.steps) for s in range(args.seeds)]
            medians[name] = statistics.median(seeds)
        shown = ", ".join(f"{name} {steps:g}" for name, steps in medians.items())
        print(f"{variant:45} {shown}", flush=True)
        results[variant] = {name: None if math.isinf(steps) else steps for name, steps in medians.items()}
    if args.out:
        record = {"torch": torch.__version__, "seeds": args.seeds, "steps": args.steps, "results": results}
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
