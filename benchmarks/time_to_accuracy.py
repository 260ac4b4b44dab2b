"""Seconds of training until a target test accuracy: gradient methods well tuned, AnchoredADMM at its defaults.

    python -m benchmarks.time_to_accuracy --data-dir data --out time_to_accuracy.json
    python -m benchmarks.time_to_accuracy --data-dir data --problems higgs mnist --cache-dir cache
    python -m benchmarks.time_to_accuracy --data-dir data --quick           # does it run? three settings, one second

`benchmarks/problems.py` says what lies under the data folder, `benchmarks/rivals.py` has the rivals and their settings.
All run in one process with the same threads, data, net and, for each seed, starting weights; keep the machine quiet.
Only training steps are on the clock, fetching the batch included; the whole test set is evaluated while it stands
still, and the time to the target is that of the first evaluation there.
Stage 1 tries every setting with seed 0 in random order, ours in between, each until the target or 2.5 times the best
rival's time so far. Stage 2 takes the best two settings of each rival with averaging of the weights and the best two
without, and ours, in random order for each further seed, all for the same time; medians over these seeds count. The
best rival is the best of these medians, which flatters rivals. "Plain" leaves averaging out.
A problem falls short when its ratio (best rival's seconds / ours) is below the one aimed at, or when ours is more than
0.3 points less accurate than the best rival in the same time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import torch_admm
from benchmarks.kernels import network
from benchmarks.problems import load
from benchmarks.rivals import CRITERIA, GRIDS, Settings, Step, Task, batches, fastest_chunk, start


@dataclass(frozen=True)
class Problem:
    """What is trained on what, until where; `batch` is a key of GRIDS; `ratio` is what ours ought to be faster by."""

    data: str
    widths: list[int]
    loss: str
    target: float
    ratio: float
    batch: str = "any"


PROBLEMS = {
    "higgs": Problem("higgs", [28, 300, 1], "logistic", 0.70, ratio=1.5),
    "svhn": Problem("svhn", [648, 100, 50, 1], "logistic", 0.97, ratio=1.0),
    "mnist": Problem("mnist", [784, 256, 10], "cross_entropy", 0.97, ratio=1.0),
    "mnist-4096": Problem("mnist", [784, 256, 10], "cross_entropy", 0.97, ratio=2.0, batch="4096"),
    "higgs-full": Problem("higgs", [28, 300, 1], "logistic", 0.69, ratio=2.0, batch="all"),
}
OURS = "ours"
FLOOR, PATIENCE, BUDGET = 1.0, 2.5, 3.0  # seconds a trial has at least; caps in stages 1 and 2, in times of the best
EVERY, RARER = 0.01, 0.03  # an evaluation at most every so many seconds, later every such share of the time so far
BETWEEN = 10  # trials of rivals between two of ours
WITHIN = 0.003  # accuracy that ours may lack


@dataclass(frozen=True)
class Trial:
    """How one run went; `seconds` is None when the target was not reached."""

    method: str
    settings: Settings
    seed: int
    seconds: float | None
    best_accuracy: float
    trained_seconds: float
    steps: int
    finite: bool

    @property
    def key(self) -> str:
        return " ".join([self.method, *(f"{k}={v}" for k, v in self.settings.items())])

    @property
    def time(self) -> float:
        return math.inf if self.seconds is None else self.seconds

    def __str__(self) -> str:
        end = "" if self.finite else ", not finite"
        return f"{self.key}: {shown(self.time)}, best {self.best_accuracy:.2%} in {self.trained_seconds:.2f} s{end}"


class Arena:
    """One problem with its data in memory, where methods are tried."""

    def __init__(self, problem: Problem, folder: Path, cache_dir: Path | None) -> None:
        (x, y), (test_x, test_y) = load(problem.data, folder, cache_dir)
        self.problem, self.labels = problem, torch.as_tensor(y)
        self.test_x, self.test_y = torch.as_tensor(test_x), torch.as_tensor(test_y)
        labels = self.labels.float() if problem.loss == "logistic" else self.labels
        task = Task(torch.as_tensor(x), labels, CRITERIA[problem.loss], chunk=len(x))
        self.task = dataclasses.replace(task, chunk=fastest_chunk(self.model(0), task))

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return network(self.problem.widths)

    def ours(self, model: nn.Module, seed: int) -> Step:
        """AnchoredADMM at its defaults."""
        method = torch_admm.AnchoredADMM(self.problem.loss)
        size = {"any": method.batch_size_for(len(self.task.x)), "4096": 4096, "all": None}[self.problem.batch]
        bound, fetch = method.bind(model), batches(self.task.x, self.labels, size, seed)
        return lambda: bound.step(*next(fetch))

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """On all test rows; NaN when an output is not finite."""
        z = model(self.test_x)
        guess = z.argmax(1) if z.shape[1] > 1 else z.squeeze(1) > 0
        return float((guess == self.test_y).double().mean()) if z.isfinite().all() else math.nan

    def start(self, method: str, settings: Settings, seed: int) -> tuple[Step, nn.Module]:
        """One training step, and the model to evaluate."""
        model = self.model(seed)
        if method == OURS:
            return self.ours(model, seed), model
        return start(method, model, self.task, seed, settings)

    def run(self, method: str, settings: Settings, seed: int, cap: float, *, go_on: bool = False) -> Trial:
        """Train for `cap` seconds, or until the target unless it is to `go_on` from there."""
        step, model = self.start(method, settings, seed)
        elapsed, check, steps, best, reached, finite = 0.0, EVERY, 0, 0.0, None, True
        while elapsed < cap and finite and (go_on or reached is None):
            begin = perf_counter()
            step()
            elapsed += perf_counter() - begin
            steps += 1
            if elapsed >= min(check, cap):
                accuracy = self.accuracy(model)
                finite, best = not math.isnan(accuracy), max(best, accuracy)
                if reached is None and accuracy >= self.problem.target:
                    reached = elapsed
                check = elapsed + max(EVERY, RARER * elapsed)
        return Trial(method, settings, seed, reached, best, elapsed, steps, finite)


def tuning(arena: Arena, grids: dict[str, list[Settings]], limit: float) -> Iterator[Trial]:
    """Every setting of every rival once, ours before, in between and after."""
    trials = [(rival, settings) for rival, grid in grids.items() for settings in grid]
    random.Random(0).shuffle(trials)
    for rival, settings in dict(trials).items():
        arena.run(rival, settings, 0, 0.1)  # torch loads and starts what it needs on first use
    arena.run(OURS, {}, 0, 0.1)
    best = math.inf
    for number, (rival, settings) in enumerate(trials):
        if number % BETWEEN == 0:
            yield arena.run(OURS, {}, 0, limit)
        trial = arena.run(rival, settings, 0, min(limit, max(FLOOR, PATIENCE * best)))
        best = min(best, trial.time)
        yield trial
    yield arena.run(OURS, {}, 0, limit)


def finalists(tuned: list[Trial]) -> list[Trial]:
    """The best two settings of each rival with averaging, and the best two without."""
    chosen: list[Trial] = []
    for rival in sorted({t.method for t in tuned} - {OURS}):
        for average in (False, True):
            group = [t for t in tuned if t.method == rival and t.settings["average"] is average]
            chosen += sorted(group, key=lambda t: (t.time, -t.best_accuracy))[:2]
    return chosen


def final(arena: Arena, chosen: list[Trial], seeds: int, budget: float) -> Iterator[Trial]:
    order = [(t.method, t.settings) for t in chosen] + [(OURS, {})]
    for seed in range(1, seeds + 1):
        random.Random(seed).shuffle(order)
        for method, settings in order:
            yield arena.run(method, settings, seed, budget, go_on=True)


def budget_of(tuned: list[Trial], limit: float) -> float:
    """Enough for the best rival and for ours, with time to spare to see which gets further."""
    rivals = min(t.time for t in tuned if t.method != OURS)
    ours = statistics.median(t.time for t in tuned if t.method == OURS)
    return min(limit, max(BUDGET, BUDGET * max(rivals, ours)))


def medians(trials: list[Trial]) -> dict[str, dict[str, Any]]:
    """For each contestant, the median time to the target and the median of the best accuracies."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.key, []).append(trial)
    return {
        key: {
            "seconds": statistics.median(t.time for t in group),
            "best_accuracy": statistics.median(t.best_accuracy for t in group),
            "averaged": group[0].settings.get("average", False),
        }
        for key, group in groups.items()
    }


