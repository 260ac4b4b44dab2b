"""Loss and score of many rows, added up shard by shard, are those of all rows at once."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import net, rng
from torch_admm import from_module, loss_of
from torch_admm.comm import Solo
from torch_admm.data import rows_of
from torch_admm.tally import tally_for

ROWS = 6_200  # enough to be cut into shards
TARGETS = {
    "logistic": torch.randint(0, 2, (ROWS, 3), generator=rng(1)).float(),  # several labels: a share of all entries
    "cross_entropy": torch.randint(0, 3, (ROWS,), generator=rng(2)),
    "squared": torch.randn(ROWS, 3, generator=rng(3)),
    "one_vs_rest_hinge": torch.randint(0, 3, (ROWS,), generator=rng(4)),
}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", TARGETS)
def test_figures_are_those_of_all_rows_at_once(name: str, deterministic: bool) -> None:
    loss, model, x = loss_of(name), net(4, 5, 3), torch.randn(ROWS, 4, generator=rng(5))
    problem = from_module(model, loss)
    rows, comm = rows_of((x, TARGETS[name]), problem), Solo(deterministic=deterministic)
    assert comm.cuts(rows)
    z, y = model(x).detach(), loss.encode(TARGETS[name], 3, x)
    tally = tally_for(problem, rows, comm)
    for part, chunk in comm.portions(rows, 100):
        tally.add(model(chunk.x).detach(), chunk, part)
    assert tally.figures() == pytest.approx((float(loss(z, y).double().mean()), loss.score(z, y)), rel=1e-6)
