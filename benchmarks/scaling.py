"""Time of a sweep on 2 ranks of one thread against 1 rank of one thread, and that of SGD in DistributedDataParallel.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --ranks 1 2 --repeats 3 --out benchmarks/results/scaling.json

Random rows: only time is measured. Runs of 1 and of 2 ranks alternate; a figure is the median over all sweeps but the
first of each run. Ranks talk by gloo over loopback. `exchange` is the time of the collectives alone: sums of vectors of
several sizes over all ranks, for `benchmarks.simulate`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from baselines.machine import about
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, comm, fit

ROWS = {"28-300-1": 1_000_000, "648-100-50-1": 120_000}
BATCH = 2048
SWEEPS = 3
WANTED = {"bregman": 1.9, "anchored": 1.9, f"anchored, batches of {BATCH}": 1.7}
SIZES = (1, 1_000, 10_000, 50_000, 200_000)  # numbers in a sum

Seconds = dict[str, list[float]]


def data(net: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    widths = [int(width) for width in net.split("-")]
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    x = torch.randn(ROWS[net], widths[0])
    return nn.Sequential(*parts[:-1]), x, (x[:, 0] * x[:, 1] > 0).long()


def admm(net: str) -> Seconds:
    methods: dict[str, Callable[[], AbstractMethod]] = {
        "bregman": lambda: BregmanADMM("logistic"),
        "anchored": lambda: AnchoredADMM("logistic", batch_size="full"),
        f"anchored, batches of {BATCH}": lambda: AnchoredADMM("logistic", batch_size=BATCH),
    }
    found: Seconds = {}
    for name, make in methods.items():  # one at a time: the state of Bregman takes gigabytes
        model, x, y = data(net)
        history = fit(model, (x, y), make(), max_sweeps=SWEEPS, sinks=(), restore_best=False).history
        clock = [row["seconds"] for row in history]
        found[name] = [after - before for before, after in pairwise(clock[1:])]
    return found


def ddp(net: str, ranks: comm.AbstractComm) -> Seconds:
    """SGD with momentum, a loop as anybody would write it; each rank takes its share of every batch."""
    model, x, y = data(net)
    share = len(x) // ranks.size
    x, target = x[ranks.rank * share :][:share], y[ranks.rank * share :][:share].float().unsqueeze(1)
    trained = DistributedDataParallel(model) if ranks.size > 1 else model
    optimiser = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9)
    epochs = []
    for _ in range(2):
        began = perf_counter()
        for index in torch.randperm(share).split(BATCH // ranks.size):
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(trained(x[index]), target[index]).backward()
            optimiser.step()
        epochs.append(perf_counter() - began)
    return {f"DDP-SGD, batches of {BATCH}": epochs[1:]}


def exchange(ranks: comm.AbstractComm, repeats: int = 50) -> dict[str, float]:
    found = {}
    for size in SIZES:
        values, times = torch.ones(size, dtype=torch.float64), []
        for _ in range(repeats):
            began = perf_counter()
            ranks.sum_(values.fill_(1.0))
            times.append(perf_counter() - began)
        found[str(8 * size)] = statistics.median(times)
    return found


def worker() -> None:
    with comm.start(threads=1) as ranks:
        found: dict[str, Any] = {net: admm(net) | ddp(net, ranks) for net in ROWS}
        found["exchange"] = exchange(ranks)
        if ranks.rank == 0:
            print(json.dumps(found))


def launch(size: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = os.environ | place | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.scaling", "--worker"]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {size} ended with {[rank.returncode for rank in ranks]}")
    found: dict[str, Any] = json.loads(said[0])
    return found


def measure(sizes: list[int], repeats: int) -> dict[str, Any]:
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size in sizes:
            runs[size].append(launch(size))
    cases = {net: list(runs[sizes[0]][0][net]) for net in ROWS}
    seconds = {
        net: {
            case: {str(size): statistics.median([s for run in runs[size] for s in run[net][case]]) for size in sizes}
            for case in names
        }
        for net, names in cases.items()
    }
    largest = runs[sizes[-1]]
    crossing = {n: statistics.median(run["exchange"][n] for run in largest) for n in largest[0]["exchange"]}
    return {"machine": about(), "rows": ROWS, "batch": BATCH, "seconds": seconds, "exchange": crossing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker()
        return
    found = measure(args.ranks, args.repeats)
    first, last = str(args.ranks[0]), str(args.ranks[-1])
    for net, cases in found["seconds"].items():
        for case, times in cases.items():
            ratio, wanted = times[first] / times[last], WANTED.get(case)
            aim = "" if wanted is None else f", wanted {wanted}: {'yes' if ratio >= wanted else 'no'}"
            print(f"{net:14} {case:26} {times[first]:8.3f} s -> {times[last]:8.3f} s   {ratio:.2f} x{aim}")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
