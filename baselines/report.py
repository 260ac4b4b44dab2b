"""One HTML page with everything: tables, figures, settings, machine, commands. It needs nothing but itself."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .journal import Record
from .problems import task
from .published import NOTES, PUBLISHED
from .summary import Row, cells, named, titles
from .verdict import judge

__all__ = ["page"]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .8rem 0; font-size: .9rem; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #e6e6e6; vertical-align: top; }
td { font-variant-numeric: tabular-nums; } pre { background: #f5f5f5; padding: .7rem; white-space: pre-wrap; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; } .note { color: #555; }
"""

HOW = """Each trial has a fresh process, one at a time; for each seed all methods run in random order, from the same
weights. The clock stands still while test rows are evaluated. Shown are medians over seeds, with least and greatest;
where half of the seeds or more did not get there, it is never. Searched settings were chosen by test accuracy, with
another seed. Memory is what training takes beyond the data and an idle process."""


def page(about: Record, records: Sequence[Record], rows: Sequence[Row], figures: Sequence[tuple[str, Path]]) -> str:
    """`about` is what compare wrote to config.json; `figures` are titles with SVG files."""
    wanted = task(about["problem"])
    title = f"{about['problem']}, {wanted.net}: test accuracy {_targets(about)}"
    body = [
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(_opening(about, records))}</p>",
        *_section("Result", [_table(titles(rows), (cells(row) for row in rows)), _verdict(about["problem"], rows)]),
        *_section("Figures", [f"<figure>{_svg(path)}</figure>" for _, path in figures]),
        *_published(about["problem"]),
        *_section("Settings", [_table(["method", "settings", "where from"], _settings(about))]),
        *_section("Machine and versions", [_table(["", ""], about["machine"].items())]),
        *_section("To repeat it", [f"<pre>{_text(chr(10).join(about['commands']))}</pre>"]),
        *_section("Every trial", [_table(TRIAL_TITLES, (_trial(r) for r in records))]),
    ]
    head = f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{_text(title)}</title>'
    view = '<meta name="viewport" content="width=device-width">'
    return f"{head}{view}<style>{STYLE}</style></head>\n<body>\n{chr(10).join(body)}\n</body>\n</html>\n"


def _opening(about: Record, records: Sequence[Record]) -> str:
    rows, test = about["data"].split("x")[0].split("+")
    sizes = f"{int(rows):,} training rows, {int(test):,} test rows, {_many(about['threads'], 'thread')}"
    effort = f"{_many(len(records), 'trial')}, {_many(len(about['seeds']), 'seed')}"
    return f"{sizes}, {about['seconds']:g} s of training a trial, {effort}. {HOW}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _verdict(problem: str, rows: Sequence[Row]) -> str:
    """Who won, said plainly, and where ours stands."""
    found = judge(task(problem), rows)
    if found is None:
        return ""
    lines = "".join(f"<li>{_text(line)}</li>" for line in found.lines())
    return f"<p><b>{_text(found.sentence)}</b></p><ul>{lines}</ul>"


def _published(problem: str) -> Iterable[str]:
    if problem not in PUBLISHED:
        return []
    figures = [(p.method, f"{p.target:.0%}", p.shown, p.where) for p in PUBLISHED[problem]]
    table = _table(["method", "target", "time", "on"], figures)
    words = "Published by Taylor et al. (ICML 2016), on other machines; not measured here."
    return _section("The paper's figures", [f'<p class="note">{words} {_text(NOTES[problem])}</p>', table])


def _settings(about: Record) -> Iterable[Sequence[str]]:
    for method, found in about["methods"].items():
        settings = ", ".join(f"{k}={v!r}" for k, v in found["settings"].items()) or "defaults"
        yield method, settings, found["where"]


TRIAL_TITLES = ["seed", "method", "outcome", "seconds to targets", "best accuracy", "epochs", "peak MiB", "when", "key"]


def _trial(record: Record) -> Sequence[str]:
    times = ", ".join(f"{t}: {p[0]:.3f}" if p else f"{t}: never" for t, p in record["reached"].items())
    accuracy = record["best_accuracy"]
    failed = accuracy is None
    return [
        str(record["seed"]),
        named(record["method"], record["ranks"]),
        f"{record['outcome']}: {record['message']}" if failed else record["outcome"],
        times,
        "" if failed else f"{accuracy:.2%}",
        "" if failed else f"{record['epochs']:.4g}",
        "" if failed else f"{record['peak_mib']:.0f}",
        record["at"],
        record["key"],
    ]


def _targets(about: Record) -> str:
    return " and ".join(f"{t:.4g}" for t in about["targets"])


def _section(title: str, parts: Sequence[str]) -> list[str]:
    return [f"<h2>{_text(title)}</h2>", *parts]


def _table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    rows = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in line)}</tr>\n" for line in lines)
    return f'<div class="wide"><table><tr>{top}</tr>\n{rows}</table></div>'


def _svg(path: Path) -> str:
    """The drawing alone: neither XML's opening nor links to its definition belong inside a page."""
    text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]


def _text(value: Any) -> str:
    return html.escape(str(value))
