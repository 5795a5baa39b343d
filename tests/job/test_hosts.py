"""Hosts in stable order, their cool-downs and their return.

A host that refuses us, or lacks something, is said once and tried a few times.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from elastic_driver.job.decisions import StartAgent
from elastic_driver.job.events import AgentLost
from elastic_driver.job.hosts import MOST_REFUSALS, Hindrance, Hosts, reason_of
from elastic_driver.settings import Settings
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario


def manager(*hosts: tuple[str, int], **settings: Any) -> Hosts:
    made = Hosts(Settings(**settings))
    made.record_discovered(hosts)
    return made


def names(hosts: Hosts) -> list[str]:
    return list(hosts.known)


def test_known_hosts_keep_their_place_and_new_ones_are_appended() -> None:
    hosts = manager(("c", 1), ("a", 1))
    changes = hosts.record_discovered((("a", 1), ("b", 2), ("c", 1)))
    assert names(hosts) == ["c", "a", "b"]
    assert (changes.added, changes.removed, changes.resized) == ((("b", 2),), (), ())


def test_the_same_hosts_in_another_order_are_no_change() -> None:
    assert not any(manager(("a", 1), ("b", 2)).record_discovered((("b", 2), ("a", 1))))


def test_removal_and_resizing_are_named() -> None:
    hosts = manager(("a", 1), ("b", 2), ("c", 3))
    changes = hosts.record_discovered((("b", 4), ("c", 0)))
    assert (changes.added, changes.removed, changes.resized) == ((), ("a", "c"), (("b", 2, 4),))
    assert "c" not in hosts.known
    assert len(hosts.known) == 1


def test_a_host_that_comes_back_goes_to_the_end() -> None:
    hosts = manager(("a", 1), ("b", 1))
    hosts.record_discovered((("b", 1),))
    hosts.record_discovered((("a", 1), ("b", 1)))
    assert names(hosts) == ["b", "a"]


def test_a_host_comes_back_after_its_cooldown_and_not_before() -> None:
    hosts = manager(("a", 1), host_failures=1, blacklist_cooldown=(10.0, 600.0))
    assert hosts.count_failure("a", 0.0, "w exited 1") is not None
    assert hosts.next_resurrection() == 10.0
    assert hosts.resurrect(9.9) == []
    assert not hosts.is_usable("a")
    assert hosts.cooldown_left("a", 4.0) == 6.0
    assert "w exited 1" in reason_of(hosts, "a", 4.0)
    assert hosts.resurrect(10.0) == ["a"]
    assert hosts.is_usable("a")
    assert (hosts.cooldown_left("a", 10.0), reason_of(hosts, "a", 10.0)) == (0.0, "")


@pytest.mark.parametrize(("given", "needed"), [(None, 3), (1, 1), (5, 5)])
def test_so_many_failures_within_the_window_cool_a_host_down(
    given: int | None, needed: int
) -> None:
    hosts = manager(("a", 1), host_failures=given)
    for failure in range(needed - 1):
        assert hosts.count_failure("a", float(failure), "x") is None
    assert hosts.count_failure("a", float(needed), "x") is not None


def test_failures_far_apart_do_not_add_up() -> None:
    hosts = manager(("a", 1), host_failures=2, host_failure_window=60.0)
    assert hosts.count_failure("a", 0.0, "x") is None
    assert hosts.count_failure("a", 60.0, "x") is None
    assert hosts.count_failure("a", 119.9, "x") is not None


def test_each_cooldown_is_twice_as_long_up_to_the_longest() -> None:
    hosts = manager(("a", 1), host_failures=1, blacklist_cooldown=(10.0, 35.0))
    now, lengths = 0.0, []
    for _ in range(4):
        hosts.count_failure("a", now, "x")
        lengths.append(hosts.cooldown_left("a", now))
        now += lengths[-1]
        hosts.resurrect(now)
    assert lengths == [10.0, 20.0, 35.0, 35.0]


def test_a_finished_step_and_a_quiet_window_wipe_the_doubling() -> None:
    hosts = manager(("a", 1), host_failures=1, blacklist_cooldown=(10.0, 600.0))
    hosts.count_failure("a", 0.0, "x")
    hosts.resurrect(10.0)
    hosts.record_step("a")
    hosts.count_failure("a", 1000.0, "x")
    assert hosts.cooldown_left("a", 1000.0) == 10.0


def test_quiet_without_a_finished_step_wipes_nothing() -> None:
    hosts = manager(("a", 1), host_failures=1, blacklist_cooldown=(10.0, 600.0))
    hosts.count_failure("a", 0.0, "x")
    hosts.resurrect(10.0)
    hosts.count_failure("a", 1000.0, "x")
    assert hosts.cooldown_left("a", 1000.0) == 20.0


def test_flapping_heals_nothing() -> None:
    hosts = manager(("a", 1), host_failures=1, blacklist_cooldown=(10.0, 600.0))
    hosts.count_failure("a", 0.0, "x")
    hosts.record_discovered(())
    hosts.record_discovered((("a", 1),))
    assert not hosts.is_usable("a")
    assert hosts.hindrance("a") is Hindrance.COOL_DOWN


def test_an_agent_lost_once_is_started_again_twice_cools_the_host_down() -> None:
    hosts = manager(("a", 1))
    assert hosts.count_agent_loss("a", 0.0, "gone", started=True) is None
    assert hosts.is_suspect("a", 30.0)
    assert hosts.count_agent_loss("a", 30.0, "gone", started=True) is not None


def test_agents_lost_far_apart_are_started_again_each_time() -> None:
    hosts = manager(("a", 1), host_failure_window=60.0)
    assert hosts.count_agent_loss("a", 0.0, "gone", started=True) is None
    assert not hosts.is_suspect("a", 60.0)
    assert hosts.count_agent_loss("a", 60.0, "gone", started=True) is None


def test_an_agent_that_cannot_start_cools_the_host_down_at_once() -> None:
    hosts = manager(("a", 1))
    reason = hosts.count_agent_loss("a", 0.0, "ssh: no route", started=False)
    assert reason == "no new workers for 10 s: ssh: no route"


def test_to_ask_whether_a_host_is_suspect_changes_nothing() -> None:
    hosts = manager(("a", 1), host_failure_window=60.0)
    hosts.count_agent_loss("a", 0.0, "gone", started=True)
    before = deepcopy(hosts.known["a"])
    assert not hosts.is_suspect("a", 1000.0)
    assert hosts.known["a"] == before


def test_trouble_of_a_host_that_is_gone_is_nobodys() -> None:
    hosts = manager(("a", 1), host_failures=1)
    assert hosts.count_failure("z", 0.0, "x") is None
    assert hosts.count_agent_loss("z", 0.0, "x", started=True) is None
    hosts.record_step("z")
    assert not hosts.is_suspect("z", 0.0)


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
