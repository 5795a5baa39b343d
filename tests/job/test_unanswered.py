"""Pairs of hosts that do not reach each other are named; a job that never begins ends."""

from __future__ import annotations

from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario

TWO = {"start_np": 2, "max_np": 2, "start_timeout": 60.0}


def formed(scenario: MakeScenario) -> Scenario:
    """A world of two hosts, in which nobody has finished a step."""
    job: Scenario = scenario(**TWO).training(steps=0, a=1, b=1)
    assert not job.job.outcome.has_progress
    return job


def unanswered(job: Scenario, host: str, other: str, seconds: float = 5.0) -> None:
    address = job.job.fleet.agents[other].address
    incarnation = job.job.fleet.agents[host].incarnation
    job.send(ev.ConnectionUnanswered(host, incarnation, f"{host}.0.1", address, 29410, seconds))


def test_a_pair_is_named_once_with_its_direction_and_port(scenario: MakeScenario) -> None:
    job = formed(scenario)
    for seconds in (5.0, 15.0):
        unanswered(job, "a", "b", seconds)
    (told,) = job.announced("connection_unanswered")
    assert told.host == "a"
    assert "a gets no answer from b (" in told.reason
    assert "TCP port 29410" in told.reason
    unanswered(job, "b", "a")
    assert len(job.announced("connection_unanswered")) == 2


def test_a_server_that_is_no_host_of_the_job_is_nobody_s_business(scenario: MakeScenario) -> None:
    job = formed(scenario)
    job.send(ev.ConnectionUnanswered("a", 1, "a.0.1", "192.0.2.7", 5432, 9.0))
    assert job.announced("connection_unanswered") == []


def test_a_job_that_never_begins_for_it_ends_after_the_start_timeout(
    scenario: MakeScenario,
) -> None:
    job = formed(scenario)
    unanswered(job, "a", "b")
    job.wait(59.0)
    unanswered(job, "a", "b", 64.0)
    assert job.end is None
    job.wait(2.0)
    unanswered(job, "a", "b", 66.0)
    assert job.end is not None
    assert job.end.exit_code == 75
    assert "a gets no answer from b" in job.job.outcome.end.reason


def test_a_job_that_trains_goes_on(scenario: MakeScenario) -> None:
    job = formed(scenario)
    unanswered(job, "a", "b")
    job.step("a.0.1")
    job.wait(100.0)
    unanswered(job, "a", "b", 105.0)
    assert job.end is None
