"""Hosts that are drained are left at a boundary, replaced first where there is room.

A signal to a whole job reaches its parts one after the other: the world stays until then.
"""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.job.decisions import (
    Decision,
    PublishNotice,
    PublishSave,
    PublishWorld,
    StartAgent,
    StopAgent,
)
from elastic_driver.job.events import JobLeaving
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from elastic_driver.words.orders import StartWorkerOrder
from tests.job.scenario import MakeScenario, Scenario


def drain(s: Scenario, host: str, deadline: float | None = None) -> list[Decision]:
    return s.send(ev.DrainRequested(host, "maintenance", deadline))


def leave(s: Scenario, version: int) -> None:
    """Every running member arrives at the boundary."""
    s.wait(0.1)
    assert s.notice.after_step is not None
    s.ready(*s.in_state("running"), version=version)


def host(s: Scenario, name: str) -> Any:
    return next(h for h in s.job.status(s.now).hosts if h.host == name)


def test_a_drained_host_is_left_at_a_boundary_and_its_agent_let_go(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, min_np=1).training(a=2, b=2)
    drain(s, "b")
    assert host(s, "b").state == "draining"
    leave(s, version=7)
    assert s.members == ["a.0.1", "a.1.1"]
    assert {o.worker for o in s.orders(msg.StopWorkerOrder)} == {"b.0.1", "b.1.1"}
    s.obey_stops()
    assert [d.host for d in s.all(StopAgent)] == ["b"]
    assert [a.host for a in s.announced("host_drained")] == ["b"]
    assert (host(s, "b").state, host(s, "b").reason) == ("drained", "maintenance")
    assert not s.announced("host_blacklisted")


def test_a_drained_host_is_not_used_again_while_discovery_names_it(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1).training(a=1, b=1)
    drain(s, "b")
    leave(s, version=3)
    s.obey_stops()
    started = len(s.all(StartAgent))
    s.hosts(a=1, b=4)
    s.wait(100.0)
    assert len(s.all(StartAgent)) == started


def test_a_drained_host_that_was_away_and_comes_back_is_used_again(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1).training(a=1, b=1)
    drain(s, "b")
    leave(s, version=3)
    s.obey_stops()
    s.hosts(a=1)
    s.hosts(a=1, b=1)
    assert s.starting == ["b.0.2"]


def test_the_replacement_is_ready_before_the_leaver_is_let_go(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=1, b=1, c=3)
    drain(s, "b")
    assert s.starting == ["c.0.1"]
    s.wait(30.0)
    assert s.round == (1, "complete")
    assert s.job.status(s.now).reason.endswith("its replacements are booting")
    s.ready("c.0.1")
    leave(s, version=9)
    assert s.members == ["a.0.1", "c.0.1"]
    assert [o.worker for o in s.orders(msg.StopWorkerOrder)] == ["b.0.1"]


def test_all_replacements_are_waited_for_so_that_there_is_one_change(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, min_np=1, max_np=3).training(a=1, b=2, c=2)
    drain(s, "b")
    s.ready("c.0.1")
    s.wait(5.0)
    assert s.round == (1, "complete")
    s.ready("c.1.1")
    leave(s, version=9)
    assert s.members == ["a.0.1", "c.0.1", "c.1.1"]


def test_replacements_that_take_too_long_are_not_waited_for(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=1, b=1, c=1)
    drain(s, "b", deadline=20.0)
    s.wait(9.9)
    assert s.all(PublishNotice) == []
    s.wait(0.1)
    assert s.notice.after_step is not None
    s.ready("a.0.1", "b.0.1", version=9)
    assert s.members == ["a.0.1"]


def test_a_later_drain_with_less_time_counts(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=1, b=1, c=1)
    drain(s, "b")
    drain(s, "b", deadline=4.0)
    s.wait(2.0)
    assert s.notice.after_step is not None


def test_without_room_elsewhere_a_drained_host_is_left_at_once(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=1, b=1)
    drain(s, "b")
    s.wait(0.1)
    assert s.notice.after_step is not None


def test_a_host_removed_meanwhile_does_not_wait_for_replacements(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=1, b=1, c=1)
    drain(s, "b")
    s.hosts(a=1, c=1)
    s.wait(0.1)
    assert s.notice.after_step is not None


def test_the_whole_world_drained_hands_its_state_over(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, min_np=1, max_np=2).training(a=1)
    drain(s, "a")
    s.hosts(a=1, b=1)
    s.ready("b.0.1")
    leave(s, version=5)
    assert s.members == ["a.0.1", "b.0.1"]  # the only holder of the state joins once more
    leave(s, version=6)
    assert s.members == ["b.0.1"]


def test_an_agent_s_notice_drains_its_host(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1).training(a=1, b=1)
    s.send(ev.HostLeaving("b", 1, 30.0, "got SIGTERM"))
    leave(s, version=5)
    assert s.members == ["a.0.1"]
    assert [a.reason for a in s.announced("drain_requested")] == ["got SIGTERM"]


def test_an_old_agent_s_notice_is_ignored(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1).training(a=1, b=1)
    assert s.send(ev.HostLeaving("b", 2, 30.0, "got SIGTERM")) == []
    assert "not the present one" in s.job.effects.ignored


def test_an_agent_that_dies_while_its_host_is_drained_is_no_failure(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_restarts=0).training(a=1, b=1)
    drain(s, "b")
    s.agent_lost("b", "the machine is off")
    s.ready("a.0.1", version=4)
    assert s.members == ["a.0.1"]
    assert s.end is None
    assert s.job.outcome.budget.failures == 0
    assert not s.announced("host_blacklisted")
    assert [d.host for d in s.all(StartAgent)] == ["a", "b"]


