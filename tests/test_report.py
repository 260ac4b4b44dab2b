"""Summaries, figures, the page, TensorBoard and README's table, from made-up trials; and that stored results agree."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from baselines import board, compare, plots, readme, report
from baselines.journal import plain, read
from baselines.methods import known_methods
from baselines.problems import task
from baselines.published import NOTES, PUBLISHED
from baselines.summary import Spread, as_csv, as_text, loaded, summarise
from baselines.verdict import judge

RESULTS = Path(compare.RESULTS)


def trial(method: str, seed: int, seconds: float | None, best: float | None = 0.97, **more: Any) -> dict[str, Any]:
    """Accuracy rises to `best`, past 0.95 at `seconds`."""
    at = seconds or 1.0
    curve = [
        [0.001, 0.0, 0.1, 2.3],
        [at / 2, 1.0, 0.8, 1.0],
        [at, 2.0, 0.95 if seconds else 0.9, 0.5],
        [2.0, 4.0, best, 0.1],
    ]
    made = {
        **{"problem": "svhn", "method": method, "seed": seed, "settings": {"lr": 0.1}, "threads": 2, "ranks": 1},
        **{"targets": [0.9, 0.95], "key": f"{method}{seed}", "at": "2026-01-01", "message": "", "epochs": 4.0},
        "reached": {"0.9": [at, 2.0], "0.95": [seconds, 2.0] if seconds else None},
        "outcome": "reached" if seconds else "timed out",
        **{"best_accuracy": best, "curve": curve, "peak_mib": 350.0 + seed, "idle_mib": 300.0},
    }
    return {**made, **more}


def failed(method: str, seed: int) -> dict[str, Any]:
    more = {"outcome": "failed", "message": "RuntimeError: <no> & never", "reached": {}, "curve": []}
    return trial(method, seed, None, None, **more)


RECORDS = [
    *(trial("sgd", seed, 0.1 * seed) for seed in (1, 2, 3)),
    *(trial("anchored", seed, 0.05 * seed, 0.98) for seed in (1, 2, 3)),
    *(trial("adam+average", seed, 0.4 if seed == 1 else None) for seed in (1, 2, 3)),
    *(failed("cg", seed) for seed in (1, 2, 3)),
]
CONFIG = {
    **{"problem": "svhn", "seeds": [1, 2, 3], "threads": 2, "seconds": 2.0, "targets": [0.9, 0.95]},
    **{"data": "15533+5893x648-0badcafe", "machine": {"processor": "<i>fast</i>", "torch": "2.x"}},
    "methods": {
        "sgd": {"settings": {"lr": 0.1}, "where": "search: 7 trials"},
        "cg": {"settings": {}, "where": "defaults"},
    },
    "commands": ["python -m baselines.compare --problem svhn --set 'sgd.lr=0.1'"],
}


def test_medians_and_spreads() -> None:
    rows = {row.method: row for row in summarise(RECORDS)}
    assert list(rows) == ["anchored", "sgd", "adam+average", "cg"]
    assert rows["sgd"].seconds["0.95"] == Spread(0.2, 0.1, 0.1 * 3)
    assert rows["adam+average"].seconds["0.95"] == Spread(math.inf, 0.4, math.inf)
    assert rows["sgd"].memory_mib == Spread(52.0, 51.0, 53.0)
    assert rows["cg"].best_accuracy is None
    assert rows["cg"].outcomes == {"failed": 3}


def test_half_never_is_never() -> None:
    (row,) = summarise([trial("sgd", 1, 0.1), trial("sgd", 2, None)])
    assert row.seconds["0.95"].median == math.inf


def test_table_in_a_terminal() -> None:
    text = as_text(summarise(RECORDS))
    lines = text.splitlines()
    assert lines[0].split()[:5] == ["method", "to", "0.9,", "s", "to"]
    assert "0.200 (0.100 to 0.300)" in text
    assert "never (once 0.400)" in text
    assert "3 failed: RuntimeError: <no> & never" in text
    assert len(lines) == 6


def test_csv_has_numbers_only() -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(summarise(RECORDS)))))
    assert [line["method"] for line in lines] == ["anchored", "sgd", "adam+average", "cg"]
    assert float(lines[1]["seconds_to_0.95_median"]) == 0.2
    assert lines[2]["seconds_to_0.95_median"] == ""
    assert lines[3]["trials_failed"] == "3"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "svhn"
    folder.mkdir()
    compare.write_results(CONFIG, RECORDS, folder)
    return folder


def test_all_files_are_written(written: Path) -> None:
    names = {p.name for p in written.iterdir()}
    figures = {f"{f}.{kind}" for f in ("accuracy_over_time", "time_to_0_9", "time_to_0_95") for kind in ("png", "svg")}
    assert names == figures | {"config.json", "summary.json", "summary.csv", "report.html", "tensorboard"}
    json.loads((written / "summary.json").read_text(), parse_constant=pytest.fail)


class Checker(HTMLParser):
    """Every tag is closed, and nothing is fetched."""

    VOID = ("meta", "br", "path", "use", "line", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [
            v or "" for k, v in attrs if k in ("src", "href", "xlink:href") and not (v or "").startswith("#")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_stands_alone_and_says_everything(written: Path) -> None:
    text = (written / "report.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.links == []
    assert "<script" not in text
    assert text.count("<svg") == text.count("</svg>") == 3
    for words in (
        "15,533 training rows, 5,893 test rows, 2 threads",
        "python -m baselines.compare --problem svhn --set &#x27;sgd.lr=0.1&#x27;",
        "&lt;i&gt;fast&lt;/i&gt;",
        "RuntimeError: &lt;no&gt; &amp; never",
        "search: 7 trials",
        "1,024 cores of a Cray XC30",
        "not measured here",
        "anchored at its defaults is faster than the best rival, sgd: by a factor of 2.00",
    ):
        assert words in text
    assert text.count("<td>timed out</td>") == 2


LOST = {
    "slower": (
        [trial("anchored", 1, 0.3), trial("sgd", 1, 0.1)],
        "slower than the best rival, sgd: by a factor of 3.00",
    ),
    "never": (
        [trial("anchored", 1, None), trial("sgd", 1, 0.1)],
        "slower than the best rival, sgd: the other never|anch",
    ),
    "nobody": ([trial("anchored", 1, None), trial("sgd", 1, None)], "Neither anchored nor any rival got to 0.95"),
}


@pytest.mark.parametrize("name", LOST)
def test_losing_is_said_as_plainly(name: str) -> None:
    records, words = LOST[name]
    assert re.search(words, report.page(CONFIG, records, summarise(records), []))


def test_styles_tell_all_methods_apart() -> None:
    looks = [plots.style(name) for name in known_methods()]
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == len(looks)
    assert len({look["marker"] for look in looks}) == len(looks)


def test_figures_have_axes_and_labels() -> None:
    rows = summarise(RECORDS)
    figure = plots.accuracy_over_time("title", RECORDS, rows)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert "seconds" in axes.get_xlabel()
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["anchored", "sgd", "adam+average"]
    figure = plots.time_over_ranks("title", "svhn", 0.95, rows)
    (axes,) = figure.axes
    labels = [t.get_text() for t in axes.get_legend().get_texts()]
    assert "paper: ADMM, 13.3 s, 1,024 cores" in labels
    assert "cg: never" in labels
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "1,024"]


def test_the_same_figure_gives_the_same_file(tmp_path: Path) -> None:
    def svg(name: str) -> bytes:
        figure = plots.time_over_ranks("title", "svhn", 0.95, summarise(RECORDS))
        (tmp_path / name).mkdir()
        return plots.save(figure, tmp_path / name / "figure")[1].read_bytes()

    assert svg("one") == svg("two")


def test_several_ranks_are_a_line() -> None:
    records = [trial("anchored", 1, 0.4 / ranks, ranks=ranks) for ranks in (1, 2, 4)]
    (axes,) = plots.time_over_ranks("title", "digits", 0.95, summarise(records)).axes
    assert list(axes.lines[0].get_ydata()) == [0.4, 0.2, 0.1]
    (axes,) = plots.accuracy_over_time("title", records, summarise(records)).axes
    assert max(axes.lines[0].get_xdata()) <= 2.0
    assert "anchored, 4 ranks" in as_text(summarise(records))


def test_nobody_there_is_a_figure_too(tmp_path: Path) -> None:
    rows = summarise([trial("sgd", 1, None)])
    made = plots.save(plots.time_over_ranks("title", "digits", 0.95, rows), tmp_path / "figure")
    assert all(path.stat().st_size > 0 for path in made)


def test_tensorboard_has_curves_and_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    board.write(RECORDS[:1], tmp_path)
    board.write(RECORDS[:1], tmp_path)
    events = EventAccumulator(str(tmp_path / "sgd" / "seed-1"))
    events.Reload()
    assert [round(e.value, 3) for e in events.Scalars("test/accuracy")] == [0.1, 0.8, 0.95, 0.97]
    assert events.Scalars("seconds_to/0.95")[0].value == pytest.approx(0.1)
    assert events.PluginTagToContent("hparams")


def test_published_figures_are_those_of_the_paper() -> None:
    figures = {(name, p.method): p.seconds for name, many in PUBLISHED.items() for p in many}
    assert figures == {
        **{("svhn", "ADMM"): 13.3, ("svhn", "SGD"): 28.3, ("svhn", "L-BFGS"): 3.3, ("svhn", "CG"): 10.1},
        **{("higgs", "ADMM"): 7.8, ("higgs", "L-BFGS"): 181, ("higgs", "CG"): 2640, ("higgs", "SGD"): None},
    }
    assert "linear model" in NOTES["higgs"]


def test_rows_come_back_from_json() -> None:
    rows = summarise(RECORDS)
    assert loaded(plain([dataclasses.asdict(row) for row in rows])) == rows


def test_verdicts_with_averaging_and_without() -> None:
    records = [trial("anchored", 1, 0.2, 0.960), trial("sgd", 1, 0.3, 0.9631), trial("sgd+average", 1, 0.1, 0.961)]
    found = judge(dataclasses.replace(task("svhn"), ratio=1.5), summarise(records))
    assert found is not None
    assert found.plain is not None
    assert (found.allowed.ratio, found.plain.ratio) == pytest.approx((0.5, 1.5))
    assert list(found.lines()) == [
        "to 0.95: anchored at its defaults 0.200 s",
        "ratio, averaging allowed (aimed at: 1.5): 0.50: sgd+average lr=0.1, 0.100 s",
        "ratio, plain: 1.50: sgd lr=0.1, 0.300 s",
        "best accuracy: anchored 96.00%, sgd 96.31%: 0.31 points less (at most 0.3 less is aimed at)",
        "SHORT in speed and accuracy",
    ]


ENDS: dict[str, tuple[float | None, float | None, float, list[str], str]] = {
    "only ours": (0.1, None, math.inf, [], "only ours got there"),
    "only theirs": (None, 0.1, 0.0, ["speed"], "0.00"),
    "nobody": (None, None, math.nan, ["speed"], "neither got there"),
    "equal": (0.1, 0.1, 1.0, [], "1.00"),
}


@pytest.mark.parametrize("name", ENDS)
def test_verdict_at_its_ends(name: str) -> None:
    ours, theirs, ratio, short, words = ENDS[name]
    found = judge(task("svhn"), summarise([trial("anchored", 1, ours), trial("cg+average", 1, theirs)]))
    assert found is not None
    assert found.allowed.ratio == pytest.approx(ratio, nan_ok=True)
    assert found.short == short
    assert str(found.allowed).startswith(words)
    assert found.plain is None


def test_no_verdict_without_both_sides() -> None:
    for method in ("anchored", "sgd"):
        assert judge(task("svhn"), summarise([trial(method, 1, 0.1), trial("bregman", 1, 0.1)])) is None


def test_table_of_readme(written: Path) -> None:
    lines = readme.compare(written.parent).splitlines()
    assert lines[0] == "| | svhn 648-100-50-1, 90% | svhn 648-100-50-1, 95%, and best accuracy in 2 s |"
    assert lines[2] == "| `anchored` | **0.100 s** | **0.100 s**, **98.00%** |"
    assert "| `cg` | never | never |" in lines
    assert "| _SGD in the paper, on a GPU_ | | _28.3 s_ |" in lines
    assert "120,290 rows" in lines[-1]


def test_verdicts_of_readme(written: Path) -> None:
    lines = readme.time_to_accuracy(written.parent).splitlines()
    assert lines[2] == (
        "| svhn 648-100-50-1, 95% | 0.100 s | sgd lr=0.1: 0.200 s | 2.00 (1) | sgd lr=0.1: 0.200 s | 2.00 "
        "| 98.00%, 97.00% | reached |"
    )


def test_readme_without_results(tmp_path: Path) -> None:
    for table in (readme.compare, readme.time_to_accuracy):
        assert table(tmp_path) == "No results are stored yet: `make results` makes them."


@pytest.mark.parametrize("folder", sorted(p.parent for p in RESULTS.glob("*/trials.jsonl")), ids=lambda p: p.name)
def test_stored_results_agree(folder: Path) -> None:
    """What is stored follows from the trials stored beside it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    records = {r["key"]: r for r in read(folder / "trials.jsonl")}
    rows = plain([dataclasses.asdict(row) for row in summarise([records[key] for key in config["trials"]])])
    assert rows == json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert config["problem"] == folder.name
    assert not re.search(r"/(home|tmp|work|root)\b", json.dumps(config))
