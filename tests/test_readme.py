"""README tells the truth: its code runs, and its tables are those of benchmarks/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import readme

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_code_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "run.jsonl").exists()


def test_first_example_reaches_what_it_says() -> None:
    import torch

    torch.manual_seed(0)
    names: dict[str, object] = {}
    (block, *_) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(block, "README.md", "exec"), names)
    assert names["result"].best["test_accuracy"] == pytest.approx(0.97, abs=0.03)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert readme.rendered(text) == text, "run `make readme`"


@pytest.mark.parametrize("lost", ["<!-- end -->", "<!-- sums: made"])
def test_a_missing_mark_loses_no_text(lost: str) -> None:
    text = readme.PAGES[2].read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="tables and their ends do not alternate, so that text would be lost"):
        readme.rendered(text.replace(lost, "", 1))


def test_every_table_is_shown() -> None:
    shown = [name for page in readme.PAGES for name in re.findall(r"<!-- (\w+): ", page.read_text(encoding="utf-8"))]
    assert sorted(shown) == sorted(readme.TABLES)


def test_linked_files_exist() -> None:
    names = re.findall(r"\]\(([\w/]+\.md)\)", TEXT)
    assert {"docs/anchored.md", "docs/data.md", "docs/distributed.md", "CONTRIBUTING.md", "CHANGELOG.md"} == set(names)
    assert all((ROOT / name).exists() for name in names)


def test_map_of_the_code_is_complete() -> None:
    """Every module of the package stands in CONTRIBUTING's table."""
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    modules = {p.name for p in (ROOT / "torch_admm").glob("*.py")} - {"__init__.py", "errors.py", "arguments.py"}
    assert [m for m in sorted(modules) if f"`{m}`" not in table and f"torch_admm/{m}`" not in table] == []
