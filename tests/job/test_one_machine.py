"""Two names of one machine are one host with the slots of both."""

from __future__ import annotations

import pytest

from elastic_driver.job.decisions import StartAgent, StopAgent
from tests.job.scenario import MakeScenario, Scenario

TWO = {"start_np": 2, "max_np": 2, "one_host_per_machine": True}


def places(job: Scenario) -> list[tuple[str, int, int]]:
    """Where the workers are that have a place: host, slot, local size."""
    workers = job.job.workers.workers.values()
    return sorted((w.host, w.place.local_rank, w.place.local_size) for w in workers if w.place)


def known(job: Scenario) -> dict[str, int]:
    return {name: host.slots for name, host in job.job.hosts.known.items()}


def removed(job: Scenario) -> list[tuple[str | None, str]]:
    return [(event.host, event.reason) for event in job.announced("host_removed")]


@pytest.fixture
def twice(scenario: MakeScenario) -> Scenario:
    """A job that names one machine twice; its agents come up when a test says so."""
    job: Scenario = scenario(agents=False, **TWO)
    job.machines = {"a": "m", "b": "m", "c": "n"}
    return job


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_first_name_has_the_slots_of_both(twice: Scenario, order: str) -> None:
    twice.hosts(a=1, b=1)
    for host in order:
        twice.agent_up(host)
    assert known(twice) == {"a": 2}
    assert {host for host, _, _ in places(twice)} == {"a"}
    assert sorted(rank for _, rank, _ in places(twice)) == [0, 1]
    ((host, reason),) = removed(twice)
    assert host == "b"
    assert "the same machine as a" in reason
    assert [stop.host for stop in twice.all(StopAgent)] == ["b"]


def test_the_name_at_work_stays_when_an_earlier_one_comes_up_later(twice: Scenario) -> None:
    twice.hosts(a=1, b=2)
    twice.agent_up("b")
    twice.ready(*twice.starting)
    twice.agent_up("a")
    assert known(twice) == {"b": 3}
    assert {host for host, _, _ in places(twice)} == {"b"}


def test_hosts_of_other_machines_and_of_unknown_ones_stay_apart(twice: Scenario) -> None:
    twice.hosts(a=1, c=1, d=1, e=1)
    for host in "ac":
        twice.agent_up(host)
    assert known(twice) == {"a": 1, "c": 1, "d": 1, "e": 1}
    twice.machines["a"] = ""
    twice.hosts(a=1, b=1, c=1)
    assert removed(twice) == [(name, "discovery no longer reports it") for name in "de"]


def test_names_are_kept_apart_where_that_is_wanted(scenario: MakeScenario) -> None:
    job: Scenario = scenario(start_np=2, max_np=2)
    job.machines = {"a": "m", "b": "m"}
    job.hosts(a=1, b=1)
    assert known(job) == {"a": 1, "b": 1}
    assert {host for host, _, _ in places(job)} == {"a", "b"}


def test_later_answers_of_discovery_count_for_both_names(twice: Scenario) -> None:
    twice.hosts(a=1, b=1)
    twice.agent_up("a")
    twice.agent_up("b")
    starts = len(twice.all(StartAgent))
    twice.hosts(b=2, a=1)
    assert known(twice) == {"a": 3}
    twice.hosts(b=2)
    assert known(twice) == {"a": 2}, "b is listed, and a is b"
    twice.hosts(c=1)
    assert known(twice) == {"c": 1}
    assert {start.host for start in twice.all(StartAgent)[starts:]} <= {"c"}


def test_three_names_are_one_host_and_a_snapshot_keeps_that(twice: Scenario) -> None:
    twice.machines["d"] = "m"
    twice.hosts(a=1, b=1, c=1, d=1)
    for host in "dba":
        if host in twice.job.fleet.agents:
            twice.agent_up(host)
    assert len([name for name in known(twice) if name != "c"]) <= 2
    twice.job = type(twice.job).restored(twice.job.snapshot())
    before = known(twice)
    twice.hosts(a=1, b=1, c=1, d=1)
    assert known(twice) == before


def test_a_name_that_means_another_machine_now_stands_for_itself(twice: Scenario) -> None:
    twice.hosts(a=1, b=1)
    twice.agent_up("a")
    twice.agent_up("b")
    assert known(twice) == {"a": 2}
    twice.machines["a"] = "new"
    twice.agent_lost("a")
    twice.agent_up("a", twice.job.fleet.agents["a"].incarnation)
    assert known(twice) == {"a": 1, "b": 1}
