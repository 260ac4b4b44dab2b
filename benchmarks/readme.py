"""Writes the tables of README.md from benchmarks/results; a test checks that they agree.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def load(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def bregman() -> str:
    figures = load("bregman")
    lines = [
        "| data, net, target | settings, where not the paper's | target reached | test accuracy, best and last |",
        "| --- | --- | --- | --- |",
    ]
    for case in figures["results"]:
        name, runs = case["problem"], case["runs"]
        settings = ", ".join(f"`{k}={v!r}`" for k, v in case["settings"].items()) or "none: as printed"
        hits = [r for r in runs if r["reached_at_sweep"] is not None]
        sweep = statistics.median(r["reached_at_sweep"] for r in hits) if hits else 0
        seconds = statistics.median(r["reached_after_seconds"] for r in hits) if hits else 0
        reached = f"{len(hits)} of {len(runs)} seeds, sweep {sweep:g}, {seconds:.1f} s" if hits else "never"
        widths = "-".join(map(str, figures["nets"][name]))
        best, last = (statistics.median(r[which] for r in runs) for which in ("best", "last"))
        problem = f"{name.upper()} {widths}, {figures['targets'][name]:.0%}"
        lines.append(f"| {problem} | {settings} | {reached} | {best:.1%}, {last:.1%} |")
    return "\n".join(lines)


def kernels() -> str:
    figures = load("kernels")
    lines = [
        "| net, rows | threads | sweep | unavoidable products | ratio | data + state | idle process | peak |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in figures["results"]:
        lines.append(
            f"| {r['net']}, {r['rows']:,} | {r['threads']} | {r['sweep_seconds']:.2f} s | {r['bound_seconds']:.2f} s "
            f"| {r['ratio']:.2f} | {r['data_and_state_mib']:,} MiB | {r['idle_mib']:,} MiB | {r['peak_mib']:,} MiB |"
        )
    return "\n".join(lines)


def rendered(text: str) -> str:
    """README with every table between its markers made anew."""
    for name, table in (("bregman", bregman), ("kernels", kernels)):
        pattern = rf"(<!-- {name}: .*? -->\n).*?(\n<!-- end -->)"
        found = re.search(pattern, text, re.DOTALL)
        assert found, f"README.md has no markers for the table {name!r}"
        text = text[: found.start()] + found[1] + table() + found[2] + text[found.end() :]
    return text


def main() -> None:
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