def test_a_worker_that_is_killed_on_a_drained_host_is_no_failure(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_restarts=0).training(a=1, b=1)
    drain(s, "b")
    s.exit("b.0.1", -15)
    s.ready("a.0.1", version=4)
    assert s.members == ["a.0.1"]
    assert s.end is None


def test_a_drain_that_is_cancelled_in_time_changes_nothing(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=1, b=1, c=1)
    drain(s, "b")
    s.send(ev.DrainCancelled("b", "it stays after all"))
    s.wait(60.0)
    assert s.all(PublishNotice) == []
    assert s.members == ["a.0.1", "b.0.1"]
    assert host(s, "b").state == "usable"


def test_a_drain_that_is_cancelled_on_the_way_out_keeps_the_workers(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=1).training(a=1, b=1)
    drain(s, "b")
    s.wait(0.1)
    assert s.notice.after_step is not None
    s.send(ev.DrainCancelled("b", "it stays after all"))
    s.ready("a.0.1", "b.0.1", version=3)
    assert s.members == ["a.0.1", "b.0.1"]
    assert s.orders(msg.StopWorkerOrder) == []


def test_a_drained_host_may_be_given_back(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1).training(a=1, b=1)
    drain(s, "b")
    leave(s, version=3)
    s.obey_stops()
    s.send(ev.DrainCancelled("b", "repaired"))
    assert s.starting == ["b.0.2"]


def test_draining_what_is_not_there_or_already_drained_is_ignored(scenario: MakeScenario) -> None:
    s = scenario(start_np=1).training(a=1)
    assert drain(s, "z") == []
    assert "not there" in s.job.effects.ignored
    s.send(ev.DrainCancelled("a", "why not"))
    assert "not drained" in s.job.effects.ignored


def test_an_idle_host_is_drained_at_once(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=1).training(a=1, b=1)
    drain(s, "b")
    s.wait(1.0)
    assert [a.host for a in s.announced("host_drained")] == ["b"]
    assert s.all(PublishNotice) == []


def test_a_plain_job_is_restarted_without_the_drained_host(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, plain_after=1.0)
    s.hosts(a=1, b=1)
    s.wait(1.0)
    drain(s, "b")
    s.wait(0.1)
    s.obey_stops()
    assert s.members == ["a.0.2"]
    assert [d.host for d in s.all(StopAgent)] == ["b"]


# ---- single workers with a notice --------------------------------------------------------


def tell(s: Scenario, *workers: str, deadline: float = 30.0) -> None:
    for worker in workers:
        s.send(ev.WorkerLeaving(worker, deadline, "it got SIGTERM"))


def test_a_worker_that_has_to_go_leaves_at_a_boundary_and_its_slot_is_filled_again(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, min_np=1, max_restarts=0).training(a=2, b=1)
    tell(s, "a.1.1")
    assert [(a.worker, a.reason) for a in s.announced("worker_leaving")] == [
        ("a.1.1", "it got SIGTERM")
    ]
    leave(s, version=7)
    assert s.members == ["a.0.1", "b.0.1"]
    assert [o.worker for o in s.orders(msg.StopWorkerOrder)] == ["a.1.1"]
    s.obey_stops()
    assert s.starting == ["a.1.2"]
    s.ready("a.1.2")
    leave(s, version=9)
    assert s.members == ["a.0.1", "a.1.2", "b.0.1"]
    assert s.job.outcome.budget.failures == 0
    assert not s.announced("host_blacklisted")


def test_a_worker_that_has_to_go_is_replaced_first_where_there_is_room(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=1, b=2)
    tell(s, "a.0.1")
    assert s.starting == ["b.1.1"]
    s.wait(10.0)
    assert s.round == (1, "complete")
    s.ready("b.1.1")
    leave(s, version=9)
    assert s.members == ["b.0.1", "b.1.1"]


def test_a_worker_that_has_to_go_waits_for_half_of_its_time(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=1, b=2)
    tell(s, "a.0.1", deadline=20.0)
    s.wait(9.9)
    assert s.all(PublishNotice) == []
    s.wait(0.1)
    assert s.notice.after_step is not None


def test_a_worker_that_has_to_go_and_dies_of_it_is_no_failure(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_restarts=0).training(a=2)
    tell(s, "a.1.1")
    s.exit("a.1.1", -15)
    assert s.notice.after_step is None
    s.ready("a.0.1", version=4)
    assert s.members == ["a.0.1"]
    assert s.starting == ["a.1.2"]
    assert s.end is None


def test_when_all_have_to_go_one_stays_until_its_state_is_handed_over(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, min_np=1).training(a=3)
    tell(s, "a.0.1", "a.1.1", "a.2.1")
    leave(s, version=7)
    assert s.orders(msg.StopWorkerOrder) == []  # the state is written first, where it can be
    s.send(ev.WorkerSaved("a.0.1", 1))
    assert {o.worker for o in s.orders(msg.StopWorkerOrder)} == {"a.1.1", "a.2.1"}
    s.obey_stops()
    s.ready("a.1.2")
    assert s.members == ["a.0.1", "a.1.2"]
    s.ready("a.2.2")
    leave(s, version=8)
    assert s.members == ["a.1.2", "a.2.2"]
    s.obey_stops()
    assert s.starting == ["a.0.2"]


def test_a_notice_that_is_repeated_or_comes_too_late_is_ignored(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1).training(a=2)
    tell(s, "a.1.1")
    tell(s, "a.1.1")
    assert "before" in s.job.effects.ignored
    leave(s, version=3)
    tell(s, "a.1.1", "b.0.1")
    assert s.job.effects.ignored == "b.0.1 is gone or going, or has not taken part yet"
    assert len(s.announced("worker_leaving")) == 1


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
