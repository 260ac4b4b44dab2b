"""Time of a sweep on 2 ranks of one thread against 1 rank of one thread, and that of SGD in DistributedDataParallel.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --nets 28-300-1 --repeats 5 --out benchmarks/results/scaling.json

Random rows: only time is measured, that of a method's steps. Runs of 1 and of 2 ranks alternate. A figure is the median
over the sweeps of all runs but the first of each, and beside it there is that of the fastest: what else the machine has
to do only adds to them, and a sweep of several ranks ends with the one that was disturbed. Sweeps that look at moments
take longer and are few, so both are taken of each kind by itself, and count as often as they come in a long run.
`apart` are processes that do what a rank does, on their own rows, but take their own sums for those of all: what is
left to gain if sums and waiting cost nothing. `exchange` is the time of sums alone, of vectors of several sizes over
all ranks, by the memory that ranks share and by gloo over loopback, and `others` the share of the cores that processes
took meanwhile which are no part of this. A file that is there already keeps its other nets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from baselines.machine import about
from benchmarks import processes
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, comm
from torch_admm.comm import AbstractComm, Pending
from torch_admm.data import rows_of
from torch_admm.problem import from_module

ROWS = {"28-300-1": 1_000_000, "648-100-50-1": 120_000}
BATCH = 2048
SWEEPS = 6
DDP = f"DDP-SGD, batches of {BATCH}"
MINI = f"anchored, batches of {BATCH}"
MORE_SWEEPS = {"anchored": 13}  # of which some look at moments
WANTED = {"bregman": 1.9, "anchored": 1.9, MINI: 1.7}
PICKS: dict[str, Callable[[list[float]], float]] = {"seconds": statistics.median, "fastest": min}
SIZES = (1, 1_000, 10_000, 50_000, 200_000)  # numbers in a sum

METHODS: dict[str, Callable[[], AbstractMethod]] = {
    "bregman": lambda: BregmanADMM("logistic"),
    "anchored": lambda: AnchoredADMM("logistic", batch_size="full"),
    MINI: lambda: AnchoredADMM("logistic", batch_size=BATCH),
}


class Times(NamedTuple):
    """Seconds of sweeps; those that look at moments, unless all do at times, by themselves."""

    plain: list[float]
    looks: list[float]


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

    def swap_later(self, values: Tensor) -> Pending[Tensor]:
        return Pending(lambda: values)

    def largest(self, *values: int) -> list[int]:
        return list(values)

    def from_first_(self, values: Tensor) -> Tensor:
        return values


def data(net: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    widths = [int(width) for width in net.split("-")]
    parts: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    x = torch.randn(ROWS[net], widths[0])
    return nn.Sequential(*parts[:-1]), x, (x[:, 0] * x[:, 1] > 0).long()


def sweeps(net: str, case: str, ranks: AbstractComm) -> Times:
    """Seconds of each sweep but the first."""
    model, x, y = data(net)
    method = METHODS[case]()
    problem = from_module(model, method.loss)
    method.comm, times = ranks, Times([], [])
    method.init(problem, method.part(problem, rows_of((x, y), problem), None), batch_size=None, seed=0)
    method.step()
    for _ in range(1, MORE_SWEEPS.get(case, SWEEPS)):
        looks = isinstance(method, AnchoredADMM) and method.size == len(x) and method.looks()
        began = perf_counter()
        method.step()
        ranks.largest(0)  # all end together, as in `fit`
        (times.looks if looks else times.plain).append(perf_counter() - began)
    return times


def ddp(net: str, ranks: AbstractComm) -> Times:
    """SGD with momentum, a loop as anybody would write it; each rank takes its share of every batch."""
    model, x, y = data(net)
    share = len(x) // ranks.size
    x, target = x[ranks.rank * share :][:share], y[ranks.rank * share :][:share].float().unsqueeze(1)
    trained = DistributedDataParallel(model) if isinstance(ranks, comm.Group) else model
    optimiser = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9)
    epochs = []
    for _ in range(SWEEPS):
        began = perf_counter()
        for index in torch.randperm(share).split(BATCH // ranks.size):
            optimiser.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(trained(x[index]), target[index]).backward()
            optimiser.step()
        epochs.append(perf_counter() - began)
    return Times(epochs[1:], [])


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
        times = {case: ddp(net, here) if case == DDP else sweeps(net, case, here) for case in cases}
        found: dict[str, Any] = {"times": times}
        if ranks.size > 1:
            found["exchange"] = {"memory": exchange(ranks), "gloo": exchange(comm.Group())}
        print(json.dumps(found))


def launch(net: str, cases: Sequence[str], size: int, apart: bool = False) -> list[dict[str, Any]]:
    """What each rank found; a rank among others, the same as these."""
    options = ["--apart", str(size)] if apart else []
    said = processes.outputs(["benchmarks.scaling", "--nets", net, "--worker", *cases, *options], size, apart=apart)
    found = [json.loads(text) for text in said]
    return [run | {"times": {case: Times(*times) for case, times in run["times"].items()}} for run in found]


def typical(times: Sequence[Times], pick: Callable[[list[float]], float]) -> float:
    """Seconds of a sweep of a long run."""
    plain, looks = (sorted(s for kind in kinds for s in kind) for kinds in zip(*times, strict=True))
    share = 1 / AnchoredADMM("logistic").refresh if looks else 0.0
    return (1 - share) * pick(plain) + (share * pick(looks) if looks else 0.0)


def measure(net: str, ranks: int, repeats: int) -> dict[str, Any]:
    """Seconds by case and number of ranks, and those of the exchanges."""
    others, cases = processes.Others(), [*METHODS, DDP]
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {case: {"1": [], str(ranks): [], "apart": []} for case in cases}
    for _, case in itertools.product(range(repeats), cases):  # one after the other: the machine changes its speed
        runs[case]["1"] += launch(net, [case], 1)
        runs[case][str(ranks)] += launch(net, [case], ranks)
        runs[case]["apart"] += launch(net, [case], ranks, apart=True)
    seconds = {
        name: {
            case: {kind: typical([run["times"][case] for run in found], pick) for kind, found in kinds.items()}
            for case, kinds in runs.items()
        }
        for name, pick in PICKS.items()
    }
    crossing = [run["exchange"] for kinds in runs.values() for run in kinds[str(ranks)]]
    times = {
        way: {size: statistics.median(run[way][size] for run in crossing) for size in sizes}
        for way, sizes in crossing[0].items()
    }
    return seconds | {"exchange": times, "others": others.share()}


def report(net: str, found: dict[str, Any], ranks: int) -> None:
    for case, times in found["seconds"].items():
        ratio, wanted = times["1"] / times[str(ranks)], WANTED.get(case)
        aim = "" if wanted is None else f", wanted {wanted}: {'yes' if ratio >= wanted else 'no'}"
        best = found["fastest"][case]
        print(
            f"{net:14} {case:26} {times['1']:8.3f} s -> {times[str(ranks)]:8.3f} s   {ratio:.2f} x{aim}, "
            f"apart {times['1'] / times['apart']:.2f} x; fastest {best['1'] / best[str(ranks)]:.2f} x, "
            f"apart {best['1'] / best['apart']:.2f} x",
            flush=True,
        )
    print(f"{net:14} other processes took {found['others']:.0%} of the cores meanwhile")


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
    found: dict[str, Any] = {"rows": ROWS, "batch": BATCH, "seconds": {}, "fastest": {}, "exchange": {}, "others": {}}
    if args.out is not None and args.out.exists():
        found |= json.loads(args.out.read_text(encoding="utf-8"))
    for net in args.nets:
        part = measure(net, args.ranks, args.repeats)
        report(net, part, args.ranks)
        for name, figures in part.items():
            found[name][net] = figures
    if args.out is not None:
        args.out.write_text(json.dumps(found | {"machine": about()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
