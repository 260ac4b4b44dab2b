"""The figures of the paper with our own trials: accuracy over time, and time to target over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .journal import Record
from .methods import known_methods
from .published import PUBLISHED
from .summary import Row, Spread

__all__ = ["accuracy_over_time", "save", "style", "time_over_ranks"]

# Okabe and Ito's colours, which the colour-blind can tell apart; yellow, pale on white, is left out
COLOURS = {
    "anchored": "#0072B2",
    "bregman": "#56B4E9",
    "sgd": "#009E73",
    "adam": "#D55E00",
    "adamw": "#E69F00",
    "lbfgs": "#CC79A7",
    "cg": "#000000",
}
VARIANTS = {"": "-", "-tuned": "--", "+average": (0, (5, 1, 1, 1))}
MARKERS = "osD^vPX<>hp*d"
IN_THE_PAPER = {"ADMM": "bregman", "SGD": "sgd", "L-BFGS": "lbfgs", "CG": "cg"}
SIZE = (8.6, 4.6)


def style(method: str) -> dict[str, Any]:
    """The same in all figures: colours tell methods apart, lines their variants, markers both."""
    family, variant = next((method.removesuffix(v), v) for v in reversed(VARIANTS) if method.endswith(v))
    marker = MARKERS[known_methods().index(method) % len(MARKERS)]
    return {"color": COLOURS[family], "linestyle": VARIANTS[variant], "marker": marker, "label": method}


def save(figure: Any, path: Path) -> list[Path]:
    """As PNG and as SVG, beside each other; the same figure gives the same files."""
    import matplotlib as mpl

    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    with mpl.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def accuracy_over_time(title: str, records: Sequence[Record], rows: Sequence[Row]) -> Any:
    """The median over seeds and their spread on the fewest ranks, against seconds of training on a logarithmic axis."""
    figure, axes = _figure(title)
    fewest = min((r["ranks"] for r in records), default=1)
    records = [r for r in records if r["ranks"] == fewest]
    for method in dict.fromkeys(row.method for row in rows):
        curves = [r["curve"] for r in records if r["method"] == method and r["curve"]]
        if curves:
            seconds, low, middle, high = _band(curves)
            axes.plot(
                seconds, middle, linewidth=1.8, markersize=5, markevery=_places(method, len(seconds)), **style(method)
            )
            axes.fill_between(seconds, low, high, color=style(method)["color"], alpha=0.12, linewidth=0)
    for target in sorted({t for r in records for t in r["targets"]}):
        axes.axhline(target, color="0.4", linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(f" {target:.4g}", (1.0, target), xycoords=("axes fraction", "data"), va="center", fontsize=9)
    axes.set_xscale("log")
    axes.set_ylim(*_accuracy_limits(records))
    axes.set(xlabel="seconds of training, without evaluation", ylabel="test accuracy")
    _plain_numbers(axes.xaxis)
    _legend(axes, 1.07)
    return figure


def time_over_ranks(title: str, problem: str, target: float, rows: Sequence[Row]) -> Any:
    """Ours as filled markers; the paper's as hollow ones, at its number of cores, or as a line for its GPU."""
    figure, axes = _figure(title)
    cores = _published(axes, problem, target)
    ranks, methods = sorted({row.ranks for row in rows} | cores), list(dict.fromkeys(row.method for row in rows))
    doublings = math.log2(4 * max(ranks, default=1))  # from left to right
    for number, method in enumerate(methods):
        aside = 2 ** (doublings * 0.025 * (number - (len(methods) - 1) / 2))  # all have the same few numbers of ranks
        points = sorted((row.ranks, row.seconds[f"{target:g}"]) for row in rows if row.method == method)
        _spreads(axes, method, [(count * aside, s) for count, s in points if math.isfinite(s.median)])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if not any(math.isfinite(row.seconds[f"{target:g}"].median) for row in rows) and not cores:
        axes.set_ylim(0.1, 10.0)  # a logarithmic axis of nothing cannot be drawn
    axes.set_xticks(ranks, [f"{r:,}" for r in ranks])
    axes.set_xlim(2 ** (-0.2 * doublings), max(ranks, default=1) * 2 ** (0.2 * doublings))
    axes.set(
        xlabel="ranks, and the paper's cores" if cores else "ranks", ylabel=f"seconds to {target:.4g} test accuracy"
    )
    _plain_numbers(axes.yaxis)
    _legend(axes, 1.01)
    return figure


def _spreads(axes: Any, method: str, points: Sequence[tuple[float, Spread]]) -> None:
    """Medians as markers, and a thin line from the lowest to the highest of each."""
    look = style(method) if points else {**style(method), "label": f"{method}: never"}
    axes.plot([at for at, _ in points], [s.median for _, s in points], markersize=7, **look)
    for at, s in points:
        axes.vlines(at, s.low, s.high if math.isfinite(s.high) else s.median, color=look["color"], linewidth=1)


def _published(axes: Any, problem: str, target: float) -> set[int]:
    """The numbers of cores that the paper has at this target."""
    figures = [p for p in PUBLISHED.get(problem, []) if p.target == target]
    for p in figures:
        like = style(IN_THE_PAPER[p.method])
        look = {"color": like["color"], "marker": like["marker"], "markerfacecolor": "white", "markersize": 8}
        where = f", {p.cores:,} cores" if p.cores else ", GPU" if p.seconds else ""
        label = f"paper: {p.method}, {p.shown}{where}"
        if p.seconds and not p.cores:
            axes.axhline(p.seconds, color=look["color"], linestyle=":", linewidth=1.2)
        points = ([p.cores], [p.seconds]) if p.cores else ([], [])
        axes.plot(*points, linestyle=":" if p.seconds and not p.cores else " ", label=label, **look)
    return {p.cores for p in figures if p.cores}


def _figure(title: str) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "torch-admm[compare]"') from error
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plain_numbers(axis: Any) -> None:
    """0.1 0.2 0.5 1 2 5, not powers of ten; fewer where there would be too many."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,), numticks=20))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def _legend(axes: Any, x: float) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(x, 0.5), frameon=False, fontsize=9, handlelength=3)


def _places(method: str, points: int) -> tuple[int, int]:
    """A marker here and there, at other places for each line."""
    every = max(1, points // 6)
    return 3 * known_methods().index(method) % every, every


def _band(curves: Sequence[list[list[float]]]) -> tuple[Any, Any, Any, Any]:
    """All seeds at the same seconds: from where each has been evaluated to where the last one ends."""
    begin = max(curve[min(1, len(curve) - 1)][0] for curve in curves)
    end = max(curve[-1][0] for curve in curves)
    seconds = np.geomspace(max(min(begin, end), 1e-6), max(end, 1e-6), 120)
    columns = [np.array(curve, float).T for curve in curves]
    values = np.stack([c[2][np.searchsorted(c[0], seconds, side="right").clip(1) - 1] for c in columns])
    return seconds, values.min(0), np.median(values, 0), values.max(0)


def _accuracy_limits(records: Sequence[Record]) -> tuple[float, float]:
    """Room round the targets and the best: where all begin, at chance, does not matter."""
    lowest = min((t for r in records for t in r["targets"]), default=0.5)
    top = max((r["best_accuracy"] or 0.0 for r in records), default=1.0)
    room = max(top - lowest, 0.02)
    return max(0.0, lowest - 3 * room), min(1.002, max(top, lowest) + 0.4 * room)
