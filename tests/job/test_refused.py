"""A host that refuses us, or lacks something, is said once and tried a few times."""

from __future__ import annotations

import pytest

from elastic_driver.job.decisions import StartAgent
from elastic_driver.job.events import AgentLost
from elastic_driver.job.hosts import MOST_REFUSALS
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario

WHY = "b: Permission denied"


def refuse(job: Scenario) -> None:
    """The agent of b that is being started is refused, as often as it is started."""
    while (agent := job.job.fleet.starting.get("b")) is not None:
        job.send(AgentLost("b", agent.incarnation, WHY, refused=True))
        job.wait(1.0)


@pytest.fixture
def job(scenario: MakeScenario) -> Scenario:
    """A job that trains on a, and would on b."""
    job: Scenario = scenario(agents=False, start_np=1, max_np=2)
    job.hosts(a=1, b=1)
    job.agent_up("a")
    refuse(job)
    return job


def starts(job: Scenario) -> int:
    return sum(decision.host == "b" for decision in job.all(StartAgent))


def wait_through_all_tries(job: Scenario) -> None:
    for _ in range(400):
        job.wait(1.0)
        refuse(job)


def test_it_is_said_once_and_not_tried_for_ever(job: Scenario) -> None:
    wait_through_all_tries(job)
    assert starts(job) == MOST_REFUSALS
    first, last = (event.reason for event in job.announced("host_refused"))
    assert first == WHY
    assert "left alone" in last
    assert "elasticctl drain b --cancel" in last
    for name in ("agent_lost", "host_blacklisted", "host_resurrected"):
        assert not [event for event in job.announced(name) if event.host == "b"]
    status = next(h for h in job.job.status(job.now).hosts if h.host == "b")
    assert (status.state, WHY in status.reason) == ("refused", True)


def test_it_is_tried_again_once_somebody_says_that_it_is_mended(job: Scenario) -> None:
    wait_through_all_tries(job)
    job.send(ev.DrainCancelled("b"))
    assert starts(job) == MOST_REFUSALS + 1
    job.agent_up("b", job.job.fleet.agents["b"].incarnation)
    assert job.job.hosts.is_usable("b")


def test_it_is_tried_again_once_it_was_removed_from_the_list_and_added(job: Scenario) -> None:
    wait_through_all_tries(job)
    job.hosts(a=1)
    job.hosts(a=1, b=1)
    assert starts(job) == MOST_REFUSALS + 1


def test_what_was_said_before_the_job_is_not_said_again(scenario: MakeScenario) -> None:
    job: Scenario = scenario(agents=False, start_np=1, max_np=2, refused_hosts=(("b", WHY),))
    job.hosts(a=1, b=1)
    job.agent_up("a")
    assert starts(job) == 0, "it has just been tried"
    wait_through_all_tries(job)
    assert starts(job) == MOST_REFUSALS - 1
    before, last = job.announced("host_refused")
    assert before.what.facts() == {"told": True}, "for the log alone"
    assert "left alone" in last.reason


def test_a_host_that_the_job_cannot_do_without_is_not_tried_more_often(
    scenario: MakeScenario,
) -> None:
    job: Scenario = scenario(agents=False, start_np=2, min_np=2, start_timeout=10_000.0)
    job.hosts(a=1, b=1)
    job.agent_up("a")
    refuse(job)
    wait_through_all_tries(job)
    assert starts(job) == MOST_REFUSALS
