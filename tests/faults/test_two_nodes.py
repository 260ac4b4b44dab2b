"""Two torchruns on loopback, as two nodes: a rank that is killed, and a node that cannot start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from ..commands import end, finished
from ..ranks import clean_environment, free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "two_nodes.sh"

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from torch_admm import BregmanADMM, comm, fit
from tests.helpers import blobs, net

folder, steps, step = Path(sys.argv[1]), [], BregmanADMM.step
mark = folder / "killed"

def killed(self):  # in the fourth sweep of the first try, a rank of the second node
    steps.append(1)
    if len(steps) == 4 and os.environ.get("GROUP_RANK") == "1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    step(self)

BregmanADMM.step = killed
model = net(4, 7, 5, 1)
with comm.start(timeout_minutes=1) as ranks:
    more = dict(checkpoint=folder / "saved", resume="auto", deterministic=True, sinks=())
    result = fit(model, blobs(97, 4), BregmanADMM("hinge", warm_start=1), max_sweeps=6, **more)
    if ranks.rank == 0:
        found = dict(size=ranks.size, made=len(steps), weights=[p.tolist() for p in model.parameters()])
        (folder / "found.json").write_text(json.dumps(found))
"""


def _environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return clean_environment(PATH=path, GLOO_SOCKET_IFNAME="lo", TMPDIR=str(folder))  # torchrun leaves its logs there


def _found(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def test_a_rank_that_is_killed_on_one_of_two_nodes_is_started_again(tmp_path: Path) -> None:
    """They meet by c10d, where each node has a count of restarts of its own."""
    script, pipe = tmp_path / "script.py", subprocess.PIPE
    script.write_text(SCRIPT)
    several, alone = tmp_path / "several", tmp_path / "alone"
    several.mkdir()
    alone.mkdir()
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two"]
    place = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", "--local-addr", "127.0.0.1", *meet]
    words = [sys.executable, "-m", "torch.distributed.run", *place, str(script), str(several)]
    options: Any = {"env": _environment(tmp_path), "stdout": pipe, "stderr": pipe, "text": True}
    nodes = [subprocess.Popen(words, start_new_session=True, **options) for _ in range(2)]
    try:
        ends = [node.communicate(timeout=250) for node in nodes]
    finally:
        for node in nodes:
            end(node)
    assert [node.returncode for node in nodes] == [0, 0], ends
    assert (several / "killed").exists()
    done = finished([sys.executable, str(script), str(alone)], _environment(tmp_path))
    assert done.returncode == 0, done
    first, second = _found(several), _found(alone)
    assert first["weights"] == second["weights"]
    assert (first["size"], first["made"], second["made"]) == (2, 3, 6)  # of six sweeps, three were in the checkpoint


def test_the_example_trains_on_two_nodes(tmp_path: Path) -> None:
    done = finished(["bash", str(EXAMPLE), str(free_port())], _environment(tmp_path))
    assert done.returncode == 0, done
    assert done.stdout.startswith("4 rank(s): 0.9"), done


def test_the_example_leaves_no_node_behind_when_one_fails(tmp_path: Path) -> None:
    taken = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    done = finished(["bash", str(EXAMPLE), str(taken.port)], _environment(tmp_path))
    assert done.returncode != 0
    assert not [words for words in _commands() if str(taken.port) in words], done


def _commands() -> list[str]:
    """Of all processes."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(place.read_text(errors="replace"))
        except OSError:  # it has ended
            continue
    return found
