"""The baselines against loops written by hand with bare torch: nobody loses a comparison by being wrapped.

    python -m benchmarks.baselines --data-dir data --out baselines.json
    python -m benchmarks.baselines --problems digits

Both train from the same weights on as many rows, block by block in turn: an epoch of SGD (momentum) or Adam, some
iterations of L-BFGS (strong Wolfe) or CG on all rows. Shown are medians of the seconds a step and of the ratio of two
blocks in turn; at most 1.1 is aimed at. By hand means torch's own losses, fused optimisers and, for full gradients, all
rows at once or in chunks, whichever is faster. A bare optimiser evaluates once more, at every call, where its last step
ended; ours remembers that, which is why its ratio may be below 1. L-BFGS and CG also run in float64, where rounding is
not amplified; there both ought to end at the same loss, within 1e-5, after as many iterations.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from baselines import CG, LBFGS, SGD, Adam, ConjugateGradients, machine, problems
from torch_admm import AbstractMethod, from_module
from torch_admm.data import rows_of

TARGET, WITHIN = 1.1, 1e-5
BATCH, BLOCKS, ITERATIONS = 256, 7, 4  # rows; blocks a contestant; L-BFGS or CG iterations a block
LOSS_BLOCKS = 5

Block = Callable[[], int]  # trains for a while and gives the number of steps


def logistic(z: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(z.squeeze(1), y.to(z.dtype))


CRITERIA: dict[str, Callable[..., Tensor]] = {"logistic": logistic, "cross_entropy": functional.cross_entropy}


def batches_by_hand(kind: Any, model: nn.Module, x: Tensor, y: Tensor, criterion: Any, **options: Any) -> Block:
    optimiser = kind(model.parameters(), fused=True, **options)
    generator = torch.Generator().manual_seed(0)

    def epoch() -> int:
        parts = torch.randperm(len(x), generator=generator).split(BATCH)
        for rows in parts:
            optimiser.zero_grad()
            criterion(model(x.index_select(0, rows)), y.index_select(0, rows)).backward()
            optimiser.step()
        return len(parts)

    return epoch


def all_rows_by_hand(optimiser: Any, model: nn.Module, x: Tensor, y: Tensor, criterion: Any, chunk: int) -> Block:
    def closure() -> Tensor:
        optimiser.zero_grad()
        total = torch.zeros((), dtype=x.dtype)
        for some, labels in zip(x.split(chunk), y.split(chunk), strict=True):
            loss = criterion(model(some), labels) * (len(some) / len(x))
            loss.backward()
            total += loss.detach()
        return total

    def iterations() -> int:
        optimiser.step(closure)
        return ITERATIONS

    return iterations


def by_hand(name: str, model: nn.Module, x: Tensor, y: Tensor, criterion: Any, chunk: int) -> Block:
    if name in BATCHED:
        kind, options = BATCHED[name]
        return batches_by_hand(kind, model, x, y, criterion, **options)
    return all_rows_by_hand(SEARCHING[name](model.parameters()), model, x, y, criterion, chunk)


BATCHED: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 1e-3}),
}
SEARCHING: dict[str, Callable[..., Any]] = {
    "lbfgs": lambda p: torch.optim.LBFGS(
        p, max_iter=ITERATIONS, max_eval=26 * ITERATIONS, history_size=20, line_search_fn="strong_wolfe"
    ),
    "cg": lambda p: ConjugateGradients(p, max_iter=ITERATIONS),
}
WRAPPED: dict[str, Callable[[str], AbstractMethod]] = {
    "sgd": lambda loss: SGD(loss, lr=0.1, batch_size=BATCH),
    "adam": lambda loss: Adam(loss, batch_size=BATCH),
    "lbfgs": LBFGS,
    "cg": CG,
}


def wrapped(method: AbstractMethod, model: nn.Module, x: Tensor, y: Tensor, *, batched: bool) -> Block:
    problem = from_module(model, method.loss)
    method.init(problem, rows_of((x, y), problem), batch_size=None, seed=0)

    def block() -> int:
        for _ in range(1 if batched else ITERATIONS):
            method.step()
            problem.write(method.weights())  # as fit does after each sweep
        return -(-len(x) // BATCH) if batched else ITERATIONS

    return block


def timed(block: Block) -> float:
    begin = perf_counter()
    steps = block()
    return (perf_counter() - begin) / steps


def measure(name: str, task: problems.Task, data: problems.Data) -> dict[str, Any]:
    """Blocks in turn; the first of each warms up. For L-BFGS and CG, by hand in one piece and in chunks."""
    (x, y), criterion, batched = data.train, CRITERIA[task.loss], name in BATCHED
    mine, *others = (problems.network(task.widths, 0) for _ in range(3))
    ours = wrapped(WRAPPED[name](task.loss), mine, x, y, batched=batched)
    chunks = [len(x)] if batched else [len(x), 4096]
    theirs = [by_hand(name, model, x, y, criterion, chunk) for model, chunk in zip(others, chunks, strict=False)]
    times = [[timed(block) for block in (ours, *theirs)] for _ in range(BLOCKS)][1:]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    faster = min(range(1, len(medians)), key=medians.__getitem__)
    return {
        **{"method": name, "net": task.net, "rows": len(x), "ours": medians[0], "by_hand": medians[faster]},
        **{"ratio": statistics.median(t[0] / t[faster] for t in times), "chunk": chunks[faster - 1]},
        **({} if batched else {"losses": losses(name, task, x.double(), y)}),
    }


def losses(name: str, task: problems.Task, x: Tensor, y: Tensor) -> list[float]:
    """Where both end in float64."""
    criterion, (mine, other) = CRITERIA[task.loss], (problems.network(task.widths, 0).double() for _ in range(2))
    ours = wrapped(WRAPPED[name](task.loss), mine, x, y, batched=False)
    theirs = by_hand(name, other, x, y, criterion, len(x))
    for _ in range(LOSS_BLOCKS):
        ours()
        theirs()
    with torch.no_grad():
        return [float(criterion(model(x), y)) for model in (mine, other)]


def results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for problem in args.problems:
        data = problems.load(problem, args.data_dir)
        for name in args.methods:
            found = {"problem": problem, **measure(name, problems.task(problem), data)}
            print(_line(found), flush=True)
            yield found


def _line(r: dict[str, Any]) -> str:
    ours, theirs = r.get("losses", (0.0, 0.0))
    step, loss = ("iteration", f", loss {ours:.7f} and {theirs:.7f}") if "losses" in r else ("batch", "")
    times = f"{r['ours'] * 1e3:.3f} ms, by hand {r['by_hand'] * 1e3:.3f} ms a {step}, ratio {r['ratio']:.3f}"
    verdict = "reached" if r["ratio"] <= TARGET and abs(ours - theirs) <= WITHIN else "SHORT"
    return f"{r['problem']} {r['net']}, {r['method']}: {times} (at most {TARGET}){loss}: {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="where the prepared files lie")
    parser.add_argument("--problems", nargs="+", choices=problems.PROBLEMS, default=["higgs", "svhn", "mnist"])
    parser.add_argument("--methods", nargs="+", choices=WRAPPED, default=list(WRAPPED))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    about = {"machine": machine.about(), "threads": args.threads, "target": TARGET, "within": WITHIN}
    found = list(results(args))
    if args.out:
        args.out.write_text(json.dumps({**about, "results": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
