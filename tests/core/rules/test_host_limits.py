"""Hosts whose workers wait for processors get fewer, where `--auto-scale` decides."""

from __future__ import annotations

import pytest

from elastic_driver.core import events as ev
from elastic_driver.core.driver_events import HostStarved
from tests.core.scenario import MakeScenario, Scenario

WHY = "its processors were busy"


def trained(scenario: MakeScenario, **settings: object) -> Scenario:
    """Four workers on two hosts."""
    return scenario(**{"start_np": 4, "auto_scale": True, **settings}).training(a=2, b=2)


def meet(s: Scenario) -> None:
    """The members leave the round, and meet again."""
    s.wait(1.0)
    s.ready(*s.in_state("running"), version=1)
    s.wait(1.0)


def test_a_starved_host_gets_a_worker_less_and_the_job_a_smaller_size(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario)
    s.send(HostStarved("a", 1, WHY))
    (told,) = s.announced("host_starved")
    assert (told.host, told.reason, told.detail) == ("a", WHY, {"slots": 1})
    meet(s)
    assert sorted(member.place.host for member in s.world.members) == ["a", "b", "b"]
    assert s.job.capacity.wanted == 3
    assert s.job.rounds.resets == 0, "it was asked for"


def test_the_worker_moves_if_another_host_has_a_free_slot(scenario: MakeScenario) -> None:
    s = trained(scenario)
    s.hosts(a=2, b=2, c=1)
    s.send(HostStarved("a", 1, WHY))
    assert s.job.capacity.wanted == 4
    meet(s)
    s.ready(*s.starting)
    meet(s)
    assert sorted(member.place.host for member in s.world.members) == ["a", "b", "b", "c"]


@pytest.mark.parametrize(
    ("settings", "event"),
    [
        ({"auto_scale": False}, HostStarved("a", 1, WHY)),
        ({"min_np": 4}, HostStarved("a", 1, WHY)),
        ({}, HostStarved("a", 0, WHY)),
        ({}, HostStarved("a", 2, WHY)),
        ({}, HostStarved("z", 1, WHY)),
    ],
)
def test_what_cannot_be_changes_nothing(
    scenario: MakeScenario, settings: dict[str, object], event: HostStarved
) -> None:
    s = trained(scenario, **settings)
    s.send(event)
    assert s.announced("host_starved") == []
    assert s.job.hosts.known["a"].slots == 2
    assert s.job.effects.ignored_events == 1


def test_a_user_s_size_outranks_it_and_its_release_gives_the_slots_back(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario)
    s.send(HostStarved("a", 1, WHY))
    meet(s)
    s.send(ev.ScaleRequested(3))
    s.send(HostStarved("b", 1, WHY))
    assert s.job.hosts.known["b"].slots == 2
    s.send(ev.ScaleRequested(None))
    assert s.job.hosts.known["a"].slots == 2
