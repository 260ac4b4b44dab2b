"""A sum over several ranks of one machine, by gloo: all branches sent to everybody, by stripes, and a plain reduction.

    python -m benchmarks.sums                           # 4, 8 and 16 ranks
    python -m benchmarks.sums --ranks 4 --repeats 5 --out results.json

Each rank has one branch. The first two add up in a fixed order, so that any number of ranks gets the same bits; the
third in whatever order gloo likes. They alternate in one run; medians are shown. Ranks share the cores and talk by
loopback: with more ranks than cores, a good part is waiting for a turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks import processes
from torch_admm import comm
from torch_admm.comm import base
from torch_admm.comm.tree import Order

RANKS = (4, 8, 16)
SIZES = (8_000, 80_000, 400_000, 1_600_000, 6_400_000)  # bytes


def total(ranks: comm.AbstractComm, values: Tensor, least: int) -> Tensor:
    """In a fixed order, by stripes from so many bytes on."""
    order, usual = Order((0, ranks.size), [(rank, rank + 1) for rank in range(ranks.size)]), base.STRIPED
    base.STRIPED = least
    try:
        return ranks.total([values], order)
    finally:
        base.STRIPED = usual


WAYS: dict[str, Callable[[comm.AbstractComm, Tensor], Tensor]] = {
    "gathered": lambda ranks, values: total(ranks, values, 1 << 62),
    "by stripes": lambda ranks, values: total(ranks, values, 0),
    "reduced": lambda ranks, values: ranks.sum_(values),
}


def worker(repeats: int) -> None:
    with comm.start("gloo", threads=1) as ranks:
        found: dict[str, dict[str, float]] = {way: {} for way in WAYS}
        for size in SIZES:
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for way, call in [*WAYS.items()] * (repeats + 1):
                values = torch.ones(size // 8, dtype=torch.float64)
                ranks.largest(0)  # all begin together
                began = perf_counter()
                call(ranks, values)
                times[way].append(perf_counter() - began)
            for way, seconds in times.items():
                found[way][str(size)] = statistics.median(seconds[1:])
        if ranks.rank == 0:
            print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.repeats)
        return
    found: dict[str, Any] = {"seconds": {}}
    for ranks in args.ranks:
        command = ["benchmarks.sums", "--worker", "--repeats", str(args.repeats)]
        times = json.loads(processes.outputs(command, ranks)[0])
        found["seconds"][str(ranks)] = times
        for way, sizes in times.items():
            print(f"{ranks:3} ranks, {way:10}", *(f"{int(n):>9,} B {1e3 * s:7.2f} ms" for n, s in sizes.items()))
    if args.out is not None:
        about = {"machine": platform.machine(), "torch": torch.__version__}
        args.out.write_text(json.dumps(found | about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
