"""Hosts over the number wanted: some have an agent that waits, to replace a host that is lost."""

from __future__ import annotations

from elastic_driver.job.decisions import StartAgent
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario


def agents(job: Scenario) -> list[str]:
    return [decision.host for decision in job.all(StartAgent)]


def test_an_agent_stands_by_once_the_job_trains_and_starts_no_worker(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=2, max_np=2).training(a=1, b=1, c=1, d=1, steps=0)
    assert agents(job) == ["a", "b"]
    job.step("a.0.1")
    assert agents(job) == ["a", "b", "c"]
    job.wait(60.0)
    assert agents(job) == ["a", "b", "c"]
    assert job.round == (1, "complete")
    assert job.starting == []
    reasons = {host.host: host.reason for host in job.job.status(job.now).hosts}
    assert reasons["c"] == "stands by to replace a host that is lost"
    assert {reasons[host] for host in "abd"} == {""}


def test_a_lost_hosts_slots_are_filled_at_once_and_another_host_stands_by(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=2, max_np=2).training(a=1, b=1, c=1, d=1)
    job.silent.add("b")
    job.agent_lost("b", "power", unreachable=True)
    assert job.starting == ["c.0.1"]
    job.ready("a.0.1", version=3)
    job.ready("c.0.1")
    job.wait(1.0)
    job.ready("a.0.1", version=4)
    assert job.members == ["a.0.1", "c.0.1"]
    job.step("a.0.1")
    assert agents(job) == ["a", "b", "c", "d"]


def test_there_are_as_many_as_the_largest_host_in_use_needs(scenario: MakeScenario) -> None:
    job = scenario(start_np=5, max_np=5).training(a=4, b=1, c=2, d=1, e=1, f=8)
    assert agents(job) == ["a", "b", "c", "d", "e"]


def test_a_plain_job_has_them_too(scenario: MakeScenario) -> None:
    job = scenario(start_np=2, max_np=2)
    job.hosts(a=2, b=2)
    job.wait(9.0)
    assert agents(job) == ["a"]
    job.wait(2.0)
    assert agents(job) == ["a", "b"]


def test_slow_hosts_and_hosts_in_trouble_do_not_stand_by(scenario: MakeScenario) -> None:
    job = scenario(start_np=1, max_np=1).training(a=1, b=1, c=1, steps=0)
    job.job.hosts.distrust("b")
    job.send(ev.DrainRequested("c", "a new fan", None))
    job.step("a.0.1")
    assert agents(job) == ["a"]


def test_a_host_that_comes_back_when_its_place_is_taken_stands_by(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=2, max_np=2).training(a=1, b=1, c=1)
    job.silent.add("b")
    job.agent_lost("b", "power", unreachable=True)
    job.ready("a.0.1", version=3)
    job.ready("c.0.1")
    job.wait(1.0)
    job.ready("a.0.1", version=4)
    job.step("a.0.1")
    job.silent.clear()
    job.wait(0.5)
    assert agents(job) == ["a", "b", "c", "b"]
    assert job.members == ["a.0.1", "c.0.1"]
    job.wait(60.0)
    assert job.round == (3, "complete")