def fastest(pool: dict[str, dict[str, Any]], ours: float) -> dict[str, Any]:
    """The best of the pool, and how many times our time it takes; 0 when ours never gets there."""
    name = min(pool, key=lambda key: (pool[key]["seconds"], -pool[key]["best_accuracy"]))
    seconds = pool[name]["seconds"]
    return {"name": name, "seconds": seconds, "ratio": seconds / ours if ours < math.inf else 0.0}


def verdict(problem: Problem, table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ours, rivals = table[OURS], {key: row for key, row in table.items() if key != OURS}
    plain = {key: row for key, row in rivals.items() if not row["averaged"]}
    allowed, top = fastest(rivals, ours["seconds"]), max(rivals, key=lambda key: rivals[key]["best_accuracy"])
    return {
        "ours": ours,
        "averaging_allowed": allowed,
        "plain": fastest(plain, ours["seconds"]),
        "most_accurate_rival": {"name": top, **rivals[top]},
        "fast_enough": allowed["ratio"] >= problem.ratio,
        "accurate_enough": ours["best_accuracy"] >= rivals[top]["best_accuracy"] - WITHIN,
    }


def shown(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < math.inf else "never"


def report(name: str, problem: Problem, v: dict[str, Any]) -> None:
    ours, top = v["ours"], v["most_accurate_rival"]
    print(f"{name}: {problem.target:.0%} test accuracy; ours {shown(ours['seconds'])}; ratio aimed at {problem.ratio}")
    for pool, title in (("averaging_allowed", "averaging allowed"), ("plain", "plain")):
        print(f"  ratio {v[pool]['ratio']:.2f}, {title}: {v[pool]['name']}, {shown(v[pool]['seconds'])}")
    print(f"  best accuracy: ours {ours['best_accuracy']:.2%}; {top['name']}: {top['best_accuracy']:.2%}")
    short = [text for key, text in (("fast_enough", "SPEED"), ("accurate_enough", "ACCURACY")) if not v[key]]
    print(f"  {'SHORT IN ' + ' AND '.join(short) if short else 'reached'}")


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    problem = PROBLEMS[name]
    arena = Arena(problem, args.data_dir, args.cache_dir)
    grids, load_before = GRIDS[problem.batch], os.getloadavg()[0]
    if args.quick:
        grids = {rival: [grid[0], grid[len(grid) // 2], grid[-1]] for rival, grid in grids.items()}
    rows = f"{len(arena.task.x):,} + {len(arena.test_x):,} rows"
    print(f"\n{name}: {rows}, {'-'.join(map(str, problem.widths))}, full gradients in chunks of {arena.task.chunk:,}")
    tuned = earlier(args.tuned, name) or listed("tuning", tuning(arena, grids, args.limit))
    budget = args.budget or budget_of(tuned, args.limit)
    trials = listed(f"{budget:.1f} s each", final(arena, finalists(tuned), args.seeds, budget))
    table = medians(trials)
    for key, row in sorted(table.items(), key=lambda item: (item[1]["seconds"], -item[1]["best_accuracy"])):
        print(f"  median: {key}: {shown(row['seconds'])}, best {row['best_accuracy']:.2%}")
    return {
        "problem": dataclasses.asdict(problem),
        "chunk": arena.task.chunk,
        "load_before": load_before,
        "budget_seconds": budget,
        "tuning": [dataclasses.asdict(t) for t in tuned],
        "final": [dataclasses.asdict(t) for t in trials],
        "medians": table,
        "verdict": verdict(problem, table),
    }


def earlier(path: Path | None, name: str) -> list[Trial]:
    """Stage 1 of an earlier run, from its file."""
    results = json.loads(path.read_text(encoding="utf-8"))["results"] if path else {}
    return [Trial(**trial) for trial in results[name]["tuning"]] if name in results else []


def listed(title: str, trials: Iterator[Trial]) -> list[Trial]:
    done = []
    for trial in trials:
        print(f"  {title}, seed {trial.seed}: {trial}", flush=True)
        done.append(trial)
    return done


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--cache-dir", type=Path, help="keep features here as npz, and take them from here")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, help="of stage 2, from 1 on; default 5, with --quick 1")
    parser.add_argument("--limit", type=float, help="seconds of training a trial has at most; default 12, --quick 1")
    parser.add_argument("--budget", type=float, help="seconds of a trial of stage 2; default 3 times what it takes")
    parser.add_argument("--tuned", type=Path, help="take stage 1 from this file, which --out wrote")
    parser.add_argument("--quick", action="store_true", help="a smoke run: three settings a rival")
    parser.add_argument("--out", type=Path, help="write everything here as JSON; null stands for never")
    args = parser.parse_args()
    args.limit, args.seeds = args.limit or (1.0 if args.quick else 12.0), args.seeds or (1 if args.quick else 5)
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    about = {"torch": torch.__version__, "threads": args.threads, "cpus": os.cpu_count(), "machine": platform.machine()}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    results = {name: measure(name, args) for name in args.problems}
    print()
    for name, result in results.items():
        report(name, PROBLEMS[name], result["verdict"])
    if args.out:
        options = {"seeds": args.seeds, "limit": args.limit, "quick": args.quick}
        text = json.dumps({**about, **options, "results": results})
        valid = json.loads(text, parse_constant=lambda infinity: None)  # JSON has no infinity
        args.out.write_text(json.dumps(valid, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
