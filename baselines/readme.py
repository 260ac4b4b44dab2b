"""README's tables of the comparison, from baselines/results; `benchmarks.readme` puts them there.

python -m baselines.readme
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .journal import Record
from .methods import known_methods
from .problems import PROBLEMS, task
from .published import NOTES, PUBLISHED, Published
from .summary import Row, loaded
from .verdict import Duel, accuracy, highest, judge, shown

__all__ = ["compare", "time_to_accuracy"]

RESULTS = Path(__file__).parent / "results"
NOTHING = "No results are stored yet: `make results` makes them."


def time_to_accuracy(results: Path = RESULTS) -> str:
    """Ours at its defaults against the best tuned rival of each problem that aims at a ratio."""
    head = ["problem, target", "ours, no tuning", "best tuned rival", "ratio (aimed at)", "best plain rival", "ratio"]
    lines = [_verdict(name, rows) for name, _, rows in stored(results) if task(name).ratio is not None]
    return _table([*head, "best accuracy, ours and rivals", "verdict"], lines) if lines else NOTHING


def _verdict(name: str, rows: Sequence[Row]) -> list[str]:
    found = judge(task(name), rows)
    assert found is not None, f"{name} has been stored without ours or without rivals"
    plain = ["", ""] if found.plain is None else _cells(found.plain)
    rival, ratio = _cells(found.allowed)
    return [
        f"{name} {task(name).net}, {float(highest(found.ours)):.0%}",
        shown(found.allowed.ours),
        *(rival, f"{ratio} ({task(name).ratio:g})", *plain),
        f"{accuracy(found.ours):.2%}, {accuracy(found.most_accurate):.2%}",
        f"**short** in {' and '.join(found.short)}" if found.short else "reached",
    ]


def _cells(duel: Duel) -> list[str]:
    words = f"{duel.name}: {shown(duel.seconds)}"
    return [words, f"{duel.ratio:.2f}" if 0 <= duel.ratio < float("inf") else "ours only" if duel.ratio > 0 else "none"]


def compare(results: Path = RESULTS) -> str:
    """For each method the medians at all targets of all problems; the paper's figures below."""
    columns = [c for name, config, rows in stored(results) for c in _columns(name, config, rows)]
    if not columns:
        return NOTHING
    present = {method for column in columns for method in column.rows}
    lines = [[f"`{m}`", *(column.cell(m) for column in columns)] for m in known_methods() if m in present]
    paper = {p.method: _words(p) for column in columns for p in column.published}
    for method, words in paper.items():
        cells = [next((f"_{p.shown}_" for p in c.published if p.method == method), "") for c in columns]
        lines.append([words, *cells])
    notes = [f"\n{name}: {NOTES[name]}" for name in dict.fromkeys(c.problem for c in columns) if name in NOTES]
    return "\n".join([_table(["", *(c.title for c in columns)], lines), *notes])


def _words(p: Published) -> str:
    return f"_{p.method} in the paper, on a {'cluster' if p.cores else 'GPU'}_"


class Column(NamedTuple):
    """Seconds to one target of a problem, and at its highest the best accuracies, too."""

    problem: str
    target: float
    seconds: float  # that each had
    rows: dict[str, Row]

    @property
    def is_last(self) -> bool:
        return self.target == max(float(t) for row in self.rows.values() for t in row.seconds)

    @property
    def published(self) -> list[Published]:
        return [p for p in PUBLISHED.get(self.problem, []) if p.target == self.target]

    @property
    def title(self) -> str:
        more = f", and best accuracy in {self.seconds:g} s" if self.is_last else ""
        return f"{self.problem} {task(self.problem).net}, {self.target:.0%}{more}"

    def cell(self, method: str) -> str:
        """The best in bold; nothing for who did not take part."""
        if method not in self.rows:
            return ""
        time = self._marked(method, self._time, min, shown)
        if not self.is_last or self.rows[method].best_accuracy is None:
            return time
        return f"{time}, {self._marked(method, accuracy, max, '{:.2%}'.format)}"

    def _marked(
        self, method: str, value: Callable[[Row], float], best: Callable[..., float], form: Callable[[float], str]
    ) -> str:
        mine, text = value(self.rows[method]), form(value(self.rows[method]))
        return f"**{text}**" if mine == best(map(value, self.rows.values())) and text != "never" else text

    def _time(self, row: Row) -> float:
        return row.seconds[f"{self.target:g}"].median


def _columns(name: str, config: Record, rows: Sequence[Row]) -> Iterator[Column]:
    for target in config["targets"]:
        yield Column(name, target, config["seconds"], {row.method: row for row in rows if row.ranks == 1})


def stored(results: Path) -> Iterator[tuple[str, Record, list[Row]]]:
    """Problem, configuration and summary of each that has been run."""
    for name in PROBLEMS:
        files = [results / name / f"{part}.json" for part in ("config", "summary")]
        if all(file.exists() for file in files):
            config, summary = (json.loads(file.read_text(encoding="utf-8")) for file in files)
            yield name, config, loaded(summary)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in _ruled(head, lines))


def _ruled(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[Sequence[str]]:
    yield head
    yield ["---"] * len(head)
    yield from lines


if __name__ == "__main__":
    print(time_to_accuracy(), compare(), sep="\n\n")
