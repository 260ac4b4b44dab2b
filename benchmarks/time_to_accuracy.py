"""Seconds of training until a target test accuracy: gradient methods well tuned, AnchoredADMM at its defaults.

    python -m benchmarks.time_to_accuracy --data-dir data
    python -m benchmarks.time_to_accuracy --data-dir data --problems higgs mnist --out runs
    python -m benchmarks.time_to_accuracy --data-dir data --quick --out /tmp/quick    # does it run?

For each problem `baselines.search` tunes SGD, Adam, L-BFGS and nonlinear CG, with averaged weights and without, each
from settings that served on other data onwards; then `baselines.compare` runs the best setting of each and ours from
five other seeds, in random order, one at a time, with the same threads, data, net, starting weights and time. Medians
count. All settings tried are printed, and stay in OUT/PROBLEM/search.jsonl; what is there already is not run again.
Only training is on the clock, fetching the batches included. Keep the machine quiet.
The ratio is the seconds of the best rival over ours: with averaging allowed, which counts, and for plain torch.optim. A
problem falls short when its ratio is below the one aimed at, or when ours is more than 0.3 points less accurate than
the best rival in the same time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from baselines import compare, problems, search
from baselines.journal import Record, read
from baselines.methods import AVERAGE
from baselines.ranking import score, seconds_of
from baselines.verdict import OURS, settings_text, shown

PROBLEMS = [name for name, task in problems.PROBLEMS.items() if task.ratio is not None]
# settings that are tried: of every rival, with averaging and without it, 20 or more; ours also under a name of its own
SETTINGS = {
    **{"sgd": 15, "sgd+average": 15, "adam": 15, "adam+average": 15},
    **{"lbfgs": 10, "lbfgs+average": 10, "cg": 10, "cg+average": 10},
    **{"anchored-tuned": 15, "bregman": 10},
}
SEEDS = (1, 2, 3, 4, 5)


def tuned(problem: str) -> list[str]:
    """The methods that are searched."""
    task = problems.task(problem)
    names = [*task.methods, *(["anchored-tuned"] if task.batch == "any" else [])]
    return [name for name in SETTINGS if name.removesuffix(AVERAGE) in names]


def searches(problem: str, args: argparse.Namespace) -> Iterator[search.Search]:
    """Methods with as many settings share one."""
    task = problems.task(problem)
    for count in dict.fromkeys(SETTINGS.values()):
        methods = tuple(name for name in tuned(problem) if SETTINGS[name] == count)
        trials, seconds = (3, 0.5) if args.quick else (count, task.seconds)
        limits = {"trials": trials, "threads": args.threads, "folder": args.data_dir}
        if methods:
            yield search.Search(problem, methods, max(task.targets), seconds, **limits)


def comparison(problem: str, args: argparse.Namespace, folder: Path) -> compare.Comparison:
    task, seeds = problems.task(problem), SEEDS[:1] if args.quick else SEEDS
    methods = compare.choose(problem, [OURS, *tuned(problem)], {}, folder / "settings.json")
    seconds = 0.5 if args.quick else task.seconds
    return compare.Comparison(problem, methods, seeds, args.threads, seconds, task.targets, args.data_dir)


def tried(records: Sequence[Record]) -> Iterator[str]:
    """Every setting, the best of each method first."""
    for record in sorted(records, key=lambda r: (r["method"], score(r))):
        accuracy = "" if record["best_accuracy"] is None else f", best {record['best_accuracy']:.2%}"
        end = f"{shown(seconds_of(record))}{accuracy}, {record['outcome']}"
        yield f"  {record['method']} {settings_text(record['settings'])}, seed {record['seed']}: {end}"


def measure(problem: str, args: argparse.Namespace) -> None:
    folder = args.out / problem
    for one in searches(problem, args):
        search.search(one, folder)
    records = read(folder / "search.jsonl")
    print(f"\n{problem}: {len(records)} trials of the search", *tried(records), sep="\n", flush=True)
    wanted = comparison(problem, args, folder)
    rows = compare.compare(wanted, folder)
    print(f"\n{problem}: medians of {len(wanted.seeds)} seeds", *compare.shown(problem, rows), sep="\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="where the prepared files lie")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=PROBLEMS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=compare.RESULTS, help="folder; what is there already is kept")
    parser.add_argument("--quick", action="store_true", help="three settings, one seed, half a second")
    args = parser.parse_args(argv)
    try:
        for problem in args.problems:
            measure(problem, args)
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
