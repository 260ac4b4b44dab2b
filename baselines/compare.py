"""Compare methods on a problem: time to target accuracies, best accuracy, epochs, memory, over seeds.

    python -m baselines.compare --problem digits
    python -m baselines.compare --problem higgs --data-dir data --threads 2 --seeds 1 2 3 4 5 --target 0.64 0.70
    python -m baselines.compare --problem mnist --data-dir data --methods anchored sgd --set sgd.lr=0.3 --seconds 4
    python -m baselines.compare --problem mnist-4096 --data-dir data --ranks 1 2 --threads 1

All methods go through the same loop and clock. Seeds are outermost, methods in random order within, one trial at a time
in a process of its own, so that the machine's noise hits all alike. `anchored` always runs at its defaults; the others
take their settings from `--set`, else from `--settings` (what `python -m baselines.search` wrote; by default the one in
the output folder, else the one in baselines/results), else their defaults; the report says which.

Into the output folder go trials.jsonl, summary.csv, summary.json, config.json, PNG and SVG figures, TensorBoard runs
and report.html. Finished trials are kept: the same command runs only what is missing, `--retry` also what failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from tqdm.auto import tqdm

from torch_admm.arguments import positive, positive_int

from . import board, plots, problems, report
from .journal import Journal, Record, plain
from .machine import about as about_machine
from .methods import Settings, build, known_methods
from .summary import Row, as_csv, as_text, named, summarise
from .trials import FAILED, Trial, run_apart
from .verdict import OURS, judge

__all__ = ["Chosen", "Comparison", "choose", "commands", "compare", "main", "shown", "write_results"]

RESULTS = Path(__file__).parent / "results"
DEFAULTS, GIVEN = "defaults", "given by --set"


@final
@dataclass(frozen=True)
class Chosen:
    """The settings of a method, and where they come from."""

    settings: Settings
    where: str
    command: str = ""  # of the search


@final
@dataclass(frozen=True)
class Comparison:
    """What is compared; equal comparisons have equal trials."""

    problem: str
    methods: Mapping[str, Chosen]
    seeds: tuple[int, ...]
    threads: int
    seconds: float
    targets: tuple[float, ...]
    folder: Path | None = None
    ranks: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        task = problems.task(self.problem)
        for method, chosen in self.methods.items():
            build(method, task.loss, chosen.settings)
        for seed in self.seeds:
            positive_int("seed", seed, least=0)
        for count in self.ranks:
            positive_int("ranks", count)
        positive_int("threads", self.threads)
        positive("seconds", self.seconds)
        for target in self.targets:
            if not 0 < target <= 1:
                raise ValueError(f"target is {target}; an accuracy above 0 and up to 1 is expected: 95 % is 0.95")

    def trials(self, data: str) -> list[Trial]:
        """Seeds outermost; the order of the methods, on each number of ranks, is drawn anew for each."""
        order: list[Trial] = []
        for seed in self.seeds:
            contestants = list(itertools.product(self.methods, self.ranks))
            random.Random(seed).shuffle(contestants)
            order += [self._trial(name, ranks, seed, data) for name, ranks in contestants]
        return order

    def _trial(self, name: str, ranks: int, seed: int, data: str) -> Trial:
        about = (self.problem, name, self.methods[name].settings, seed, self.threads, self.seconds, self.targets, data)
        return Trial(*about, ranks=ranks)


def compare(wanted: Comparison, out: Path, *, retry: bool = False) -> list[Row]:
    """Run what is missing in the folder `out`, write everything there, and give the summary."""
    machine, data = about_machine(), problems.load(wanted.problem, wanted.folder).fingerprint
    with Journal(out / "trials.jsonl") as journal:
        records = list(_run(wanted.trials(data), journal, wanted.folder, retry))
    more = {"trials": [r["key"] for r in records], "data": data, "machine": machine}
    config = plain({**dataclasses.asdict(wanted), **more, "commands": list(commands(wanted))})
    config.pop("folder")
    return write_results(config, records, out)


def _run(trials: Sequence[Trial], journal: Journal, folder: Path | None, retry: bool) -> Iterator[Record]:
    done = {r["key"]: r for r in journal.records if not (retry and r["outcome"] == FAILED)}
    with tqdm(total=len(trials), unit="trial", disable=None) as bar:
        for trial in trials:
            if trial.key not in done:
                bar.set_description(f"{named(trial.method, trial.ranks)}, seed {trial.seed}")
                record = journal.append(run_apart(trial, folder, lambda *row: bar.set_postfix_str(_shown(*row))))
                done[trial.key] = record
                bar.write(_line(record), file=sys.stderr)
            bar.update()
            yield done[trial.key]


def _shown(seconds: float, accuracy: float) -> str:
    return f"{seconds:.2f} s, {accuracy:.2%}"


def _line(record: Record) -> str:
    times = ", ".join(f"{t} in {p[0]:.3f} s" if p else f"{t} never" for t, p in record["reached"].items())
    best = "" if record["best_accuracy"] is None else f", best {record['best_accuracy']:.2%}"
    who = named(record["method"], record["ranks"])
    return f"seed {record['seed']}, {who}: {record['outcome']}: {times or record['message']}{best}"


def write_results(config: Record, records: Sequence[Record], out: Path) -> list[Row]:
    """All files that are made from the trials."""
    rows = summarise(records)
    _write(out / "config.json", json.dumps(config, indent=1) + "\n")
    _write(out / "summary.json", json.dumps(plain([dataclasses.asdict(row) for row in rows]), indent=1) + "\n")
    _write(out / "summary.csv", as_csv(rows))
    figures = list(_figures(config, records, rows, out))
    board.write(records, out / "tensorboard")
    _write(out / "report.html", report.page(config, records, rows, figures))
    return rows


def _figures(config: Record, records: Sequence[Record], rows: Sequence[Row], out: Path) -> Iterator[tuple[str, Path]]:
    problem = config["problem"]
    net = f"{problem} {problems.task(problem).net}"
    title = f"{net}: test accuracy, median and spread of {len(config['seeds'])} seeds"
    yield title, plots.save(plots.accuracy_over_time(title, records, rows), out / "accuracy_over_time")[1]
    for target in config["targets"]:
        title = f"{net}: time to {target:g}, over ranks"
        figure = plots.time_over_ranks(title, problem, target, rows)
        yield title, plots.save(figure, out / f"time_to_{target:g}".replace(".", "_"))[1]


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def choose(
    problem: str, methods: Sequence[str], given: Mapping[str, Settings], tuned: Path | None
) -> dict[str, Chosen]:
    """The settings of each method: given, else tuned, else its defaults."""
    stored = _tuned(problem, tuned)
    return {name: _chosen(name, given, stored, tuned) for name in methods}


def _chosen(name: str, given: Mapping[str, Settings], stored: Record, tuned: Path | None) -> Chosen:
    if name in given:
        return Chosen(given[name], GIVEN)
    if name in stored and name != OURS:
        found = stored[name]
        how = f"{found['trials']} trials, {found['how']['sampler']}, seed {found['how']['seed']}"
        return Chosen(found["settings"], f"search: {how}", found["how"]["command"])
    if name.endswith("-tuned"):
        base = name.removesuffix("-tuned")
        raise ValueError(f"{name} is {base} with searched settings, and {tuned} has none: python -m baselines.search")
    return Chosen({}, DEFAULTS)


def _tuned(problem: str, path: Path | None) -> Record:
    if path is None or not path.exists():
        return {}
    try:
        stored: Record = json.loads(path.read_text(encoding="utf-8"))
        whose, methods = stored["problem"], dict(stored["methods"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not what python -m baselines.search writes; make it anew") from None
    if whose != problem:
        raise ValueError(f"{path} has settings for {whose}, not for {problem}")
    return methods


def parse_settings(texts: Sequence[str]) -> dict[str, Settings]:
    """From METHOD.NAME=VALUE, the value as JSON, or else as a word."""
    given: dict[str, Settings] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        method, dot, name = path.rpartition(".")
        if not (equals and dot and method and name):
            raise ValueError(f"--set {text!r}; METHOD.NAME=VALUE is expected, such as sgd.lr=0.1")
        given.setdefault(method, {})[name] = _value(value)
    return given


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", required=True, help=", ".join(problems.PROBLEMS))
    parser.add_argument("--methods", nargs="+", help=f"{', '.join(known_methods())}; the problem's unless given")
    parser.add_argument("--data-dir", type=Path, help="where the prepared files lie")
    parser.add_argument("--threads", type=int, default=2, help="of each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="processes that train together")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--target", type=float, nargs="+", help="test accuracies; the problem's unless given")
    parser.add_argument("--seconds", type=float, help="of training for every trial; the problem's unless given")
    parser.add_argument("--set", nargs="+", default=[], metavar="METHOD.NAME=VALUE")
    parser.add_argument("--settings", type=Path, help="what a search wrote")
    parser.add_argument("--retry", action="store_true", help="run trials that failed again")
    parser.add_argument("--out", type=Path, help="folder; runs/PROBLEM unless given")
    return parser.parse_args(argv)


def _wanted(args: argparse.Namespace, out: Path) -> Comparison:
    task, given = problems.task(args.problem), parse_settings(args.set)
    methods = args.methods or task.methods
    stray = [name for name in given if name not in methods]
    if stray:
        raise ValueError(f"--set has {stray[0]!r}, which is not compared; compared are {', '.join(methods)}")
    if args.settings is not None and not args.settings.exists():
        raise ValueError(f"{args.settings} does not exist; python -m baselines.search writes one")
    stored = [args.settings, out / "settings.json", RESULTS / args.problem / "settings.json"]
    tuned = next((path for path in stored if path is not None and path.exists()), stored[-1])
    return Comparison(
        args.problem,
        choose(args.problem, methods, given, tuned),
        tuple(args.seeds),
        args.threads,
        args.seconds or task.seconds,
        tuple(sorted(args.target or task.targets)),
        args.data_dir,
        tuple(args.ranks),
    )


def commands(wanted: Comparison) -> Iterator[str]:
    """What gives these results from nothing, wherever the files are."""
    where = [] if wanted.folder is None else ["--data-dir", "DIR"]
    if wanted.folder is not None:
        yield shlex.join(["python", "-m", "torch_admm", "data", "prepare", problems.task(wanted.problem).data, *where])
    yield from dict.fromkeys(chosen.command for chosen in wanted.methods.values() if chosen.command)
    numbers: dict[str, tuple[float, ...]] = {"--seeds": wanted.seeds, "--target": wanted.targets}
    if wanted.ranks != (1,):
        numbers["--ranks"] = wanted.ranks
    many = [str(text) for name, values in numbers.items() for text in (name, *values)]
    one = ["--problem", wanted.problem, *where, "--threads", str(wanted.threads), "--seconds", f"{wanted.seconds:g}"]
    given = [
        f"{m}.{k}={json.dumps(v)}" for m, c in wanted.methods.items() if c.where == GIVEN for k, v in c.settings.items()
    ]
    rest = ["--methods", *wanted.methods, *(["--set", *given] if given else [])]
    yield shlex.join(["python", "-m", "baselines.compare", *one, *many, *rest])


def shown(problem: str, rows: Sequence[Row]) -> Iterator[str]:
    """The table, and who won."""
    yield as_text(rows)
    found = judge(problems.task(problem), rows)
    if found is not None:
        yield ""
        yield from found.lines()


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    out = args.out or Path("runs") / args.problem
    try:
        wanted = _wanted(args, out)
        rows = compare(wanted, out, retry=args.retry)
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print("\n".join(shown(wanted.problem, rows)))
    print(f"\nreport: {out / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
