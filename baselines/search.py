"""Search the settings of methods on a problem, all with the same budget, and store the best of each.

    python -m baselines.search --problem digits --trials 20
    python -m baselines.search --problem higgs --data-dir data --methods sgd adam anchored-tuned --budget 60 --jobs 2
    python -m baselines.search --problem mnist --data-dir data --sampler grid --out runs/mnist

A trial trains from one seed until the highest target, and counts by its seconds; those that do not get there come
after, by their best accuracy. Every method has `--trials` or `--budget` seconds on the wall, whichever ends first; then
its best few settings are tried from two more seeds, and the best median wins. A search begins with settings that served
on other data; then `--sampler tpe` is Optuna's, and `grid` takes all combinations in a random order, as does `tpe`
where there are choices only, without a scale to learn from.
A trial may take 1.5 times the best time of any method so far, but a third of `--seconds` at least. It is given up where
it is less accurate than the median of its method's earlier trials was at that time (Golovin et al., Google Vizier, KDD
2017). `--jobs` run at a time, each with its share of the threads, which makes times comparable with one another but not
with those of a quiet machine.

Finished trials stand in OUT/search.jsonl at once: the same command goes on where a killed one was. The best settings go
to OUT/settings.json, with the machine, versions, seed and budget; `python -m baselines.compare --settings` takes them.
They are chosen by test accuracy, as in the paper, which flatters all tuned methods alike; compare with other seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import shlex
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tqdm.auto import tqdm

from torch_admm.arguments import positive, positive_int

from . import pace, problems
from .journal import Journal, Record
from .machine import about
from .methods import METHODS, AbstractSpace, Settings, entry, known_methods
from .ranking import best_of, score, seconds_of, settings_key
from .samplers import SAMPLERS
from .trials import Trial, run_apart

__all__ = ["Search", "search"]

FINALISTS = 2  # settings that are tried with further seeds
PATIENCE, LEAST = 1.5, 1 / 3  # a trial may take so many times the best time so far, but such a share of all it may have


@final
@dataclass(frozen=True)
class Search:
    """What is searched, and with how much of what."""

    problem: str
    methods: tuple[str, ...]
    target: float
    seconds: float  # a trial has at most
    trials: int | None = None
    budget: float | None = None  # seconds on the wall for each method
    sampler: str = "tpe"
    jobs: int = 1
    threads: int = 2
    seed: int = 0
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.trials is None and self.budget is None:
            raise ValueError("neither trials nor budget is given; at least one is expected")
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler is {self.sampler!r}; one of {', '.join(SAMPLERS)} is expected")
        for name in ("jobs", "threads"):
            positive_int(name, getattr(self, name))
        for name in self.methods:
            entry(name)

    @property
    def further_seeds(self) -> tuple[int, int]:
        """Far from those that anybody compares with."""
        return self.seed + 1001, self.seed + 1002

    @property
    def share(self) -> int:
        """Threads of one trial."""
        return max(1, self.threads // self.jobs)

    def trial(self, method: str, settings: Settings, seconds: float, data: str) -> Trial:
        about = (self.problem, method, settings, self.seed, self.share, seconds, (self.target,), data)
        return Trial(*about, to_the_end=False)

    def space(self, method: str) -> dict[str, AbstractSpace]:
        """What the problem leaves open."""
        settled = problems.task(self.problem).settled
        return {name: space for name, space in entry(method).space.items() if name not in settled}

    def starts(self, method: str) -> list[Settings]:
        """What is tried first, each but once."""
        space = self.space(method)
        cut = [{name: start[name] for name in space} for start in entry(method).starts]
        return [start for number, start in enumerate(cut) if start not in cut[:number]]


def search(wanted: Search, out: Path, *, show: bool = True) -> Record:
    """Run what is missing of a search in the folder `out`; gives what is written to settings.json."""
    machine, data = about(), problems.load(wanted.problem, wanted.folder).fingerprint
    with Journal(out / "search.jsonl") as journal:
        for method in wanted.methods:
            _search_one(wanted, method, data, journal, show)
            _confirm(wanted, method, data, journal)
        stored = _stored(wanted, journal.records, machine, data, _kept(out))
    out.mkdir(parents=True, exist_ok=True)
    aside = out / "settings.json.part"
    aside.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    aside.replace(out / "settings.json")
    return stored


def _search_one(wanted: Search, method: str, data: str, journal: Journal, show: bool) -> None:
    """Ask, run, tell; the journal is written by this thread only."""
    sampler = SAMPLERS[wanted.sampler](wanted.space(method), wanted.seed)
    done = [r for r in _mine(wanted, method, data, journal.records) if r["seed"] == wanted.seed]
    for record in done:
        sampler.tell(record["settings"], record)
    starts = [start for start in wanted.starts(method) if start not in [r["settings"] for r in done]]
    bar = tqdm(
        total=wanted.trials, initial=len(done), desc=f"{method:16}", unit="trial", disable=None if show else True
    )
    more = itertools.chain(starts, iter(sampler.ask, None))

    def ask(running: int) -> Trial | None:
        settings = None if _used_up(wanted, done, running) else next(more, None)
        if settings is None:
            return None
        trial = wanted.trial(method, settings, _allowed(wanted, data, journal.records), data)
        return dataclasses.replace(trial, marks=pace.marks(done))

    with bar, closing(_as_they_end(ask, wanted.jobs, wanted.folder)) as records:
        for record in records:
            kept = _keep(journal, record)
            done.append(kept)
            sampler.tell(kept["settings"], kept)
            bar.set_postfix_str(_shown(min(done, key=score)), refresh=False)
            bar.update()


def _as_they_end(ask: Callable[[int], Trial | None], jobs: int, folder: Path | None) -> Generator[Record, None, None]:
    """Up to `jobs` trials at a time; `ask` hears how many are running and gives the next one, or None."""
    with ThreadPoolExecutor(jobs) as pool:
        running: set[Future[Record]] = set()
        while True:
            while len(running) < jobs and (trial := ask(len(running))) is not None:
                running.add(pool.submit(run_apart, trial, folder))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in ended)


def _confirm(wanted: Search, method: str, data: str, journal: Journal) -> None:
    """The best few once more from other seeds: one lucky run does not make a setting. Costs all methods alike."""
    mine = _mine(wanted, method, data, journal.records)
    first = sorted((r for r in mine if r["seed"] == wanted.seed), key=score)
    finalists = list({settings_key(r["settings"]): r["settings"] for r in first}.values())[:FINALISTS]
    done, allowed = {(settings_key(r["settings"]), r["seed"]) for r in mine}, _allowed(wanted, data, journal.records)
    missing = [(s, seed) for s in finalists for seed in wanted.further_seeds if (settings_key(s), seed) not in done]
    trials = [dataclasses.replace(wanted.trial(method, s, allowed, data), seed=seed) for s, seed in missing]
    with ThreadPoolExecutor(wanted.jobs) as pool:
        for record in pool.map(lambda trial: run_apart(trial, wanted.folder), trials):
            _keep(journal, record)


def _keep(journal: Journal, record: Record) -> Record:
    kept = {name: value for name, value in record.items() if name not in ("curve", "marks")}
    return journal.append({**kept, "by_then": pace.by_then(record["curve"])})


def _used_up(wanted: Search, done: list[Record], running: int) -> bool:
    """Seconds are those of the trials, so that a search which goes on after a kill has as many as any other."""
    spent = sum(r["wall"] for r in done) / wanted.jobs
    enough = wanted.trials is not None and len(done) + running >= wanted.trials
    return enough or (wanted.budget is not None and spent >= wanted.budget)


def _allowed(wanted: Search, data: str, records: list[Record]) -> float:
    """Whichever method the best time is of: a setting that takes much longer is not the best rival."""
    best = min((seconds_of(r) for r in _ours(wanted, data, records)), default=math.inf)
    return min(wanted.seconds, max(LEAST * wanted.seconds, PATIENCE * best))


def _mine(wanted: Search, method: str, data: str, records: list[Record]) -> list[Record]:
    """Those of one method, also from earlier runs of this search."""
    return [r for r in _ours(wanted, data, records) if r["method"] == method]


def _ours(wanted: Search, data: str, records: list[Record]) -> list[Record]:
    names, seeds = ("problem", "threads", "targets", "data"), (wanted.seed, *wanted.further_seeds)
    same = (wanted.problem, wanted.share, [wanted.target], data)
    return [r for r in records if same == tuple(r[k] for k in names) and r["seed"] in seeds]


def _stored(wanted: Search, records: list[Record], machine: Record, data: str, kept: Record) -> Record:
    """Methods that were searched earlier into the same file stay."""
    found = {
        method: {**best_of(mine), "how": _how(wanted), "machine": machine}
        for method in wanted.methods
        if (mine := _mine(wanted, method, data, records))
    }
    same = kept.get("problem") == wanted.problem and kept.get("data") == data
    return {"problem": wanted.problem, "data": data, "methods": {**(kept["methods"] if same else {}), **found}}


def _how(wanted: Search) -> Record:
    names = ("target", "seconds", "trials", "budget", "sampler", "jobs", "seed")
    options = {name: getattr(wanted, name) for name in names}
    given = [text for name, value in options.items() if value is not None for text in (f"--{name}", f"{value:}")]
    where = [] if wanted.folder is None else ["--data-dir", "DIR"]
    parts = [
        "--problem",
        wanted.problem,
        *where,
        *given,
        "--threads",
        str(wanted.threads),
        "--methods",
        *wanted.methods,
    ]
    return {**options, "threads": wanted.share, "command": shlex.join(["python", "-m", "baselines.search", *parts])}


def _kept(out: Path) -> Record:
    path = out / "settings.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _shown(record: Record) -> str:
    seconds, accuracy = seconds_of(record), record["best_accuracy"]
    settings = " ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in record["settings"].items())
    reached = f"{seconds:.3f} s" if math.isfinite(seconds) else "never there" if accuracy is None else f"{accuracy:.2%}"
    return f"best {reached}: {settings}"


def tunable() -> list[str]:
    """Methods with something to search."""
    return [name for name in METHODS if METHODS[name].space]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", required=True, help=", ".join(problems.PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=tunable(), help=", ".join(known_methods()))
    parser.add_argument("--data-dir", type=Path, help="where the prepared files lie")
    parser.add_argument("--target", type=float, help="test accuracy; the problem's highest unless given")
    parser.add_argument(
        "--seconds", type=float, help="of training that a trial has at most; the problem's unless given"
    )
    parser.add_argument("--trials", type=int, help="for each method; 20 when there is no --budget")
    parser.add_argument("--budget", type=float, help="seconds on the wall for each method")
    parser.add_argument("--sampler", default="tpe", help=", ".join(SAMPLERS))
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--threads", type=int, default=2, help="of all jobs together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder; runs/PROBLEM unless given")
    return parser.parse_args(argv)


def _wanted(args: argparse.Namespace) -> Search:
    task = problems.task(args.problem)
    return Search(
        args.problem,
        tuple(args.methods),
        positive("target", args.target or max(task.targets)),
        positive("seconds", args.seconds or task.seconds),
        args.trials or (None if args.budget else 20),
        args.budget,
        args.sampler,
        args.jobs,
        args.threads,
        args.seed,
        args.data_dir,
    )


def lines(stored: Record) -> Iterator[str]:
    for method, found in stored["methods"].items():
        reached = "never reached" if found["seconds"] is None else f"{found['seconds']:.3f} s"
        yield f"{method:16} {reached:>14}, {found['trials']} trials: {found['settings']}"


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        wanted = _wanted(args)
        out = args.out or Path("runs") / args.problem
        stored = search(wanted, out)
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print("\n".join(lines(stored)))
    print(f"written to {out / 'settings.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
