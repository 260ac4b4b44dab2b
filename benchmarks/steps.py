"""What a step of AnchoredADMM costs: full batch against its unavoidable products, mini-batch against an SGD step.

    python -m benchmarks.steps
    python -m benchmarks.steps --repeats 3 --out results.json

Full batch: the products m_l = W_l a_{l-1}, r_l'a_{l-1} and r_l W_l into preallocated outputs, chunk by chunk, for
several chunk sizes; the fastest counts. `with G` adds a_l'a_l, as benchmarks.kernels has it: what a sweep must multiply
that takes its second moments from all rows every time. Ours looks at them once in 40 sweeps. Mini-batch:
torch.optim.SGD with momentum on the same net and the same rows, without weight averaging (ours includes it). Both
alternate in one run; medians for sums of 40 mini-batch steps, so that every refresh of the second moments is in; of
full-batch sweeps, those between refreshes. Random rows: only time is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import baselines  # noqa: F401 (loads torch's compiler off the clock)
import torch_admm
from benchmarks.kernels import BOUND_CHUNKS, network, seconds
from torch_admm.anchored import EARLY
from torch_admm.data import rows_of
from torch_admm.gram import blocks

FULL = {"28-300-1": 1_000_000, "648-100-50-1": 120_000}
MINI = {"28-300-1": 512, "648-100-50-1": 512, "784-256-10": 512}
TARGETS = {"full": 1.3, "mini": 1.5}
MINI_STEPS = 40  # one refresh of the moments among them


def data(widths: list[int], rows: int) -> tuple[Tensor, Tensor, str]:
    torch.manual_seed(0)
    x, outputs = torch.randn(rows, widths[0]), widths[-1]
    if outputs == 1:
        return x, (x[:, 0] * x[:, 1] > 0).long(), "logistic"
    return x, torch.randint(0, outputs, (rows,)), "cross_entropy"


def products(W: dict[int, Tensor], x: Tensor, chunk: int, with_G: bool) -> Callable[[], None]:
    """The unavoidable products of a full-batch sweep, on values that stay in the cache."""
    W = {l: w[:, :-1].clone() for l, w in W.items()}
    a = {l: torch.randn(chunk, w.shape[1]) for l, w in W.items()}
    m = {l: torch.randn(chunk, len(w)) for l, w in W.items()}
    R = {l: torch.empty(sorted(w.shape)) for l, w in W.items()}
    G = {l: blocks(w.shape[1]) for l, w in W.items() if with_G and l > 1}

    def run() -> None:
        for start in range(0, len(x) - chunk + 1, chunk):
            a[1] = x[start : start + chunk]
            for l, w in W.items():
                torch.mv(a[l], w[0], out=m[l].view(-1)) if len(w) == 1 else torch.mm(a[l], w.T, out=m[l])
            for l, w in W.items():
                thin, wide = sorted((a[l], m[l]), key=lambda t: t.shape[1])
                torch.mm(thin.T, wide, out=R[l])
                for lo, hi in G.get(l, ()):
                    a[l][:, lo:hi].T @ a[l][:, lo:]
                if l > 1:
                    torch.mm(m[l], w, out=a[l])

    return run


Kinds = dict[str, list[Callable[[], None]]]


def alternate(kinds: Kinds, repeats: int) -> dict[str, float]:
    """Of each kind the seconds of the fastest, medians."""
    times: dict[str, list[list[float]]] = {kind: [[] for _ in runs] for kind, runs in kinds.items()}
    for _ in range(repeats):
        for kind, runs in kinds.items():
            for run, kept in zip(runs, times[kind], strict=True):
                kept.append(seconds(run))
    return {kind: min(statistics.median(each) for each in kept) for kind, kept in times.items()}


def full(net: str, rows: int, repeats: int) -> dict[str, float]:
    widths = [int(w) for w in net.split("-")]
    x, y, loss = data(widths, rows)
    method = torch_admm.AnchoredADMM(loss, batch_size="full")
    problem = torch_admm.from_module(network(widths), method.loss)
    method.init(problem, rows_of((x, y), problem))
    method.step()
    method.steps = max(EARLY) + 1  # the early refreshes are behind; later ones come once in 40 sweeps
    other, with_G = ([products(method.W, x, c, G) for c in BOUND_CHUNKS] for G in (False, True))
    return alternate({"ours": [method.step], "other": other, "with_G": with_G}, repeats)


def mini(net: str, size: int, repeats: int) -> dict[str, float]:
    widths = [int(w) for w in net.split("-")]
    x, y, loss = data(widths, size)
    bound = torch_admm.AnchoredADMM(loss).bind(network(widths))
    model = network(widths)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    criterion: nn.Module = nn.CrossEntropyLoss() if loss == "cross_entropy" else nn.BCEWithLogitsLoss()
    target = y if loss == "cross_entropy" else y.float().unsqueeze(1)

    def sgd() -> None:
        for _ in range(MINI_STEPS):
            optimiser.zero_grad()
            criterion(model(x), target).backward()
            optimiser.step()

    def ours() -> None:
        for _ in range(MINI_STEPS):
            bound.step(x, y)

    for run in (ours, sgd):
        run()
    times = alternate({"ours": [ours], "other": [sgd]}, 5 * repeats)
    return {kind: time / MINI_STEPS for kind, time in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    heads = f"{'kind':5} {'net':14} {'rows':>9} {'threads':>7} {'ours':>10} {'other':>10} {'ratio':>6} {'target':>6}"
    print(f"{heads} {'with G':>10} {'ratio':>6}")
    for kind, cases, measure in (("full", FULL, full), ("mini", MINI, mini)):
        for net, rows in cases.items():
            for threads in args.threads:
                torch.set_num_threads(threads)
                found = measure(net, rows, args.repeats)
                results.append({"kind": kind, "net": net, "rows": rows, "threads": threads, **found})
                ours, *others = found.values()
                line = f"{kind:5} {net:14} {rows:9,} {threads:7} {ours * 1e3:8.2f}ms {others[0] * 1e3:8.2f}ms"
                line += f" {ours / others[0]:6.2f} {TARGETS[kind]:6}"
                print(line, *(f"{time * 1e3:8.2f}ms {ours / time:6.2f}" for time in others[1:]), flush=True)
    if args.out:
        record = {"torch": torch.__version__, "targets": TARGETS, "results": results}
        args.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
