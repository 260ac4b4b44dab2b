"""The model behind the simulated cluster: what crosses, and how it adds up."""

from __future__ import annotations

import pytest

from benchmarks.simulate import PAPER, STATUS_BYTES, Cost, Network, buffers, measured_network, scaled, validated


def test_buffers_are_those_that_cross() -> None:
    assert buffers("28-300-1", "bregman") == [8 * 300 * 29, 8 * (301 + 300 * 301 // 2 + 300), STATUS_BYTES]
    assert buffers("28-300-1", "anchored") == [8 * (300 * 29 + 301), STATUS_BYTES]


def test_the_model_adds_up() -> None:
    network, cost = Network(1e-3, 1e6), Cost(1e-6, 0.5)
    parts = cost.parts(1_000_000, 4, [8_000, 16], network)
    assert parts == pytest.approx({"rows": 0.25, "solves": 0.5, "latency": 8e-3, "bandwidth": 1.5 * 8_016 / 1e6})
    alone = cost.parts(1_000_000, 1, [8_000, 16], network)
    assert alone == {"rows": pytest.approx(1.0), "solves": 0.5, "latency": 0, "bandwidth": 0}
    found = validated("28-300-1", "anchored", cost, network, {"1": 1.5})
    assert found["1"]["off"] == pytest.approx(0)


def test_a_network_is_read_off_its_sums() -> None:
    true = Network(3e-4, 5e8)
    exchange = {str(size): true.sum(2, size) for size in (8, 80_000, 1_600_000)}
    found = measured_network(exchange)
    assert found.latency == pytest.approx(true.latency, rel=1e-3)
    assert found.bandwidth == pytest.approx(true.bandwidth, rel=1e-3)


def test_says_what_ends_the_scaling() -> None:
    net = next(iter(PAPER))
    for cost, network, why in (
        (Cost(1e-6, 1.0), Network(1e-9, 1e12), "solves"),
        (Cost(1e-6, 0.0), Network(1.0, 1e12), "latency"),
        (Cost(1e-6, 0.0), Network(1e-9, 1e3), "bandwidth"),
    ):
        found = scaled(net, "bregman", cost, network, 12)
        assert found["because_of"] == why
        assert found["points"][0]["efficiency"] == pytest.approx(1.0)
