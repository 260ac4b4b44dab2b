"""Time of a sweep on 2 ranks of one thread against 1 rank of one thread, and that of SGD in DistributedDataParallel.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --nets 28-300-1 --repeats 5 --out benchmarks/results/scaling.json

Random rows: only time is measured, that of a method's steps. Runs of 1 and of 2 ranks alternate; a figure is the median
over all sweeps but the first of each run. `apart` are processes that do what a rank does, on their own rows, but take
their own sums for those of all: what is left to gain if sums and waiting cost nothing. `exchange` is the time of sums
alone, of vectors of several sizes over all ranks, by the memory that ranks share and by gloo over loopback. A file that
is there already keeps its other nets.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from baselines.machine import about
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, comm
from torch_admm.comm import AbstractComm, Pending
from torch_admm.data import rows_of
from torch_admm.problem import from_module

ROWS = {"28-300-1": 1_000_000, "648-100-50-1": 120_000}
BATCH = 2048
SWEEPS = 6  # of the anchored ones but the first, most do not look at moments, as most do in a long run
DDP = f"DDP-SGD, batches of {BATCH}"
MINI = f"anchored, batches of {BATCH}"
WANTED = {"bregman": 1.9, "anchored": 1.9, MINI: 1.7}
SIZES = (1, 1_000, 10_000, 50_000, 200_000)  # numbers in a sum

METHODS: dict[str, Callable[[], AbstractMethod]] = {
    "bregman": lambda: BregmanADMM("logistic"),
    "anchored": lambda: AnchoredADMM("logistic", batch_size="full"),
    MINI: lambda: AnchoredADMM("logistic", batch_size=BATCH),
}


@final
class Apart(AbstractComm):
    """Rank 0 of several that are not there: it works on its part of the rows, and its sums are taken for all."""

    rank, deterministic = 0, False

    def __init__(self, size: int) -> None:
        self.size = size

    def sum_later(self, values: Tensor) -> Pending[Tensor]:
        return Pending(lambda: values)

    def sums_later(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Pending[list[Tensor]]:
        return Pending(lambda: list(tensors))

    def gather_later(self, values: Tensor) -> Pending[Tensor]:
        return Pending(lambda: values.expand(self.size, *values.shape))

    def largest(self, *values: int) -> list[int]:
        return list(values)

    def from_first_(self, values: Tensor) -> Tensor:
        return values


def data(net: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    widths = [int(width) for width in net.split("-")]
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    x = torch.randn(ROWS[net], widths[0])
    return nn.Sequential(*parts[:-1]), x, (x[:, 0] * x[:, 1] > 0).long()


def sweeps(net: str, case: str, ranks: AbstractComm, count: int = SWEEPS) -> list[float]:
    """Seconds of each sweep but the first."""
    model, x, y = data(net)
    method = METHODS[case]()
    problem = from_module(model, method.loss)
    method.comm, times = ranks, []
    method.init(problem, rows_of((x, y), problem).part(ranks.rank, ranks.size), batch_size=None, seed=0)
    for _ in range(count):
        began = perf_counter()
        method.step()
        ranks.largest(0)  # all end together, as in `fit`
        times.append(perf_counter() - began)
    return times[1:]


def ddp(net: str, ranks: AbstractComm) -> list[float]:
    """SGD with momentum, a loop as anybody would write it; each rank takes its share of every batch."""
    model, x, y = data(net)
    share = len(x) // ranks.size
    x, target = x[ranks.rank * share :][:share], y[ranks.rank * share :][:share].float().unsqueeze(1)
    trained = DistributedDataParallel(model) if ranks.size > 1 else model
    optimiser = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9)
    epochs = []
    for _ in range(SWEEPS):
        began = perf_counter()
        for index in torch.randperm(share).split(BATCH // ranks.size):
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(trained(x[index]), target[index]).backward()
            optimiser.step()
        epochs.append(perf_counter() - began)
    return epochs[1:]


def exchange(ranks: AbstractComm, repeats: int = 50) -> dict[str, float]:
    found = {}
    for size in SIZES:
        values, times = torch.ones(size, dtype=torch.float64), []
        for _ in range(repeats):
            began = perf_counter()
            ranks.sum_(values.fill_(1.0))
            times.append(perf_counter() - began)
        found[str(8 * size)] = statistics.median(times)
    return found


def worker(net: str, cases: list[str], apart: int) -> None:
    with comm.start(threads=1) as ranks:
        here = Apart(apart) if apart else ranks
        found: dict[str, Any] = {"seconds": {case: sweeps(net, case, here) for case in cases if case in METHODS}}
        if DDP in cases:
            found["seconds"][DDP] = ddp(net, ranks)
        if ranks.size > 1:
            found["exchange"] = {"memory": exchange(ranks), "gloo": exchange(comm.Group())}
        if ranks.rank == 0:
            print(json.dumps(found))


def launch(net: str, cases: Sequence[str], size: int, apart: bool = False) -> dict[str, Any]:
    """What rank 0 found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.scaling", "--nets", net, "--worker", *cases]
    command += ["--apart", str(size)] if apart else []
    ranks = [
        subprocess.Popen(
            command, env=env if apart else env | place | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {size} ended with {[rank.returncode for rank in ranks]}")
    found: dict[str, Any] = json.loads(said[0])
    return found


def measure(net: str, ranks: int, repeats: int) -> dict[str, Any]:
    """Seconds by case and number of ranks, and those of the exchanges."""
    runs: dict[str, list[dict[str, Any]]] = {"1": [], str(ranks): [], "apart": []}
    for _ in range(repeats):
        runs["1"].append(launch(net, [*METHODS, DDP], 1))
        runs[str(ranks)].append(launch(net, [*METHODS, DDP], ranks))
        runs["apart"].append(launch(net, list(METHODS), ranks, apart=True))
    seconds = {
        case: {
            kind: statistics.median([s for run in found for s in run["seconds"][case]])
            for kind, found in runs.items()
            if case in found[0]["seconds"]
        }
        for case in runs["1"][0]["seconds"]
    }
    crossing = [run["exchange"] for run in runs[str(ranks)]]
    times = {
        way: {size: statistics.median(run[way][size] for run in crossing) for size in sizes}
        for way, sizes in crossing[0].items()
    }
    return {"seconds": seconds, "exchange": times}


def report(net: str, found: dict[str, Any], ranks: int) -> None:
    for case, times in found["seconds"].items():
        ratio, wanted = times["1"] / times[str(ranks)], WANTED.get(case)
        aim = "" if wanted is None else f", wanted {wanted}: {'yes' if ratio >= wanted else 'no'}"
        bound = f", apart {times['1'] / times['apart']:.2f} x" if "apart" in times else ""
        print(f"{net:14} {case:26} {times['1']:8.3f} s -> {times[str(ranks)]:8.3f} s   {ratio:.2f} x{aim}{bound}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs="+", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--apart", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.nets[0], args.worker, args.apart)
        return
    found: dict[str, Any] = {"rows": ROWS, "batch": BATCH, "seconds": {}, "exchange": {}}
    if args.out is not None and args.out.exists():
        found |= json.loads(args.out.read_text(encoding="utf-8"))
    for net in args.nets:
        part = measure(net, args.ranks, args.repeats)
        report(net, part, args.ranks)
        found["seconds"][net], found["exchange"][net] = part["seconds"], part["exchange"]
    if args.out is not None:
        args.out.write_text(json.dumps(found | {"machine": about()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
