"""Writes the tables of README.md and docs/anchored.md from stored results; a test checks that they agree.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baselines import readme as comparison
from benchmarks.ranks import spread
from benchmarks.scaling import WANTED

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "anchored.md", ROOT / "docs" / "distributed.md")


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


def baselines() -> str:
    figures = load("baselines")
    lines = [
        "| method | net, rows | ours | by hand | ratio (at most) | losses in float64 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in figures["results"]:
        losses = ", ".join(f"{loss:.7f}" for loss in r.get("losses", []))
        cells = f"{r['ours'] * 1e3:.3f} ms | {r['by_hand'] * 1e3:.3f} ms | {r['ratio']:.2f} ({figures['target']:g})"
        lines.append(f"| {r['method']} | {r['problem']} {r['net']}, {r['rows']:,} | {cells} | {losses} |")
    return "\n".join(lines)


def steps() -> str:
    figures = load("steps")
    lines = [
        "| step | net, rows | threads | ours | against | ratio (aimed at) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    names = {"full": "full-batch sweep", "mini": "mini-batch step"}
    others = {"full": "its products", "mini": "SGD's"}
    for r in figures["results"]:
        where = f"{names[r['kind']]} | {r['net']}, {r['rows']:,} | {r['threads']} | {r['ours'] * 1e3:.2f} ms"
        for name, key in ((others[r["kind"]], "other"), ("its products and those of G", "with_G")):
            if key in r:
                ratio = f"{r['ours'] / r[key]:.2f} ({figures['targets'][r['kind']]:g})"
                lines.append(f"| {where} | {name}: {r[key] * 1e3:.2f} ms | {ratio} |")
    return "\n".join(lines)


def ablation() -> str:
    figures = load("ablation")["results"]
    names = list(next(iter(figures.values())))
    lines = [f"| changed | {' | '.join(names)} |", f"| --- {'| --- ' * len(names)}|"]
    for variant, row in figures.items():
        cells = ("never" if row[name] is None else f"{row[name]:g}" for name in names)
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def data() -> str:
    figures = load("data")
    csv, hog, stream = (figures[name] for name in ("csv", "hog", "stream"))
    peak = max(
        v["peak_mib"] - v["idle_mib"] for k, v in figures["memory"].items() if k.endswith(f"{stream['rows']:,} rows")
    )
    rows = [
        ("CSV.gz to HDF5, against `gzip -dc`", f"{csv['rows']:,} rows", csv, "prepare", "gzip"),
        ("HOG features, two workers against one", f"{hog['images']:,} images", hog, "two", "one"),
        ("streaming, against `cat` of the warm file", f"{stream['rows']:,} rows", stream, "chunks", "cat"),
    ]
    lines = ["| what | how many | ours | against | speed, ratio (aimed at) |", "| --- | --- | --- | --- | --- |"]
    for what, many, f, ours, other in rows:
        times = f"{f['seconds'][ours]:.2f} s | {f['seconds'][other]:.2f} s"
        lines.append(f"| {what} | {many} | {times} | {f['ratio']:.2f} ({f['target']:g}) |")
    return "\n".join([*lines, "", f"Memory beyond an idle process while {stream['rows']:,} rows stream: {peak} MiB."])


def scaling() -> str:
    figures = load("scaling")
    lines = [
        "| net, rows | method | 1 rank | 2 ranks | ratio (aimed at) | apart | fastest: ratio | apart |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for net, methods in figures["seconds"].items():
        for method, times in methods.items():
            aim = f" ({WANTED[method]:g})" if method in WANTED else ""
            best = figures["fastest"][net][method]
            ratios = [f"{t['1'] / t[kind]:.2f}" for t in (times, best) for kind in ("2", "apart")]
            cells = f"{times['1']:.2f} s | {times['2']:.2f} s | {ratios[0]}{aim} | {' | '.join(ratios[1:])}"
            lines.append(f"| {net}, {figures['rows'][net]:,} | {method} | {cells} |")
    ways = next(iter(figures["exchange"].values()))
    lines += ["", f"| a sum over two ranks | {' | '.join(f'{int(n):,} B' for n in ways['gloo'])} |"]
    lines.append(f"| --- {'| --- ' * len(ways['gloo'])}|")
    for way, name in (("memory", "by shared memory"), ("gloo", "by gloo over loopback")):
        lines.append(f"| {name} | {' | '.join(f'{seconds * 1e3:.2f} ms' for seconds in ways[way].values())} |")
    shares = ", ".join(f"{share:.0%} ({net})" for net, share in figures["others"].items())
    return "\n".join([*lines, "", f"Other processes took so much of the two cores meanwhile: {shares}."])


def sums() -> str:
    seconds = load("sums")["seconds"]
    sizes = [int(size) for size in next(iter(seconds["8"].values()))]
    lines = ["| ranks, by gloo | " + " | ".join(f"{n:,} B" for n in sizes) + " |", "| --- " * (1 + len(sizes)) + "|"]
    for ranks, ways in seconds.items():
        for way, times in ways.items():
            lines.append(f"| {ranks}, {way} | " + " | ".join(f"{1e3 * s:,.1f} ms" for s in times.values()) + " |")
    return "\n".join(lines)


def speedup(results: str = "scaling", kinds: Sequence[str] = ("2",)) -> str:
    """The ratios of `scaling` alone."""
    figures = load(results)
    nets = figures["seconds"]
    heads = (f"{net}, {figures['rows'][net]:,} rows" for net in nets)
    lines = [f"| 2 ranks against 1 | aimed at | {' | '.join(heads)} |", f"| --- | --- {'| --- ' * len(nets)}|"]
    for method in next(iter(nets.values())):
        aim = f"{WANTED[method]:g}" if method in WANTED else ""
        ratios = ([t[method]["1"] / t[method][kind] for kind in kinds] for t in nets.values())
        cells = (", ".join(f"{ratio:.2f}" for ratio in of_net) for of_net in ratios)
        lines.append(f"| {method} | {aim} | {' | '.join(cells)} |")
    return "\n".join(lines)


def slower() -> str:
    """Those of another machine, each with that of processes apart."""
    return speedup("scaling_slower", ("2", "apart"))


def ranks() -> str:
    lines = [
        "| after training | float32: 2 ranks | data moved | float64: 2 ranks | data moved |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, by_dtype in load("ranks")["results"].items():
        cells = (spread(by_dtype[dtype][kind]) for dtype in ("float32", "float64") for kind in ("ranks", "moved"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def simulate() -> str:
    shown = (1, 24, 256, 1_024, 10_000)
    lines = [
        f"| net, method | off, 1 and 2 ranks | {' | '.join(f'{n:,} ranks' if n > 1 else '1 rank' for n in shown)} "
        "| below a half, by |",
        f"| --- | --- {'| --- ' * len(shown)}| --- |",
    ]
    for net, figures in load("simulate")["nets"].items():
        for case, curves in figures["curves"].items():
            curve = curves["given"]
            points = {p["ranks"]: p for p in curve["points"]}
            times = (f"{points[n]['sweep']:.2g} s, {points[n]['efficiency']:.0%}" for n in shown)
            off = ", ".join(f"{v['off']:+.0%}" for v in figures["validation"][case].values())
            ends = "never" if curve["half_at"] is None else f"{curve['half_at']:,}, {curve['because_of']}"
            lines.append(f"| {net}, {case} | {off} | {' | '.join(times)} | {ends} |")
    lines.append("")
    for figures in load("simulate")["nets"].values():
        for case, curves in figures["curves"].items():
            curve, target = curves["given"], f"{figures['target']:.0%}"
            best = min(curve["points"], key=lambda p: p["to_target"])
            lines.append(
                f"- {figures['rows']:,} rows, {case}: {target} takes {curve['sweeps']} sweeps, "
                f"{curve['points'][0]['to_target']:.3g} s on one rank, at best {best['to_target']:.2g} s, on "
                f"{best['ranks']:,}."
            )
    return "\n".join(lines)


def accelerations() -> str:
    """Methods with other targets stand below one another, so a row may have other columns than the one before."""
    figures = load("accelerations")["results"]
    lines = ["| full batch | sweeps |", "| --- | --- |"]
    for variant, row in figures.items():
        cells = ", ".join(f"{name}: {'never' if v is None else format(v, 'g')}" for name, v in row.items())
        lines.append(f"| {variant} | {cells} |")
    return "\n".join(lines)


def other_data() -> str:
    figures = load("other_data")["results"]
    nets = list(dict.fromkeys("-".join(map(str, r["hidden"])) for r in figures))
    lines = [f"| ours / Adam | {' | '.join(nets)} |", f"| --- {'| --- ' * len(nets)}|"]
    for data in dict.fromkeys(r["data"] for r in figures):
        cells = [f"{_bold(r, 'ours')} / {_bold(r, 'adam')}" for r in figures if r["data"] == data]
        lines.append(f"| {data} | {' | '.join(cells)} |")
    better, worse = (sum(_wins(r, name) for r in figures) for name in ("ours", "adam"))
    equal = len(figures) - better - worse
    return "\n".join([*lines, "", f"Ours is better on {better} nets, about equal on {equal}, worse on {worse}."])


def _wins(row: Any, name: str) -> bool:
    """By more than the score's standard error."""
    other: float = row["adam" if name == "ours" else "ours"]
    return bool(row[name] > other + row["error"])


def _bold(row: Any, name: str) -> str:
    return f"**{row[name]:.3f}**" if _wins(row, name) else f"{row[name]:.3f}"


TABLES: dict[str, Callable[[], str]] = {
    **{f.__name__: f for f in (baselines, bregman, data, kernels, steps, ablation, accelerations, other_data)},
    **{f.__name__: f for f in (scaling, sums, speedup, slower, ranks, simulate)},
    **{"time_to_accuracy": comparison.time_to_accuracy, "compare": comparison.compare},
}


def rendered(text: str) -> str:
    """A page with every table between its markers made anew."""
    marks = re.findall(r"<!-- (\w+)(?:: .*?)? -->", text)
    if marks[1::2] != ["end"] * (len(marks) // 2) or len(marks) % 2 or "end" in marks[::2]:
        raise ValueError(f"tables and their ends do not alternate, so that text would be lost: {', '.join(marks)}")
    pattern = re.compile(r"(<!-- (\w+): .*? -->\n).*?(\n<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
