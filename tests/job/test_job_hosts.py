"""Hosts come and go, shrink, cool down, and the user scales: who leaves, and at which boundary."""

from __future__ import annotations

from elastic_driver.job.decisions import KillAgent, PublishNotice, StartAgent, StopAgent
from elastic_driver.job.events import AgentLost, LeaseExpired, SizeProposed, StopRequested
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario


def test_a_removed_hosts_workers_leave_at_a_boundary_and_are_then_stopped(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3).training(a=2, b=1)
    s.hosts(a=2)
    s.wait(1.0)
    assert s.notice.after_step is not None
    assert s.notice.reason == "host b was removed"
    s.ready("a.0.1", "a.1.1", "b.0.1", version=5)
    assert s.members == ["a.0.1", "a.1.1"]
    assert [o.worker for o in s.orders(msg.StopWorkerOrder)] == ["b.0.1"]
    assert s.all(StopAgent) == []
    s.exit("b.0.1", 0)
    assert s.all(StopAgent)[0].host == "b"
    assert s.end is None
    assert s.job.status(s.now).counters.failures == 0


def test_a_removed_worker_that_dies_before_the_boundary_is_no_failure(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_restarts=0).training(a=1, b=1)
    s.hosts(a=1)
    s.exit("b.0.1", -15)
    assert s.notice.after_step is None
    s.ready("a.0.1", version=5)
    assert s.members == ["a.0.1"]
    assert s.end is None


def test_only_a_worker_that_was_told_to_stop_is_expected_to_fail(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, max_restarts=0).training(a=1, b=2)
    s.hosts(a=1)
    s.exit("b.0.1", 1)  # it was to leave, but has failed before it was told to stop
    (failed,) = s.announced("worker_exited")
    assert failed.what.facts() == {"exit_code": 1, "expected": False}
    assert failed.reason == "exit code 1, before it was told to stop (host b was removed)"
    s.ready("a.0.1", "b.1.1", version=5)
    s.obey_stops()
    stopped = s.announced("worker_exited")[-1]
    assert (stopped.worker, stopped.what.facts()["expected"]) == ("b.1.1", True)
    assert stopped.reason.endswith("as it was told to")
    assert s.end is None


def test_a_host_that_comes_back_within_the_last_call_changes_nothing(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, last_call=1.0).training(a=1, b=1)
    s.hosts(a=1)
    s.wait(0.5)
    s.hosts(a=1, b=1)
    s.wait(10.0)
    assert s.all(PublishNotice) == []
    assert s.round == (1, "complete")


def test_below_min_np_a_removed_host_is_left_all_the_same(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, min_np=3).training(a=2, b=2)
    s.hosts(a=2)
    s.wait(1.0)
    s.ready("a.0.1", "a.1.1", "b.0.1", "b.1.1", version=5)
    assert s.round == (2, "forming")
    assert sorted(s.in_state("stopping")) == ["b.0.1", "b.1.1"]
    assert s.job.status(s.now).reason == "2 of at least 3 workers are ready"


def test_when_every_host_is_exchanged_the_state_is_handed_over(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2).training(a=2)
    s.hosts(b=2)
    s.wait(30.0)
    assert s.round == (1, "complete")  # train on: nobody else holds the state
    s.ready("b.0.1")
    s.wait(1.0)
    s.ready("a.0.1", "a.1.1", version=9)
    assert s.members == ["a.0.1", "b.0.1"]  # one of the old stays to hand over
    s.step("a.0.1", "b.0.1")
    s.wait(1.0)
    assert s.notice.round == 2
    assert s.notice.after_step is not None
    s.ready("a.0.1", "b.0.1", version=11)
    assert s.members == ["b.0.1"]
    assert s.world.members[0].version == 11


def test_when_the_only_host_is_removed_the_job_waits_for_another(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, elastic_timeout=60.0).training(a=1)
    s.hosts()
    s.wait(1.0)
    s.ready("a.0.1", version=5)
    s.send(ev.WorkerSaved("a.0.1", 1, "/ckpt/step-5"))
    assert s.in_state("stopping") == ["a.0.1"]
    s.obey_stops()
    s.hosts(b=1)
    s.ready(*s.starting)
    assert s.members == ["b.0.1"]


def test_a_host_that_shrinks_keeps_its_oldest_workers(scenario: MakeScenario) -> None:
    s = scenario(start_np=3).training(a=3)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", "a.2.1", version=2)
    s.ready("a.0.2")
    s.wait(1.0)
    s.ready("a.1.1", "a.2.1", version=3)
    assert s.members == ["a.1.1", "a.2.1", "a.0.2"]
    s.hosts(a=2)
    s.wait(1.0)
    s.ready("a.1.1", "a.2.1", "a.0.2", version=4)
    assert s.members == ["a.1.1", "a.2.1"]


def test_scaling_down_and_up_keeps_the_oldest(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, max_np=4).training(a=2, b=2)
    s.send(ev.ScaleRequested(2))
    s.wait(1.0)
    s.ready(*s.members, version=5)
    assert s.members == ["a.0.1", "a.1.1"]
    s.obey_stops()
    s.send(ev.ScaleRequested(99))
    assert s.starting == ["b.0.2", "b.1.2"]
    assert s.announced("scale_requested")[-1].reason == "4 workers, as 99 is beyond the limits"
    s.ready("b.0.2", "b.1.2")
    s.wait(1.0)
    s.ready("a.0.1", "a.1.1", version=6)
    assert s.world.size == 4


