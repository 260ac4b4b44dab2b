"""A model of a sweep on up to 10,000 ranks, from measured compute rates and the latency and bandwidth of a network.

    python -m benchmarks.scaling --out benchmarks/results/scaling.json
    python -m benchmarks.simulate --scaling benchmarks/results/scaling.json --out benchmarks/results/simulate.json \
        --plot benchmarks/results/simulate.png

    seconds(p) = rows(p) rate + fixed + sum over buffers (2 log2(p) latency + 2 (p - 1) / p bytes / bandwidth)

`rate` and `fixed` (factors and solves that every rank makes) come from one process: the sweep of all rows and that of a
few. Latency and bandwidth are those measured by `benchmarks.scaling` over loopback, and those of a cluster that is
given: by default 2 microseconds and 8 GB/s, about what MPI gives on an HPC interconnect. With the measured ones the
model is held against the measured sweeps of 1 and 2 ranks. Only then are ranks many: rows are those of the paper
(10,500,000 and 120,290), and times to its targets take the number of sweeps that is given by --sweeps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from baselines.machine import about
from baselines.published import PUBLISHED
from benchmarks.scaling import ROWS, data
from torch_admm import AbstractMethod, AnchoredADMM, BregmanADMM, fit

METHODS: dict[str, Callable[[], AbstractMethod]] = {
    "bregman": lambda: BregmanADMM("logistic"),
    "anchored": lambda: AnchoredADMM("logistic", batch_size="full"),
}
PAPER = {"28-300-1": ("higgs", 10_500_000, 0.64), "648-100-50-1": ("svhn", 120_290, 0.95)}
FEW, SWEEPS = 2_400, 5
RANKS = [1, 2, 4, 8, 24, 64, 128, 256, 512, 1024, 2048, 4096, 7200, 10_000]
STATUS_BYTES = 16  # of the message by which all ranks end together


@final
@dataclass(frozen=True)
class Network:
    """What one hop costs, and how fast bytes go."""

    latency: float
    bandwidth: float

    def sum(self, ranks: int, size: int) -> float:
        if ranks == 1:
            return 0.0
        return 2 * math.log2(ranks) * self.latency + 2 * (ranks - 1) / ranks * size / self.bandwidth


@final
@dataclass(frozen=True)
class Cost:
    """Of a sweep on one rank: seconds a row, and seconds whatever the rows."""

    rate: float
    fixed: float

    def parts(self, rows: int, ranks: int, buffers: list[int], network: Network) -> dict[str, float]:
        latency = sum(Network(network.latency, math.inf).sum(ranks, size) for size in buffers)
        bandwidth = sum(Network(0.0, network.bandwidth).sum(ranks, size) for size in buffers)
        return {
            "rows": math.ceil(rows / ranks) * self.rate,
            "solves": self.fixed,
            "latency": latency,
            "bandwidth": bandwidth,
        }


def buffers(net: str, method: str) -> list[int]:
    """Bytes of what crosses in a sweep: docs/distributed.md."""
    widths = [int(width) for width in net.split("-")]
    R = [outputs * (inputs + 1) for inputs, outputs in itertools.pairwise(widths)]
    G = [0, *(n * (n + 1) // 2 + n for n in widths[1:-1])]
    sums = [sum(R)] if method == "anchored" else [r + g for r, g in zip(R, G, strict=True)]
    return [*(8 * n for n in sums), STATUS_BYTES]


def sweep_seconds(net: str, method: AbstractMethod, rows: int) -> float:
    model, x, y = data(net)
    history = fit(model, (x[:rows], y[:rows]), method, max_sweeps=SWEEPS, sinks=(), restore_best=False).history
    clock = [row["seconds"] for row in history]
    return statistics.median(after - before for before, after in itertools.pairwise(clock))


def measured_cost(net: str, method: str) -> Cost:
    rows = ROWS[net]  # not fewer: from some number of rows on, Bregman's products are of another dtype
    many, few = sweep_seconds(net, METHODS[method](), rows), sweep_seconds(net, METHODS[method](), FEW)
    rate = (many - few) / (rows - FEW)
    return Cost(rate, max(0.0, few - rate * FEW))


def measured_network(exchange: Mapping[str, float]) -> Network:
    """From sums over two ranks: the smallest tells the latency, the largest the bandwidth."""
    sizes = sorted(map(int, exchange))
    least, most = exchange[str(sizes[0])], exchange[str(sizes[-1])]
    return Network(least / 2, (sizes[-1] - sizes[0]) / max(1e-9, most - least))


def validated(net: str, method: str, cost: Cost, network: Network, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The model against the sweeps of 1 and 2 ranks in `benchmarks.scaling`, none of which it was made from."""
    found = {}
    for ranks, measured in seconds.items():
        model = sum(cost.parts(ROWS[net], int(ranks), buffers(net, method), network).values())
        found[ranks] = {"measured": measured, "model": model, "off": model / measured - 1}
    return found


