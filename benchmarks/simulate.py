"""A model of a sweep on up to 10,000 ranks, from measured compute times and the latency and bandwidth of a network.

    python -m benchmarks.simulate --data-dir .cache/prepared --out benchmarks/results/simulate.json \
        --plot docs/simulate.png

    seconds(p) = work(rows / p) + sum over buffers (2 ceil(log2 p) latency + 2 (p - 1) / p bytes / bandwidth)

`work(n)`, what a rank does with n rows, its solves included, is measured in one process that works on the part of
rank 0 of p and takes its own sums for those of all (`benchmarks.scaling.Apart`), for p from 3 to 10,000; in between it
is taken to be linear, and beyond the most rows as well. Latency and bandwidth are those of the memory that ranks share
here, and those of a cluster that is given: by default 2 microseconds and 8 GB/s, about what MPI gives on an HPC
interconnect. With those from here the model is held against real runs of 1 and 2 ranks, made in between; none of them,
and no run with as many rows a rank, is part of the fit. Only then are ranks many: rows are those of the paper
(10,500,000 and 120,290). Times to its targets take the sweeps that the real data under --data-dir need, of which there
are fewer rows. Not in the model: ranks that are slower than others, and several that share the memory of a machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

import torch_admm
from baselines.machine import about
from baselines.problems import load
from baselines.published import PUBLISHED
from benchmarks.kernels import network as net_of
from benchmarks.scaling import ROWS, Apart, launch, sweeps
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, Target
from torch_admm.sums import SHARED

CASES = ("bregman", "anchored")
TRAINED: dict[str, Callable[[], AbstractMethod]] = {
    "bregman": lambda: BregmanADMM("logistic", gamma=1.0, ridge=0.01),
    "anchored": lambda: AnchoredADMM("logistic", batch_size="full"),
}
PAPER = {"28-300-1": ("higgs", 10_500_000, 0.64), "648-100-50-1": ("svhn", 120_290, 0.95)}
FITTED = (3, 8, 24, 96, 384, 1_536, 10_000)  # ranks, of the rows of `benchmarks.scaling`
RANKS = (1, 2, 4, 8, 24, 64, 128, 256, 512, 1_024, 2_048, 4_096, 7_200, 10_000)
STATUS_BYTES = 8  # of the message by which all ranks end together


@final
@dataclass(frozen=True)
class Network:
    """What one hop costs, and how fast bytes go."""

    latency: float
    bandwidth: float

    def waits(self, ranks: int, size: int) -> float:
        """By recursive halving, then doubling."""
        return 2 * math.ceil(math.log2(ranks)) * self.latency if size else 0.0

    def moves(self, ranks: int, size: int) -> float:
        return 2 * (ranks - 1) / ranks * size / self.bandwidth

    def sum(self, ranks: int, size: int) -> float:
        return self.waits(ranks, size) + self.moves(ranks, size)


@final
@dataclass(frozen=True)
class Work:
    """Seconds of a sweep by the rows of a rank, from measured points, in order of rows."""

    rows: Sequence[float]
    seconds: Sequence[float]

    @property
    def fixed(self) -> float:
        """What few rows take: solves, and calls that have hardly anything to do."""
        return self.seconds[0]

    def __call__(self, rows: float) -> float:
        if rows <= self.rows[0]:
            return self.fixed
        i = min(bisect(self.rows, rows), len(self.rows) - 1)
        (n, m), (s, t) = (values[i - 1 : i + 1] for values in (self.rows, self.seconds))
        return s + (t - s) * (rows - n) / (m - n)


@final
@dataclass(frozen=True)
class Model:
    """One method on one net."""

    work: Work
    buffers: Sequence[int]  # bytes of each sum of a sweep

    def parts(self, rows: int, ranks: int, network: Network) -> dict[str, float]:
        seconds = self.work(math.ceil(rows / ranks))
        fixed = min(seconds, self.work.fixed)
        return {
            "rows": seconds - fixed,
            "solves and calls": fixed,
            "latency": sum(network.waits(ranks, size) for size in self.buffers),
            "bandwidth": sum(network.moves(ranks, size) for size in self.buffers),
        }

    def seconds(self, rows: int, ranks: int, network: Network) -> float:
        return sum(self.parts(rows, ranks, network).values())


def buffers(net: str, case: str) -> list[int]:
    """Bytes of what crosses in a sweep: docs/distributed.md. Of anchored ones, those that look at no moments."""
    widths = [int(width) for width in net.split("-")]
    pairs = list(itertools.pairwise(widths))
    R = [outputs * (inputs + 1) for inputs, outputs in pairs]
    if case == "anchored":
        return [8 * sum(R), STATUS_BYTES]
    G = [0, *(n * (n + 1) // 2 + n for n in widths[1:-1])]
    shared = [4 * r for r, (inputs, _) in zip(R, pairs, strict=True) if r * (inputs + 1) > SHARED]
    return [*(8 * (r + g) for r, g in zip(R, G, strict=True)), *shared, STATUS_BYTES]


def measured_network(exchange: Mapping[str, float]) -> Network:
    """From sums over two ranks: the smallest tells the latency, the largest the bandwidth."""
    sizes = sorted(map(int, exchange))
    least, most = exchange[str(sizes[0])], exchange[str(sizes[-1])]
    return Network(least / 2, (sizes[-1] - sizes[0]) / max(1e-9, most - least))


def measure(net: str, repeats: int) -> dict[str, Any]:
    """Seconds by case: of a rank by itself, by the ranks that it has beside it, and of real runs of 1 and 2 ranks.

    Of the fastest sweeps: what else the machine has to do only adds to them.
    """
    alone = {case: {p: list[float]() for p in FITTED} for case in CASES}
    real = {case: {size: list[float]() for size in (1, 2)} for case in CASES}
    exchanges = []
    for _ in range(repeats):
        for size in (1, 2):
            found = launch(net, CASES, size)[0]
            exchanges += [found["exchange"]["memory"]] if size > 1 else []
            for case in CASES:
                real[case][size] += found["times"][case].plain
        for case, p in itertools.product(CASES, FITTED):
            alone[case][p] += sweeps(net, case, Apart(p)).plain
    middle = {n: statistics.median(e[n] for e in exchanges) for n in exchanges[0]}
    return {
        "alone": {case: {str(p): min(v) for p, v in by.items()} for case, by in alone.items()},
        "real": {case: {str(p): min(v) for p, v in by.items()} for case, by in real.items()},
        "network": vars(measured_network(middle)),
    }


def model(net: str, case: str, alone: Mapping[str, float]) -> Model:
    points = sorted((ROWS[net] / int(p), seconds) for p, seconds in alone.items())
    rows, seconds = zip(*points, strict=True)
    return Model(Work(rows, list(itertools.accumulate(seconds, max))), buffers(net, case))  # more rows, no less time


def validated(net: str, made: Model, network: Network, real: Mapping[str, float]) -> dict[str, Any]:
    """The model against runs of real ranks."""
    found = {}
    for ranks, seconds in real.items():
        said = made.seconds(ROWS[net], int(ranks), network)
        found[ranks] = {"measured": seconds, "model": said, "off": said / seconds - 1}
    return found


def scaled(rows: int, made: Model, network: Network, needed: int) -> dict[str, Any]:
    """Time of a sweep, time to the target and efficiency by ranks; where efficiency falls below a half, and by what."""
    alone = made.seconds(rows, 1, network)
    points: list[dict[str, Any]] = []
    for ranks in RANKS:
        parts = made.parts(rows, ranks, network)
        total = sum(parts.values())
        efficiency = alone / ranks / total
        points.append({"ranks": ranks, "sweep": total, "to_target": needed * total, "efficiency": efficiency} | parts)
    ends = next((p for p in points if p["efficiency"] < 0.5), None)
    why = None if ends is None else max(("solves and calls", "latency", "bandwidth"), key=lambda part: ends[part])
    return {"sweeps": needed, "points": points, "half_at": None if ends is None else ends["ranks"], "because_of": why}


def sweeps_needed(net: str, case: str, folder: Path, seeds: int = 3) -> int:
    """Until the paper's accuracy, on the real rows there are."""
    problem, _, target = PAPER[net]
    data = load(problem, folder)
    counts = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        trained = net_of([int(width) for width in net.split("-")])
        stop = Target(target, "test_accuracy")
        options: dict[str, Any] = {"max_sweeps": 100, "evaluate": data.test, "stop": stop, "seed": seed, "sinks": ()}
        history = torch_admm.fit(trained, data.train, TRAINED[case](), **options).history
        counts.append(int(history[-1]["sweep"]))
    return int(statistics.median(counts))


