"""A signal to a whole job reaches its parts one after the other: the world stays until then."""

from __future__ import annotations

import pytest

from elastic_driver.job.decisions import PublishNotice, PublishSave, PublishWorld
from elastic_driver.job.events import JobLeaving
from elastic_driver.words import wire_events as ev
from elastic_driver.words.orders import StartWorkerOrder
from tests.job.scenario import MakeScenario, Scenario

SPREAD = 5.0
FIXED = {"min_np": 1, "fixed_hosts": True, "notice_spread": SPREAD}


def tell_host(s: Scenario, host: str, deadline: float = 40.0) -> None:
    s.send(ev.HostLeaving(host, 1, deadline, "its agent got SIGTERM"))


def tell_worker(s: Scenario, worker: str, deadline: float = 40.0) -> None:
    s.send(ev.WorkerLeaving(worker, deadline, "it got SIGTERM"))


def leaves(s: Scenario) -> bool:
    return bool(s.all(PublishNotice))


def started(s: Scenario) -> int:
    return len(s.orders(StartWorkerOrder))


def worlds(s: Scenario) -> int:
    return len(s.all(PublishWorld))


def test_all_leave_together_as_soon_as_all_hosts_were_told(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, **FIXED).training(a=2, b=2)
    tell_worker(s, "a.0.1")
    s.wait(1.0)
    tell_host(s, "b")
    s.wait(2.0)
    assert not leaves(s)
    tell_host(s, "a")
    s.wait(0.1)
    s.ready(*s.in_state("running"), version=7)
    assert len(s.all(PublishSave)[-1].request.members) == 4
    assert worlds(s) == 1


def test_all_leave_together_as_soon_as_the_job_was_told(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, **FIXED).training(a=2, b=2)
    tell_host(s, "b")
    s.wait(1.0)
    s.send(JobLeaving("told to stop by SIGTERM", 60.0))
    s.wait(0.1)
    s.ready(*s.in_state("running"), version=7)
    # Its agent stops the workers of b when its own time is over.
    assert s.all(PublishSave)[-1].request.seconds == pytest.approx(34.0, abs=0.2)


def test_who_was_told_alone_leaves_after_the_wait(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, **FIXED).training(a=2, b=2)
    tell_host(s, "b")
    s.wait(SPREAD - 0.1)
    assert not leaves(s)
    s.wait(0.2)
    assert leaves(s)
    s.ready(*s.in_state("running"), version=7)
    assert s.members == ["a.0.1", "a.1.1"]


def test_the_wait_is_short_where_there_is_little_time(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, **FIXED).training(a=1, b=1)
    tell_host(s, "b", deadline=4.0)
    s.wait(0.9)
    assert not leaves(s)
    s.wait(0.2)
    assert leaves(s)


def test_a_repeated_notice_changes_nothing(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, **FIXED).training(a=1, b=1)
    tell_host(s, "b")
    tell_worker(s, "b.0.1")
    s.wait(2.0)
    before = len(s.decisions)
    tell_host(s, "b")
    tell_worker(s, "b.0.1")
    assert len(s.decisions) == before


def test_a_loss_meanwhile_forms_no_smaller_world_and_starts_nobody(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, **FIXED).training(a=2, b=2)
    count = started(s)
    tell_worker(s, "a.0.1")
    s.exit("b.0.1", -15)
    s.ready(*s.in_state("running"), version=7)
    s.wait(2.0)
    assert worlds(s) == 1
    assert started(s) == count
    tell_host(s, "a")
    tell_host(s, "b")
    members = s.all(PublishSave)[-1].request.members
    assert set(members) == {"a.0.1", "a.1.1", "b.1.1"}
