"""`python -m torch_admm train` under every launcher there is here: the same command, and the bits of one process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_admm.data.sources import SOURCES, prepare

from .commands import end
from .ranks import clean_environment, free_port, mpirun

SECONDS = 200

Words = list[str]


def torchrun(*options: str) -> Words:
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m"]


def two_nodes() -> list[Words]:
    """Two agents that meet at a port of the loopback interface; of real ones each would be started on its machine."""
    place = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [torchrun(*place, "--node-rank", node) for node in ("0", "1")]


def slurm() -> Words:
    if shutil.which("srun") is None:
        pytest.skip("no srun here")
    try:
        found = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("srun is here, but no cluster answers")
    if found.returncode or not found.stdout:
        pytest.skip(f"srun is here, but no cluster: {found.stderr.strip()}")
    return ["srun", "-n", "2", "--overcommit", sys.executable, "-m"]


LAUNCHERS: dict[str, Callable[[], list[Words]]] = {
    "torchrun": lambda: [torchrun("--standalone", "--nproc-per-node", "2")],
    "two nodes": two_nodes,
    "MPICH": lambda: [[*mpirun("MPICH"), "-n", "2", sys.executable, "-m"]],
    "Open MPI": lambda: [[*mpirun("Open MPI"), "-n", "2", sys.executable, "-m"]],
    "Slurm": lambda: [slurm()],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("h5py")
    path = tmp_path_factory.mktemp("data")
    prepare(SOURCES["digits"](), path)
    run([[sys.executable, "-m"]], path, path / "alone.pt")
    return path


def run(starts: list[Words], folder: Path, model: Path) -> list[str]:
    """What each command printed."""
    train = ["torch_admm", "train", "--data", "digits", "--data-dir", str(folder), "--net", "12", "--epochs", "2"]
    env = clean_environment(GLOO_SOCKET_IFNAME="lo", TMPDIR=str(folder))  # torchrun leaves its logs there
    commands: list[subprocess.Popen[str]] = []
    try:
        for start in starts:
            words = [*start, *train, "--deterministic", "--save", str(model)]
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            commands.append(subprocess.Popen(words, env=env, start_new_session=True, **pipes))
        ends = [command.communicate(timeout=SECONDS) for command in commands]
    finally:
        for command in commands:
            end(command)
    for command, (_, errors) in zip(commands, ends, strict=True):
        assert command.returncode == 0, errors
    return [out for out, _ in ends]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_trains_to_the_bits_of_one_process(name: str, folder: Path) -> None:
    said = run(LAUNCHERS[name](), folder, folder / f"{name}.pt")
    assert "on 2 ranks" in said[0]
    alone, several = (torch.load(folder / f"{of}.pt", weights_only=True) for of in ("alone", name))
    assert alone.keys() == several.keys()
    for key, values in alone.items():
        assert torch.equal(values, several[key]), key
