"""The walk of AnchoredADMM: when its factors are taken anew, and memory that chunks of all sizes share."""

from __future__ import annotations

import pytest
import torch

from torch_admm import from_module
from torch_admm.walk import CACHED, EVERY, LONG_STEPS, SMALL_SIDE, Walk

from .helpers import net, rng

BETA, GAMMA = 1.0, 2.0


def made() -> tuple[Walk, dict[int, torch.Tensor]]:
    """Layer 2 is wide, layer 3 small."""
    problem = from_module(net(5, 8, SMALL_SIDE + 1, 3), "cross_entropy")
    W = problem.read()
    return Walk(problem, W, BETA, GAMMA), W


@pytest.mark.parametrize(
    ("step", "refresh", "anew"),
    [
        (0, False, {3}),
        (LONG_STEPS - 1, False, {3}),
        (LONG_STEPS * EVERY, False, {3}),
        (LONG_STEPS * EVERY + 1, False, set()),
        (LONG_STEPS * EVERY + 1, True, {2, 3}),
    ],
)
def test_small_factors_are_taken_anew_every_few_steps(step: int, refresh: bool, anew: set[int]) -> None:
    walk, W = made()
    walk.factor(W, step, refresh)
    for l, K in walk.K.items():
        V = W[l][:, :-1]
        right = BETA * torch.linalg.inv(BETA * V @ V.T + GAMMA * torch.eye(len(V)))
        torch.testing.assert_close(K, right if l in anew else torch.zeros_like(K))


def test_chunks_of_many_sizes_share_their_memory() -> None:
    """More sizes than are kept, now larger and now smaller: a and m are those of the network itself."""
    walk, W = made()
    sizes = [*range(1, CACHED + 9), 3, 500, 2, 400]
    for rows in sizes:
        x = torch.randn(rows, 5, generator=rng(rows))
        a, m = walk.forward(W, x)
        expected = x
        for l, W_l in W.items():
            torch.testing.assert_close(a[l - 1][:, : expected.shape[1]], expected)
            assert torch.equal(
                a[l - 1][:, expected.shape[1] :], torch.ones(rows, a[l - 1].shape[1] - expected.shape[1])
            )
            z = expected @ W_l[:, :-1].T + W_l[:, -1]
            torch.testing.assert_close(m[l], z)
            expected = z.clamp_min(0)
    assert len(walk._places) <= CACHED
