"""README's table of the comparison, from baselines/results; `benchmarks.readme` puts it there.

python -m baselines.readme
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .methods import known_methods
from .problems import task
from .published import PUBLISHED

__all__ = ["compare"]

RESULTS = Path(__file__).parent / "results"


def compare(results: Path = RESULTS) -> str:
    """For each problem and target the medians of all methods and the paper's figures, and the best accuracies."""
    found = [_load(path.parent) for path in sorted(results.glob("*/summary.json"))]
    present = {row["method"] for _, rows in found for row in rows}
    methods = [name for name in known_methods() if name in present]
    lines = [["", *methods], ["---"] * (len(methods) + 1)]
    for config, rows in found:
        lines += _lines(config, {row["method"]: row for row in rows if row["ranks"] == 1}, methods)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _load(folder: Path) -> tuple[Any, Any]:
    config, summary = (json.loads((folder / f"{n}.json").read_text(encoding="utf-8")) for n in ("config", "summary"))
    return config, summary


def _lines(config: Any, rows: dict[str, Any], methods: Sequence[str]) -> Iterator[list[str]]:
    problem = config["problem"]
    for target in config["targets"]:
        times = [_median(rows.get(name), "seconds", f"{target:g}") for name in methods]
        yield [f"{problem} {task(problem).net}, {target:.0%}", *_marked(times, min, "{:.3f} s", "never")]
        published = {p.method: p.shown for p in PUBLISHED.get(problem, []) if p.target == target}
        if published:
            words = [published.get(IN_THE_PAPER.get(name, ""), "") for name in methods]
            yield [
                f"{problem}, {target:.0%}, the paper's figures, on its machines",
                *(f"_{w}_" if w else "" for w in words),
            ]
    accuracies = [_median(rows.get(name), "best_accuracy") for name in methods]
    yield [f"{problem}, best test accuracy in {config['seconds']:g} s", *_marked(accuracies, max, "{:.2%}", "")]


IN_THE_PAPER = {"bregman": "ADMM", "sgd": "SGD", "lbfgs": "L-BFGS", "cg": "CG"}


def _median(row: Any, *path: str) -> float | str | None:
    """None for never, a word for a method that did not take part."""
    if row is None:
        return "-"
    for key in path:
        row = row[key]
    median: float | None = None if row is None else row["median"]
    return median


def _marked(values: Sequence[float | str | None], best: Any, form: str, never: str) -> list[str]:
    """The best in bold."""
    numbers = [v for v in values if isinstance(v, float)]
    winner = best(numbers) if numbers else None
    texts = [never if v is None else v if isinstance(v, str) else form.format(v) for v in values]
    return [f"**{text}**" if v == winner and v is not None else text for v, text in zip(values, texts, strict=True)]


if __name__ == "__main__":
    print(compare())
