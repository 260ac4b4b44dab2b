"""torchrun --max-restarts: a killed rank, and a run that ends as if nothing had happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ..commands import finished
from ..ranks import clean_environment

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, signal, sys
from torch_admm import AnchoredADMM, BregmanADMM, comm, fit
from tests.helpers import blobs, net

methods = {"bregman": BregmanADMM("hinge", warm_start=1), "anchored": AnchoredADMM("hinge", batch_size=40)}
method, steps = methods[sys.argv[2]], []
step = type(method).step

def killed(self):  # in the fourth sweep of the first try
    steps.append(1)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(steps) == 4 and os.environ["RANK"] == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
    step(self)

type(method).step = killed
model = net(4, 7, 5, 1)
with comm.start() as ranks:
    more = dict(checkpoint=sys.argv[1], resume="auto", deterministic=True)
    result = fit(model, blobs(97, 4), method, max_sweeps=5, sinks=(), **more)
    if ranks.rank == 0:
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        found = dict(restarts=restarts, steps=len(steps), sweeps=len(result.history))
        found["weights"] = [p.tolist() for p in model.parameters()]
        with open(sys.argv[1] + ".json", "w") as file:
            json.dump(found, file)
"""


@pytest.mark.parametrize(("method", "rank"), [("bregman", "0"), ("anchored", "1")])
def test_a_killed_rank_is_started_again_and_goes_on(method: str, rank: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    restarted = [*torchrun, "--max-restarts", "2", str(script), str(tmp_path / "a"), method, rank]
    alone = [sys.executable, str(script), str(tmp_path / "b"), method, rank]
    env = clean_environment(TORCHELASTIC_RESTART_COUNT="1", TMPDIR=str(tmp_path))  # torchrun leaves its logs there
    for command in (restarted, alone):
        done = finished(command, env)
        assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab")
    assert first.pop("restarts") == 1
    assert second.pop("restarts") == 1  # as the environment said
    assert (first.pop("steps"), second.pop("steps")) == (2, 5)  # three sweeps were saved
    assert first == second
    assert first["sweeps"] == 6
