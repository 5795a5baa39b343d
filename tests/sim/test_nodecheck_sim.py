"""The node check against clusters whose faults are known, and against the plain rule."""

from __future__ import annotations

import pytest

from tests.sim.nodecheck_sim import (
    RATES,
    SimulatedCluster,
    our_check,
    play,
    seeds_for,
    two_round_rule,
)


@pytest.mark.parametrize("rate", RATES[1:])
@pytest.mark.parametrize("size", [6, 16, 64, 256, 1000])
def test_bad_nodes_are_found_and_healthy_ones_spared(size: int, rate: float) -> None:
    score = play(our_check, size, rate, seeds_for(size, 2000))
    assert score.f1 > 0.97
    assert score.rounds < 4


@pytest.mark.parametrize("size", [3, 4, 6, 16])
def test_in_small_clusters_the_plain_rule_does_worse(size: int) -> None:
    ours = play(our_check, size, 0.1, seeds_for(size, 2000))
    plain = play(two_round_rule, size, 0.1, seeds_for(size, 2000))
    assert ours.f1 > plain.f1 + 0.01
    assert ours.counts["healthy faulty"] <= plain.counts["healthy faulty"]


def test_of_two_nodes_a_faulty_one_is_found_and_the_other_never_blamed() -> None:
    score = play(our_check, 2, 0.1, range(1000))
    assert score.counts["healthy faulty"] == 0
    assert score.precision > 0.97


@pytest.mark.parametrize("rate", RATES[1:])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_in_small_clusters_all_are_found_that_anything_tells_apart(size: int, rate: float) -> None:
    score = play(our_check, size, rate, seeds_for(size, 2000), tellable=True)
    assert score.f1 > 0.97


def test_a_slow_link_of_two_is_told_by_nothing_and_slow_computing_by_the_other() -> None:
    cluster = SimulatedCluster(2, 0.0, 1)
    cluster.compute, cluster.network = {"n0": 3.0}, {"n1": 3.0}
    assert cluster.untellable == {"n1"}
    cluster.compute["n1"] = 3.0
    assert cluster.untellable == {"n0", "n1"}


def test_a_seed_replays_exactly() -> None:
    assert our_check(SimulatedCluster(64, 0.2, 7)) == our_check(SimulatedCluster(64, 0.2, 7))