def simulate(net: str, found: Mapping[str, Any], given: Network, needed: Mapping[str, int]) -> dict[str, Any]:
    here = Network(**found["network"])
    made = {case: model(net, case, found["alone"][case]) for case in CASES}
    networks = {"given": given, "measured": here}
    return {
        "measured": found,
        "rows": PAPER[net][1],
        "target": PAPER[net][2],
        "validation": {case: validated(net, made[case], here, found["real"][case]) for case in CASES},
        "curves": {
            case: {name: scaled(PAPER[net][1], made[case], way, needed[case]) for name, way in networks.items()}
            for case in CASES
        },
    }


def plot(found: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PAPER), figsize=(11, 4.4), layout="constrained")
    colours = {"bregman": "tab:blue", "anchored": "tab:orange"}
    for axis, (net, (problem, rows, target)) in zip(axes, PAPER.items(), strict=True):
        for case, curves in found["nets"][net]["curves"].items():
            for name, style in (("given", "-"), ("measured", ":")):
                points = curves[name]["points"]
                ranks, times = ([p[key] for p in points] for key in ("ranks", "to_target"))
                label = f"model, {case}, {curves[name]['sweeps']} sweeps, {name} network"
                axis.plot(ranks, times, style, color=colours[case], label=label)
            ideal = [curves["given"]["points"][0]["to_target"] / p for p in RANKS]
            axis.plot(RANKS, ideal, color=colours[case], linewidth=0.6, alpha=0.5)
        for said, mark in zip(PUBLISHED[problem], "*sd^", strict=True):
            if said.seconds is not None:
                label = f"paper, {said.method}, {said.where}"
                axis.plot(said.cores or 1, said.seconds, f"k{mark}", markersize=8 if said.cores else 5, label=label)
        axis.set(xscale="log", yscale="log", xlabel="ranks (GPUs stand at 1)", ylabel=f"seconds to {target:.0%}")
        axis.set_title(f"{problem.upper()}, {net}, {rows:,} rows")
        axis.legend(fontsize=6.5, loc="lower left")
    figure.savefig(path, dpi=130)


