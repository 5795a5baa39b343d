"""Hosts with too few processors, or too little memory by what is known, get fewer workers."""

from __future__ import annotations

import pytest

from elastic_driver.job.events import HostsGranted, HostStarved, MemoryExpected
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario

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
    assert (told.host, told.reason, told.what.facts()) == ("a", WHY, {"slots": 1})
    meet(s)
    assert sorted(member.place.host for member in s.world.members) == ["a", "b", "b"]
    assert s.job.capacity.wanted == 3
    assert s.job.rounds.resets == 0, "it was asked for"


def test_a_starved_host_of_the_brain_gets_a_worker_less(scenario: MakeScenario) -> None:
    """The next grant takes it: the Brain knows where other slots are."""
    s = scenario(start_np=1, max_np=8)
    s.send(HostsGranted(1, (("a", 2), ("b", 2)), WHY))
    s.ready(*s.starting)
    s.wait(1.0)
    s.step(*s.members)
    s.send(HostStarved("a", 1, WHY))
    s.wait(60.0)
    assert s.round == (1, "complete")
    s.send(HostStarved("a", 1, WHY))
    assert len(s.announced("host_starved")) == 1, "it is known"
    s.send(HostsGranted(2, (("a", 1), ("b", 2), ("c", 1)), WHY))
    meet(s)
    s.ready(*s.starting)
    meet(s)
    assert sorted(member.place.host for member in s.world.members) == ["a", "b", "b", "c"]
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


def test_a_user_s_size_is_reached_on_a_starved_host_if_there_is_no_other(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario)
    s.send(HostStarved("a", 1, WHY))
    meet(s)
    s.send(ev.ScaleRequested(4))
    assert s.job.hosts.known["a"].slots == 2


def test_a_starved_host_is_used_in_full_if_the_job_could_not_train_else(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario, min_np=2)
    s.send(HostStarved("a", 1, WHY))
    meet(s)
    s.hosts(a=2)
    assert s.job.hosts.known["a"].slots == 2
    s.hosts(a=2, b=2)
    assert s.job.hosts.known["a"].slots == 1


# ---- the memory that similar jobs took -----------------------------------------------------


def searching(scenario: MakeScenario, slots: dict[str, int], **settings: object) -> Scenario:
    """A job with `--auto-scale` that has found these hosts; no agent is up."""
    s = scenario(**{"start_np": 2, "auto_scale": True, "agents": False, **settings})
    s.hosts(**slots)
    return s


def up(s: Scenario, host: str, memory: int, number: int = 7) -> None:
    """The agent of a host with so much memory comes up."""
    s.send(ev.AgentReady(host, 1, number, "x", (5000, 5001), memory=memory))


def test_a_host_gets_the_workers_for_which_it_has_the_memory_that_similar_jobs_took(
    scenario: MakeScenario,
) -> None:
    s = searching(scenario, {"a": 4, "b": 4})
    up(s, "a", 2000)
    up(s, "b", 9000, number=8)
    s.send(MemoryExpected(1000, WHY))
    assert {name: host.slots for name, host in s.job.hosts.known.items()} == {"a": 2, "b": 4}
    (told,) = s.announced("memory_expected")
    assert (told.reason, told.what.facts()) == (WHY, {"need": 1000})
    s.send(MemoryExpected(0, "their speeds differ"))
    assert s.job.hosts.known["a"].slots == 4


def test_a_host_that_comes_later_is_limited_by_it_too(scenario: MakeScenario) -> None:
    s = searching(scenario, {"a": 4})
    s.send(MemoryExpected(1000, WHY))
    up(s, "a", 3999)
    assert s.job.hosts.known["a"].slots == 3


def test_the_memory_of_similar_jobs_keeps_no_job_from_its_start(scenario: MakeScenario) -> None:
    s = searching(scenario, {"a": 2}, min_np=2)
    up(s, "a", 500)
    s.send(MemoryExpected(1000, WHY))
    assert s.job.hosts.known["a"].slots == 2


def test_what_a_worker_of_the_job_needed_outranks_what_those_of_similar_jobs_took(
    scenario: MakeScenario,
) -> None:
    s = searching(scenario, {"a": 1, "b": 2})
    s.agent_up("a")
    up(s, "b", 4000, number=8)
    s.send(MemoryExpected(4000, WHY))
    assert s.job.hosts.known["b"].slots == 1
    s.ready(*s.starting)
    s.wait(1.0)
    s.send(ev.WorkerExited(s.members[0], -9, "", out_of_memory=ev.OutOfMemory(1000, 5000)))
    assert s.job.hosts.known["b"].slots == 2
