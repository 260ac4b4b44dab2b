"""How far the weights of 2 ranks are from those of 1 without `deterministic`, on real HIGGS rows with a 28-300-1 net.

    python -m benchmarks.ranks --data-dir .cache/prepared --out benchmarks/results/ranks.json

The difference is that of the largest norm, relative to the largest weight. Beside it stands how far one process is from
itself when each value of the data moves by one unit in its last place: as far would ranks be from each other, if their
sums were not the same to the bit. Labels that are `drawn` have nothing to do with the data. In batches, 10 steps are an
epoch over the first 10 batches' rows, in float32 and float64; everything else is over all rows. A figure has the least
and the largest of several seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from baselines.machine import about
from baselines.problems import load, network
from benchmarks.processes import outputs
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, comm, fit

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SEEDS = range(3)
BATCHES = (512, 2048)


@final
@dataclass(frozen=True)
class Case:
    """So many sweeps, as `fit` counts them, over the first rows, or all."""

    make: Callable[[], AbstractMethod]
    sweeps: int = 10
    rows: int | None = None
    drawn: bool = False


def _in_batches(size: int) -> Callable[[], AbstractMethod]:
    return lambda: AnchoredADMM("logistic", batch_size=size)


def _full() -> AbstractMethod:
    return AnchoredADMM("logistic", batch_size="full")


CASES = {
    "BregmanADMM(gamma=1), 10 sweeps": Case(lambda: BregmanADMM("logistic", gamma=1.0)),
    "AnchoredADMM, all rows, 10 sweeps": Case(_full),
    "... labels drawn": Case(_full, drawn=True),
    **{f"AnchoredADMM, 10 steps of {n:,}": Case(_in_batches(n), 1, 10 * n) for n in BATCHES},
    **{f"... 10 epochs in batches of {n:,}": Case(_in_batches(n)) for n in BATCHES},
}


def weights(case: Case, x: Tensor, y: Tensor, seed: int, moved: bool = False) -> Tensor:
    """After training; with `moved`, on data that differ by one unit in the last place."""
    model, random = network((28, 300, 1), seed).to(x.dtype), torch.Generator().manual_seed(seed)
    x, y = x[: case.rows], y[: case.rows]
    y = torch.randint(2, y.shape, generator=random) if case.drawn else y
    if moved:
        x = x * (1 + torch.finfo(x.dtype).eps * torch.randn(x.shape, generator=random, dtype=x.dtype).sign())
    settings: dict[str, Any] = {"max_sweeps": case.sweeps, "evaluate_every": 99, "restore_best": False, "sinks": ()}
    fit(model, (x, y), case.make(), seed=seed, **settings)
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def trained(folder: Path, moved: bool) -> dict[str, list[list[float]]]:
    """Of all cases and dtypes the weights, by seed."""
    x, y = load("higgs", folder).train
    return {
        f"{name}|{dtype}": [weights(case, x.to(DTYPES[dtype]), y, seed, moved).tolist() for seed in SEEDS]
        for name, case in CASES.items()
        for dtype in DTYPES
    }


def worker(folder: Path, moved: bool) -> None:
    with comm.start(threads=1) as ranks:
        found = trained(folder, moved)
        if ranks.rank == 0:
            print(json.dumps(found))


def run(folder: Path, size: int, moved: bool = False) -> dict[str, Tensor]:
    arguments = ["benchmarks.ranks", "--data-dir", str(folder), "--worker", *(["--moved"] if moved else [])]
    found = json.loads(outputs(arguments, size)[0])
    return {key: torch.tensor(values, dtype=torch.float64) for key, values in found.items()}


def differences(one: Tensor, other: Tensor) -> list[float]:
    """By seed."""
    found: list[float] = ((one - other).abs().amax(1) / one.abs().amax(1)).tolist()
    return found


def measure(folder: Path) -> dict[str, Any]:
    one = run(folder, 1)
    others = {"ranks": run(folder, 2), "moved": run(folder, 1, moved=True)}
    return {
        name: {
            dtype: {
                kind: differences(one[f"{name}|{dtype}"], found[f"{name}|{dtype}"]) for kind, found in others.items()
            }
            for dtype in DTYPES
        }
        for name in CASES
    }


def spread(values: list[float]) -> str:
    """The least and the largest."""
    least, most = (f"{v:.0e}" if v else "0" for v in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--moved", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.data_dir, args.moved)
        return
    found = measure(args.data_dir)
    for name, by_dtype in found.items():
        for dtype, kinds in by_dtype.items():
            print(f"{name:36} {dtype}  2 ranks {spread(kinds['ranks']):18}  moved {spread(kinds['moved'])}")
    if args.out is not None:
        args.out.write_text(json.dumps({"results": found, "machine": about()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
