"""The model of many ranks: what it predicts where the answer is known, and the bytes that it counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from benchmarks.scaling import METHODS
from benchmarks.simulate import CASES, STATUS_BYTES, Model, Network, Work, buffers, measured_network, scaled, validated
from torch_admm import fit
from torch_admm.precision import LITTLE_SWEEP

from .helpers import blobs, net
from .ranks import in_group, on_ranks

FREE = Network(0.0, math.inf)


def test_a_sum_takes_two_ways_over_a_tree() -> None:
    network = Network(1e-3, 1e6)
    assert network.sum(1, 1000) == 0
    assert network.sum(2, 1000) == pytest.approx(2e-3 + 1e-3)
    assert network.sum(8, 1000) == pytest.approx(6e-3 + 1.75e-3)
    assert network.sum(5, 1000) == pytest.approx(6e-3 + 1.6e-3)


def test_a_network_is_read_off_its_sums() -> None:
    true = Network(3e-4, 5e8)
    found = measured_network({str(size): true.sum(2, size) for size in (8, 80_000, 1_600_000)})
    assert found.latency == pytest.approx(true.latency, rel=1e-3)
    assert found.bandwidth == pytest.approx(true.bandwidth, rel=1e-3)


def test_work_is_linear_between_points_and_beyond_them() -> None:
    work = Work([10, 100, 1000], [1.0, 2.0, 20.0])
    assert [work(n) for n in (1, 10, 55, 100, 550, 1000, 2000)] == pytest.approx([1, 1, 1.5, 2, 11, 20, 40])


def test_the_model_of_known_costs_is_right_for_any_number_of_ranks() -> None:
    made = Model(Work([100, 1000], [0.1, 1.0]), [8])
    found = validated("28-300-1", made, FREE, {"1": 1000.0, "2": 400.0})
    assert [v["off"] for v in found.values()] == pytest.approx([0.0, 0.25])


def test_says_what_ends_the_scaling() -> None:
    linear, flat = Work([1, 1000], [1e-3, 1.0]), Work([1, 1000], [1.0, 2.0])
    for work, network, why in (
        (flat, FREE, "solves and calls"),
        (linear, Network(1.0, 1e12), "latency"),
        (linear, Network(1e-9, 10.0), "bandwidth"),
    ):
        found = scaled(100_000, Model(work, [8, 80]), network, 12)
        assert found["because_of"] == why
        assert found["points"][0]["efficiency"] == pytest.approx(1.0)
        assert found["points"][0]["to_target"] == pytest.approx(12 * found["points"][0]["sweep"])
    assert scaled(1_000_000, Model(linear, [8]), FREE, 1)["half_at"] is None


def _sent(ranks: Any, case: str, widths: list[int]) -> float:
    model: nn.Sequential = net(*widths)
    rows = max(480, LITTLE_SWEEP // sum(p.numel() for p in model.parameters()) + 1)  # not a little sweep
    history = fit(model, blobs(rows, widths[0]), METHODS[case](), max_sweeps=3, sinks=()).history
    return history[3]["bytes_sent"] - history[2]["bytes_sent"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("widths", [[4, 70, 1], [300, 200, 5, 1]])
def test_counts_the_bytes_that_really_cross(case: str, widths: list[int]) -> None:
    predicted = sum(buffers("-".join(map(str, widths)), case)) - STATUS_BYTES  # sent after the clock has stopped
    assert on_ranks(2, in_group, _sent, case, widths) == [predicted, predicted]