def test_scaling_never_goes_below_min_np(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, min_np=2).training(a=3)
    s.send(ev.ScaleRequested(0))
    assert s.job.status(s.now).wanted == 2


def test_a_spare_host_is_used_only_when_another_is_lost(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2).training(a=1, b=1, c=1, steps=0)
    assert [d.host for d in s.all(StartAgent)] == ["a", "b"]
    s.step("a.0.1", "b.0.1")
    assert [d.host for d in s.all(StartAgent)] == ["a", "b", "c"]
    s.agents = False
    s.agent_lost("b")
    assert [d.host for d in s.all(StartAgent)][3:] == ["b"]
    assert s.starting == ["c.0.1"]
    s.agent_up("b", 2)
    assert s.starting == ["c.0.1"]


def test_a_lost_agent_is_started_again_once_then_its_host_cools_down(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=2, blacklist_cooldown=(10.0, 600.0)).training(a=1, b=1)
    s.agent_lost("b")
    assert s.all(StartAgent)[-1].incarnation == 2
    assert s.announced("host_blacklisted") == []
    s.ready("a.0.1", version=3)
    s.agent_lost("b")
    assert len(s.announced("host_blacklisted")) == 1
    assert s.round == (2, "complete")
    s.wait(10.0)
    assert s.all(StartAgent)[-1].incarnation == 3


def test_a_lost_agent_whose_workers_have_trained_is_started_again_each_time(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=2, blacklist_cooldown=(10.0, 600.0)).training(a=1, b=1)
    for lost in range(1, 5):
        s.agent_lost("b")
        assert s.all(StartAgent)[-1].incarnation == lost + 1
        s.ready("a.0.1", version=3)
        s.ready(f"b.0.{lost + 1}")
        s.ready("a.0.1", version=3)
        s.step("a.0.1", f"b.0.{lost + 1}")
    assert s.announced("host_blacklisted") == []


def test_a_host_in_cooldown_keeps_its_healthy_workers(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, max_np=4, host_failures=1).training(a=2, b=2)
    s.exit("b.0.1", 1)
    s.ready("a.0.1", "a.1.1", "b.1.1", version=3)
    assert s.members == ["a.0.1", "a.1.1", "b.1.1"]
    assert s.starting == []
    s.wait(10.0)
    assert s.starting == ["b.0.2"]


def test_a_newcomer_whose_host_is_removed_before_it_is_let_in_is_stopped(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, max_np=2, last_call=5.0).training(a=1)
    s.hosts(a=1, b=1)
    s.ready("b.0.1")
    s.hosts(a=1)
    assert s.in_state("stopping") == ["b.0.1"]
    s.obey_stops()
    assert s.all(StopAgent)[0].host == "b"
    s.wait(10.0)
    assert s.all(PublishNotice) == []


def test_an_agent_whose_lease_expires_is_killed_before_its_successor_starts(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2).training(a=1, b=1)
    decided = s.send(LeaseExpired("agent", "b.1", 30.0))
    silent = "not heard from for 30 s (--heartbeat-timeout)"
    assert decided[0] == KillAgent("b", 1, silent)
    assert [d.incarnation for d in decided if isinstance(d, StartAgent)] == [2]
    assert s.announced("agent_lost")[0].reason == silent
    s.send(AgentLost("b", 1, "it was killed"))  # nothing more follows from it
    assert len(s.announced("agent_lost")) == 1


def test_a_worker_that_ends_after_the_job_is_logged_once(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2)
    s.send(StopRequested("enough", 143))
    for _ in range(2):
        s.exit("a.0.1", -15)
    (exited,) = s.announced("worker_exited")
    assert exited.reason == "exit code -15, stopped with the job"
    assert exited.what.facts() == {"exit_code": -15, "expected": True, "job_over": True}
    assert s.send(LeaseExpired("agent", "a.1", 30.0)) == s.all(KillAgent)[:1]


def test_auto_scale_begins_with_the_first_size_and_follows_its_proposals(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, auto_scale=True, reset_limit=1).training(a=2, b=2)
    assert s.world.size == 2, "though there are more slots"
    s.send(SizeProposed(4, "doubled"))
    assert s.announced("size_proposed")[-1].reason == "4 workers: doubled"
    assert len(s.starting) == 2
    s.ready(*s.starting)
    s.wait(1.0)
    s.ready("a.0.1", "a.1.1", version=5)
    assert s.world.size == 4
    assert s.job.status(s.now).counters.resets == 0, "it does not count"
    assert s.job.status(s.now).exit_code is None


def test_what_a_user_asked_for_outranks_auto_scale_until_it_is_released(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=3, auto_scale=True).training(a=2, b=2)
    s.send(ev.ScaleRequested(2))
    s.send(SizeProposed(8, "doubled"))
    assert s.starting == []
    assert s.announced("size_proposed") == []
    s.send(ev.ScaleRequested(None))
    assert len(s.starting) == 1, "the proposal of 8, within --max-np"


def test_without_auto_scale_a_released_size_is_max_np(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=4).training(a=2)
    s.send(ev.ScaleRequested(1))
    assert s.job.status(s.now).wanted == 1
    s.send(ev.ScaleRequested(None))
    assert s.job.status(s.now).wanted == 4
