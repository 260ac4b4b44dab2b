"""One sweep of BregmanADMM against the matrix products that no implementation of it can avoid.

    python -m benchmarks.kernels                        # the two nets of the paper, 1 and 2 threads
    python -m benchmarks.kernels --rows 200000 --repeats 3 --out results.json

The bound multiplies what a sweep must multiply (m_l = W_l a_{l-1}; both products of the a step; z'a; a'a, of which the
blocks below the diagonal are left out) into preallocated outputs, chunk by chunk so that they stay in the cache, for
several chunk sizes; the fastest counts. No entrywise work, no sums, no solves, no state written. Sweep and bound
alternate in one run; medians are shown.
Each case runs in a process of its own, whose peak resident memory is printed beside that of the same process before
any data and beside the size of data and state: the rest is working memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import torch_admm
from torch_admm.data import rows_of
from torch_admm.gram import blocks

CASES = {"28-300-1": 1_000_000, "648-100-50-1": 120_000}
BOUND_CHUNKS = (1024, 2048, 4096, 8192)
TARGET = 1.4


def network(widths: list[int]) -> nn.Sequential:
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def started(widths: list[int], rows: int) -> tuple[torch_admm.BregmanADMM, Tensor]:
    """A method in the middle of a run on synthetic rows."""
    torch.manual_seed(0)
    x = torch.randn(rows, widths[0])
    y = (x[:, 0] * x[:, 1] > 0).long()
    method = torch_admm.BregmanADMM("hinge", warm_start=0)
    problem = torch_admm.from_module(network(widths), method.loss)
    method.init(problem, rows_of((x, y), problem))
    return method, x


def products(method: torch_admm.BregmanADMM, x: Tensor, chunk: int) -> Callable[[], None]:
    """The unavoidable products of a sweep, at this chunk size."""
    L, W = method.problem.L, {l: w[:, :-1].clone() for l, w in method.W.items()}
    a, z = {0: x, **method.a}, method.z
    m = {l: torch.empty(chunk, w.shape[0]) for l, w in W.items()}
    back = {l: torch.empty(chunk, w.shape[1]) for l, w in W.items()}
    R = {l: torch.empty(sorted(w.shape)) for l, w in W.items()}
    G = {l: [torch.empty(hi - lo, w.shape[1] - lo) for lo, hi in blocks(w.shape[1])] for l, w in W.items()}

    def forward(before: Tensor, l: int) -> None:
        if len(W[l]) == 1:  # several times faster than a product with one column
            torch.mv(before, W[l][0], out=m[l].view(-1))
        else:
            torch.mm(before, W[l].T, out=m[l])

    def run() -> None:
        for start in range(0, len(x) - chunk + 1, chunk):
            for l in range(1, L + 1):
                before, after = a[l - 1][start : start + chunk], z[l][start : start + chunk]
                forward(before, l)
                thin, wide = sorted((before, after), key=lambda t: t.shape[1])
                torch.mm(thin.T, wide, out=R[l])
                if l > 1:
                    forward(before, l)
                    torch.mm(m[l], W[l], out=back[l])
                    for out, (lo, hi) in zip(G[l], blocks(before.shape[1]), strict=True):
                        torch.mm(before[:, lo:hi].T, before[:, lo:], out=out)

    return run


def seconds(run: Callable[[], None]) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


def peak_mib() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measure(net: str, rows: int, threads: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    torch.linalg.cholesky(torch.eye(300) @ torch.eye(300))  # loads what torch loads on first use
    idle = peak_mib()
    method, x = started([int(w) for w in net.split("-")], rows)
    runs = {c: products(method, x, c) for c in BOUND_CHUNKS if c <= rows}
    method.sweep()
    sweep: list[float] = []
    bound: dict[int, list[float]] = {c: [] for c in runs}
    for _ in range(repeats):
        sweep.append(seconds(method.sweep))
        for c, run in runs.items():
            bound[c].append(seconds(run))
    best = min(statistics.median(times) for times in bound.values())
    state = sum(t.nbytes for t in [*method.a.values(), *method.z.values(), method.lam])
    return {
        "net": net,
        "rows": rows,
        "threads": threads,
        "sweep_seconds": statistics.median(sweep),
        "bound_seconds": best,
        "ratio": statistics.median(sweep) / best,
        "data_and_state_mib": round((state + x.nbytes) / 2**20),
        "idle_mib": idle,
        "peak_mib": peak_mib(),
    }


def line(r: dict[str, Any]) -> str:
    seconds = f"{r['sweep_seconds']:7.3f}s {r['bound_seconds']:7.3f}s {r['ratio']:6.2f}"
    memory = f"{r['data_and_state_mib']:7,} MiB {r['idle_mib']:5,} MiB {r['peak_mib']:5,} MiB"
    return f"{r['net']:14} {r['rows']:9,} {r['threads']:7} {seconds} {memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="instead of each net's own number")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="write the figures here as JSON")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args.rows, args.threads[0], args.repeats)))
        return
    print(f"torch {torch.__version__}, {platform.machine()}; target: ratio <= {TARGET}")
    heads = f"{'net':14} {'rows':>9} {'threads':>7} {'sweep':>8} {'bound':>8} {'ratio':>6}"
    print(f"{heads} {'data+state':>11} {'idle':>9} {'peak':>9}")
    results = []
    for net, rows in CASES.items():
        for threads in args.threads:
            options = ["--rows", args.rows or rows, "--threads", threads, "--repeats", args.repeats]
            command = [sys.executable, "-m", "benchmarks.kernels", "--case", net, *map(str, options)]
            r = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            results.append(r)
            print(line(r), flush=True)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "target": TARGET, "results": results}, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
