"""torchvision imports beside any torch, by declaring only what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torch_admm.data import vision
from torch_admm.errors import DataError


def test_torchvision_imports_beside_any_torch() -> None:
    """In a process of its own: what is declared stays declared."""
    code = (
        "from torch_admm.data import vision; v = vision.torchvision(); import torchvision.datasets as d; print(d.SVHN)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SVHN" in done.stdout


def test_operators_are_declared_only_where_they_are_missing() -> None:
    vision.torchvision()
    vision.declare()
    assert vision.declare() == []


def test_torchvision_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(DataError, match=r'torchvision is needed here .*pip install "torch-admm\[data\]"'):
        vision.torchvision()


def test_another_failure_of_torchvision_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr("torch_admm.data.vision.importlib.import_module", fail)
    with pytest.raises(RuntimeError, match="something else"):
        vision.torchvision()