def report(net: str, found: Mapping[str, Any]) -> None:
    for case, ranks in found["validation"].items():
        for count, v in ranks.items():
            said = f"model {v['model']:.3f} s, measured {v['measured']:.3f} s, {v['off']:+.1%}"
            print(f"{net:14} {case:9} {count} rank(s): {said}")
        for name, curve in found["curves"][case].items():
            best, last = min(curve["points"], key=lambda p: p["sweep"]), curve["points"][-1]
            ends = f"half efficiency from {curve['half_at']} ranks on, by {curve['because_of']}"
            print(f"{net:14} {case:9} {name:8} network: fastest sweep {best['sweep']:.2g} s on {best['ranks']} ranks;")
            print(f"{'':14} {ends}; 10,000: {last['efficiency']:.1%}, target in {last['to_target']:.2g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=PAPER, default=list(PAPER))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--latency", type=float, default=2e-6, help="of the given network, in seconds")
    parser.add_argument("--bandwidth", type=float, default=8e9, help="of the given network, in bytes a second")
    parser.add_argument("--data-dir", type=Path, required=True, help="of the prepared files")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = Network(args.latency, args.bandwidth)
    found: dict[str, Any] = {"nets": {}}
    if args.out is not None and args.out.exists():
        found = json.loads(args.out.read_text(encoding="utf-8"))
    for net in args.nets:
        needed = {case: sweeps_needed(net, case, args.data_dir) for case in CASES}
        found["nets"][net] = simulate(net, measure(net, args.repeats), given, needed)
        report(net, found["nets"][net])
    found |= {"machine": about(), "given_network": vars(given)}
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