def scaled(net: str, method: str, cost: Cost, network: Network, sweeps: int) -> dict[str, Any]:
    _, rows, target = PAPER[net]
    points: list[dict[str, Any]] = []
    for ranks in RANKS:
        parts = cost.parts(rows, ranks, buffers(net, method), network)
        total = sum(parts.values())
        alone = rows * cost.rate + cost.fixed
        points.append({"ranks": ranks, "sweep": total, "efficiency": alone / ranks / total, "parts": parts})
    ends = next((p for p in points if p["efficiency"] < 0.5), None)
    why = None if ends is None else max(("solves", "latency", "bandwidth"), key=lambda part: ends["parts"][part])
    return {
        **{"rows": rows, "target": target, "sweeps": sweeps, "points": points},
        "half_efficiency": None if ends is None else ends["ranks"],
        "because_of": why,
    }


def plot(found: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PAPER), figsize=(11, 4.2))
    for axis, (net, (problem, _, target)) in zip(axes, PAPER.items(), strict=True):
        for name, curve in found["curves"][net].items():
            points = curve["points"]
            times = [curve["sweeps"] * p["sweep"] for p in points]
            style = "-" if "given" in name else ":"
            axis.plot([p["ranks"] for p in points], times, style, label=f"{name}, {curve['sweeps']} sweeps")
        for said in PUBLISHED[problem]:
            if said.seconds is not None:
                axis.plot(said.cores or 1, said.seconds, "k*" if said.cores else "kx")
                axis.annotate(f"paper: {said.method}, {said.where}", (said.cores or 1, said.seconds), fontsize=6)
        axis.set(
            xscale="log", yscale="log", xlabel="ranks", ylabel=f"seconds to {target:.0%}", title=f"{problem} {net}"
        )
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def simulate(scaling: Mapping[str, Any], given: Network, sweeps: Mapping[str, int]) -> dict[str, Any]:
    here = measured_network(scaling["exchange"])
    found: dict[str, Any] = {"machine": about(), "measured_network": vars(here), "given_network": vars(given)}
    found |= {"costs": {}, "validation": {}, "curves": {}}
    for net in PAPER:
        costs = {method: measured_cost(net, method) for method in METHODS}
        found["costs"][net] = {method: vars(cost) for method, cost in costs.items()}
        found["validation"][net] = {
            method: validated(net, method, cost, here, scaling["seconds"][net][method])
            for method, cost in costs.items()
        }
        found["curves"][net] = {
            f"{method}, {name} network": scaled(net, method, cost, network, sweeps[f"{net}/{method}"])
            for method, cost in costs.items()
            for name, network in (("given", given), ("measured", here))
        }
    return found


def report(found: Mapping[str, Any]) -> None:
    for net, methods in found["validation"].items():
        for method, ranks in methods.items():
            for count, v in ranks.items():
                said = f"model {v['model']:.3f} s, measured {v['measured']:.3f} s, {v['off']:+.1%}"
                print(f"{net:14} {method:9} {count} rank(s): {said}")
    for net, curves in found["curves"].items():
        for name, curve in curves.items():
            best = min(curve["points"], key=lambda p: p["sweep"])
            last = curve["points"][-1]
            ends = f"half efficiency from {curve['half_efficiency']} ranks on, by {curve['because_of']}"
            print(f"{net:14} {name:27} fastest sweep {best['sweep']:.2g} s on {best['ranks']} ranks; {ends};", end=" ")
            print(f"10,000 ranks: {last['efficiency']:.1%}, target in {curve['sweeps'] * last['sweep']:.2g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scaling", type=Path, required=True, help="what benchmarks.scaling wrote")
    parser.add_argument("--latency", type=float, default=2e-6, help="of the given network, in seconds")
    parser.add_argument("--bandwidth", type=float, default=8e9, help="of the given network, in bytes a second")
    parser.add_argument("--sweeps", nargs="+", required=True, metavar="NET/METHOD=N", help="to the target")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sweeps = {name: int(count) for name, _, count in (text.partition("=") for text in args.sweeps)}
    scaling = json.loads(args.scaling.read_text(encoding="utf-8"))
    found = simulate(scaling, Network(args.latency, args.bandwidth), sweeps)
    report(found)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
