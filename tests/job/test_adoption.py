"""A driver goes on with the job of one that has died."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from elastic_driver.job import decisions as do
from elastic_driver.job.events import (
    AgentProbed,
    HostResult,
    HostsChecked,
    JobLeaving,
    ProgressReading,
    ProgressReported,
    StopRequested,
)
from elastic_driver.job.fleet import AgentState
from elastic_driver.job.job import Job
from elastic_driver.words import orders as doc
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario
from tests.properties.test_invariants import absurd

ELASTIC: dict[str, Any] = {"start_np": 2, "min_np": 1}


def kinds(decided: list[do.Decision], *wanted: type[do.Decision]) -> list[Any]:
    return [decision for decision in decided if isinstance(decision, wanted)]


def orders(decided: list[do.Decision], kind: type[Any]) -> list[Any]:
    return [d.order for d in kinds(decided, do.GiveOrder) if isinstance(d.order, kind)]


def names(decided: list[do.Decision]) -> list[str]:
    return [each.event for each in kinds(decided, do.Announce)]


# ---- a job that trains -------------------------------------------------------------------


def test_a_job_that_trains_goes_on_without_a_change(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    world = s.world
    resumed = s.resume()
    assert names(resumed) == ["driver_resumed"]
    assert kinds(resumed, do.PublishNotice, do.KillAgent, do.StartAgent, do.GiveOrder) == []
    published = kinds(resumed, do.PublishWorld)[0].world
    assert (published.round, list(published.members)) == (1, list(world.members))
    for host in "ab":
        returned = s.returns(host)
        assert names(returned) == ["agent_returned"]
        assert orders(returned, doc.StartWorkerOrder) == orders(returned, doc.StopWorkerOrder) == []
        assert orders(returned, doc.RanksOrder)[0].round == 1
    assert s.round == (1, "complete")
    assert s.wait(100.0) == []  # no deadline of the absence is left


def test_the_books_get_the_workers_leases_again(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    (await_heartbeats,) = kinds(s.resume(), do.AwaitHeartbeats)
    assert await_heartbeats.workers == ("a.0.1", "b.0.1")


def test_workers_of_a_plain_script_send_no_heartbeats(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC)
    s.hosts(a=1, b=1)
    s.wait(11.0)
    assert s.round == (1, "complete")
    assert kinds(s.resume(), do.AwaitHeartbeats, do.PublishNotice) == []


def test_scaling_works_after_a_resume(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=4).training(a=2, b=2)
    s.send(ev.ScaleRequested(3))
    s.resume()
    s.returns("a")
    s.returns("b")
    s.wait(0.1)
    s.ready(*s.members, version=7)
    s.obey_stops()
    assert len(s.members) == 3
    s.send(ev.ScaleRequested(4))
    assert len(s.starting) == 1


def test_a_worker_that_died_meanwhile_is_a_loss_like_any_other(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.resume()
    s.exit("b.0.1", -9)  # the agent reports it before its story
    s.returns("b")
    s.returns("a")
    s.ready("a.0.1", version=5)
    assert s.round == (2, "complete")
    assert s.job.outcome.budget.failures == 1


def test_no_round_is_formed_with_a_worker_whose_agent_is_awaited(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, min_np=1).training(a=1, b=1, c=1)
    s.exit("c.0.1", -9)
    s.resume()
    s.ready("a.0.1", "b.0.1", version=3)
    s.returns("a")
    assert s.round == (2, "forming")
    s.exit("b.0.1", -9)
    s.returns("b", "b.0.9")
    assert s.round == (2, "complete")
    assert s.members == ["a.0.1"]


# ---- agents ------------------------------------------------------------------------------


def test_agents_that_were_up_get_no_orders_until_they_return(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, min_np=1, max_np=2).training(a=2)
    s.resume()
    assert s.job.fleet.agents["a"].state is AgentState.AWAITED
    s.send(ev.ScaleRequested(1))
    assert s.all(do.GiveOrder)[-1].cause == 0
    before = len(s.all(do.GiveOrder))
    s.returns("a")
    assert len(s.all(do.GiveOrder)) > before


def test_an_agent_that_does_not_return_is_lost(scenario: MakeScenario) -> None:
    s = scenario(heartbeat_timeout=30.0, **ELASTIC).training(a=1, b=1)
    s.resume()
    s.returns("a")
    s.wait(29.9)
    assert "b" in s.job.fleet.awaited
    late = s.wait(0.2)
    assert [kill.host for kill in kinds(late, do.KillAgent)] == ["b"]
    assert "agent_lost" in names(late)
    assert s.notice.after_step is None


def with_probes(s: Scenario) -> Scenario:
    """Two hosts whose agents answer probes, and train."""
    s.hosts(a=1, b=1)
    for n, host in enumerate("ab"):
        s.send(ev.AgentReady(host, 1, 10 + n, f"10.0.0.{n}", (5000,), probe_port=7000))
    for host, probe in zip("ab", s.all(do.ProbeAgent), strict=True):
        s.send(AgentProbed(host, 1, probe.number, "answered", 0.001))
    s.ready(*s.starting)
    s.step(*s.members)
    return s


def test_a_host_that_answers_that_its_agent_is_gone_is_lost_at_once(
    scenario: MakeScenario,
) -> None:
    s = with_probes(scenario(agents=False, **ELASTIC))
    probes = kinds(s.resume(), do.ProbeAgent)
    assert [probe.host for probe in probes] == ["a", "b"]
    refused = s.send(AgentProbed("b", 1, probes[1].number, "refused", 0.001))
    assert [kill.host for kill in kinds(refused, do.KillAgent)] == ["b"]


def test_a_host_that_answers_no_probe_is_lost_once_others_have_returned(
    scenario: MakeScenario,
) -> None:
    s = with_probes(scenario(agents=False, **ELASTIC))
    probes = kinds(s.resume(), do.ProbeAgent)
    s.send(AgentProbed("b", 1, probes[1].number, "silent", 0.6))
    assert "b" in s.job.fleet.awaited  # perhaps it is this machine that is cut off
    s.returns("a")
    again = kinds(s.wait(0.6), do.ProbeAgent)
    s.send(AgentProbed("b", 1, again[-1].number, "silent", 0.6))
    assert s.announced("agent_lost")[0].host == "b"


def test_an_agent_that_answers_is_waited_for(scenario: MakeScenario) -> None:
    s = with_probes(scenario(agents=False, **ELASTIC))
    probes = kinds(s.resume(), do.ProbeAgent)
    s.send(AgentProbed("b", 1, probes[1].number, "answered", 0.001))
    assert len(kinds(s.wait(0.6), do.ProbeAgent)) == 1
    s.returns("b")
    assert "b" not in s.job.suspicion.suspects


@pytest.mark.parametrize("other_answers", [True, False])
def test_a_driver_on_another_host_finds_out_first_if_its_probes_reach_anybody(
    scenario: MakeScenario, other_answers: bool
) -> None:
    s = with_probes(scenario(agents=False, **ELASTIC))
    probes = kinds(s.resume(moved=True), do.ProbeAgent)
    if other_answers:
        s.send(AgentProbed("a", 1, probes[0].number, "answered", 0.001))
    s.send(AgentProbed("b", 1, probes[1].number, "refused", 0.001))
    assert bool(s.announced("agent_lost")) is other_answers


def test_an_agent_that_was_starting_is_refused_and_another_one_started(
    scenario: MakeScenario,
) -> None:
    s = scenario(agents=False, **ELASTIC)
    s.hosts(a=2)
    resumed = s.resume()
    assert [(kill.host, kill.incarnation) for kill in kinds(resumed, do.KillAgent)] == [("a", 1)]
    assert [(start.host, start.incarnation) for start in kinds(resumed, do.StartAgent)] == [
        ("a", 1001)
    ]
    assert s.agent_up("a", 1) == []  # the first one comes up after all
    assert s.returns("a", incarnation=1) != []
    s.agent_up("a", 1001)
    assert len(s.starting) == 2
    assert not s.job.hosts.is_suspect("a", s.now)


def test_an_agent_that_the_books_do_not_have_shuts_down(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.resume()
    stopped = s.returns("b", "b.0.7", incarnation=3)
    assert [(stop.host, stop.incarnation) for stop in kinds(stopped, do.StopAgent)] == [("b", 3)]
    assert s.returns("b", "b.0.7", incarnation=3) == []  # once is enough
    s.returns("b")
    s.exit("b.0.1", -9)
    assert s.starting == ["b.0.1001"]
    s.agent_lost("b")
    assert s.all(do.StartAgent)[-1].incarnation == 1001


def test_an_agent_that_reports_to_another_term_is_ignored(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.resume()
    late = ev.AgentReturned("a", 1, 1, "x", (5000,), term=1, workers=())
    assert s.send(late) == []
    assert "a" in s.job.fleet.awaited


def test_a_second_crash_asks_for_all_agents_again(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.resume()
    s.returns("a")
    s.resume()
    assert sorted(s.job.fleet.awaited) == ["a", "b"]
    s.returns("a")
    s.returns("b")
    assert s.round == (1, "complete")


# ---- workers -----------------------------------------------------------------------------


def test_a_worker_that_the_agent_does_not_know_is_ordered_again(scenario: MakeScenario) -> None:
    s = scenario(processes=False, **ELASTIC)
    s.hosts(a=1, b=1)
    first = s.orders(doc.StartWorkerOrder)
    s.resume()
    returned = s.send(ev.AgentReturned("a", 1, 1, "x", (5000,), term=2, workers=()))
    assert orders(returned, doc.StartWorkerOrder) == [first[0]]
    known = ev.RunningWorker("b.0.1", 0)  # ordered there, and not started yet
    returned = s.send(ev.AgentReturned("b", 1, 1, "x", (5000,), term=2, workers=(known,)))
    assert orders(returned, doc.StartWorkerOrder) == []
    s.started("a.0.1")
    s.started("b.0.1")
    s.ready("a.0.1", "b.0.1")
    assert s.round == (1, "complete")


def test_a_worker_whose_slot_has_gone_meanwhile_is_not_ordered_again(
    scenario: MakeScenario,
) -> None:
    s = scenario(processes=False, **ELASTIC)
    s.hosts(a=2)
    s.resume()
    s.hosts(a=1)
    returned = s.send(ev.AgentReturned("a", 1, 1, "x", (5000,), term=2, workers=()))
    assert [o.worker for o in orders(returned, doc.StartWorkerOrder)] == ["a.0.1"]
    assert [d.worker for d in kinds(returned, do.Announce) if d.event == "worker_lost"] == ["a.1.1"]
    assert s.job.status(s.now).counters.failures == 0


def test_a_start_that_was_not_reported_is_in_the_story(scenario: MakeScenario) -> None:
    s = scenario(processes=False, **ELASTIC)
    s.hosts(a=1, b=1)
    s.resume()
    told = (ev.RunningWorker("a.0.1", 4711),)
    returned = s.send(ev.AgentReturned("a", 1, 1, "x", (5000,), term=2, workers=told))
    assert "worker_started" in names(returned)
    assert s.job.workers.workers["a.0.1"].pid == 4711


def test_a_worker_that_is_to_stop_is_told_again(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, min_np=1, max_np=2).training(a=2)
    s.send(ev.ScaleRequested(1))
    s.wait(0.1)
    s.ready("a.0.1", "a.1.1", version=4)
    assert s.in_state("stopping") == ["a.1.1"]
    s.step(*s.members)
    s.resume()
    (stop,) = orders(s.returns("a"), doc.StopWorkerOrder)
    assert (stop.worker, stop.grace) == ("a.1.1", s.job.settings.stop_grace)


def test_a_worker_that_may_hold_the_last_clean_state_stops_once_others_have_it(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, min_np=1, max_np=2).training(a=1, b=1)
    s.send(ev.ScaleRequested(1))
    s.wait(0.1)
    s.ready("a.0.1", "b.0.1", version=4)
    assert s.in_state("stopping") == ["b.0.1"]
    s.resume()  # the round is left: nobody has finished a step in it
    s.send(ev.ScaleRequested(2))
    s.hosts(a=2)
    s.send(ev.WorkerReady("a.0.1", 2, 4, False, "the group broke"))
    assert orders(s.returns("b"), doc.StopWorkerOrder) == []
    s.returns("a")
    s.ready("a.1.1001")
    assert {m.worker: m.clean for m in s.world.members}["b.0.1"]
    s.step(*s.members)
    s.wait(0.1)
    s.ready(*s.members, version=9)
    assert s.in_state("stopping") == ["b.0.1"]


def test_a_silent_worker_that_had_to_leave_is_killed_again(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, min_np=1, max_np=2).training(a=1, b=1)
    s.send(ev.DrainRequested("b"))
    s.lost("b.0.1")
    s.resume()
    (kill,) = orders(s.returns("b"), doc.StopWorkerOrder)
    assert (kill.worker, kill.grace) == ("b.0.1", 0.0)


def test_a_worker_that_was_given_up_is_killed_again(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.lost("b.0.1")
    s.resume()
    (kill,) = orders(s.returns("b"), doc.StopWorkerOrder)
    assert (kill.worker, kill.grace) == ("b.0.1", 0.0)


def test_a_worker_that_the_books_do_not_have_is_stopped(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.resume()
    (stop,) = orders(s.returns("b", "b.0.1", "b.0.2"), doc.StopWorkerOrder)
    assert stop.worker == "b.0.2"
    assert s.returns("b", "b.0.1", "b.0.2") == []
    s.exit("b.0.2", -15)
    s.exit("b.0.1", -9)
    s.ready("a.0.1", version=3)
    assert [order.worker for order in s.orders(doc.StartWorkerOrder)][-1] == "b.0.1001"


def test_the_slot_of_a_worker_that_the_books_do_not_have_is_free_once_it_has_ended(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, min_np=1).training(a=1)
    s.resume()  # the journal lacks the second slot
    s.returns("a", "a.0.1", "a.1.1")
    s.hosts(a=2)
    assert s.in_state("stopping") == ["a.1.1"]
    assert s.starting == []
    s.exit("a.1.1", -15)
    assert s.starting == ["a.1.1001"]


def test_the_first_round_needs_all_its_workers_though_an_unknown_one_was_ready_before(
    scenario: MakeScenario,
) -> None:
    s = scenario(agents=False, start_np=3, min_np=2)
    s.hosts(a=1, b=2)
    s.agent_up("a")
    s.resume()
    s.returns("a", "a.0.1")
    s.ready("a.0.1")  # it was ordered, and the journal does not have it
    s.exit("a.0.1", -15)
    s.ready(*s.starting)
    assert s.round == (1, "forming")
    s.agent_up("b", 1001)
    s.ready(*s.starting)
    assert s.round == (1, "complete")
    assert len(s.members) == 3


def test_a_worker_whose_end_no_journal_has_is_lost(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.resume()
    returned = s.send(ev.AgentReturned("b", 1, 1, "x", (5000,), term=2, workers=()))
    assert "worker_lost" in names(returned)
    assert s.notice.after_step is None
    assert not s.job.hosts.is_suspect("b", s.now)


def test_a_plain_worker_whose_end_no_journal_has_restarts_the_round(
    scenario: MakeScenario,
) -> None:
    s = scenario(**ELASTIC)
    s.hosts(a=1, b=1)
    s.wait(11.0)
    s.resume()
    s.returns("a")
    s.send(ev.AgentReturned("b", 1, 1, "x", (5000,), term=2, workers=()))
    s.obey_stops()
    assert s.members == ["a.0.1001", "b.0.1001"]


# ---- rounds ------------------------------------------------------------------------------


def test_a_round_without_a_finished_step_is_left_at_once(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(steps=0, a=1, b=1)
    resumed = s.resume()
    world, notice = kinds(resumed, do.PublishWorld, do.PublishNotice)
    assert (world.world.round, notice.round, notice.after_step) == (1, 1, None)
    s.returns("a")
    s.returns("b")
    s.ready("a.0.1", "b.0.1")
    assert s.round == (2, "complete")
    assert s.job.outcome.budget.failures == 0


def test_a_notice_to_leave_at_once_is_published_again(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1, c=1)
    s.agent_lost("c", unreachable=True)
    notice = s.notice
    assert notice.silent
    (again,) = kinds(s.resume(), do.PublishNotice)
    assert again == notice


def test_a_planned_change_is_asked_for_again(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=1, b=1)
    s.progress = False
    s.send(ev.ScaleRequested(1))
    s.wait(0.1)
    number = s.all(do.AskProgress)[-1].number
    s.send(ProgressReported(number, tuple(readings(5, 5))))
    assert s.notice.after_step is not None
    (asked,) = kinds(s.resume(), do.AskProgress)
    assert asked.number == number + 1
    s.send(ProgressReported(asked.number, ()))  # nobody has found this driver yet
    (asked,) = kinds(s.wait(0.6), do.AskProgress)
    s.send(ProgressReported(asked.number, tuple(readings(200, 200))))
    assert (s.notice.after_step or 0) > 200


def readings(*steps: int) -> list[ProgressReading]:
    return [ProgressReading(step, 0.1, answered=True) for step in steps]


def test_a_planned_change_that_some_have_made_is_finished_at_once(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=1, b=1)
    s.send(ev.ScaleRequested(1))
    s.wait(0.1)
    s.ready("a.0.1", version=9)
    (notice,) = kinds(s.resume(), do.PublishNotice)
    assert notice.after_step is None


def test_a_final_save_is_requested_again_with_the_time_that_is_left(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=1, fixed_hosts=True, grace_period=30.0).training(a=1, b=1)
    s.send(JobLeaving("preempted", 60.0))
    s.wait(0.1)
    s.ready("a.0.1", "b.0.1", version=9)
    (save,) = s.all(do.PublishSave)
    s.now += 10.0
    (again,) = kinds(s.resume(), do.PublishSave)
    assert again.request.number == save.request.number
    assert again.request.members == save.request.members
    assert again.request.seconds == pytest.approx(save.request.seconds - 10.0)


def test_a_question_about_stacks_is_asked_again(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.send(ev.StacksRequested())
    (asked,) = kinds(s.resume(), do.AskStacks)
    for worker in s.members:
        s.send(ev.WorkerStack(worker, asked.number, "collective", "in f"))
    assert s.announced("stacks_collected") != []


def test_a_check_of_hosts_begins_again_with_those_that_are_left(scenario: MakeScenario) -> None:
    s = scenario(checked_hosts=("a", "b"), start_np=2, min_np=1).training(a=1, b=1)
    s.hosts(a=1, b=1, c=1, d=1)
    s.wait(1.0)
    (check,) = s.all(do.CheckHosts)
    s.hosts(a=1, b=1, c=1)
    (again,) = kinds(s.resume(), do.CheckHosts)
    assert again.number == check.number
    assert [host for host, _ in again.hosts] == [h for h, _ in check.hosts if h != "d"]
    s.send(HostsChecked((HostResult("c", True, "fine"),), again.number))
    assert s.job.hosts.is_usable("c")


def test_a_job_that_has_ended_says_so_again_and_lets_agents_go(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.send(StopRequested("enough", 130))
    resumed = s.resume()
    assert [end.exit_code for end in kinds(resumed, do.EndJob)] == [130]
    assert len(kinds(s.returns("a"), do.StopAgent)) == 1
    assert s.returns("a") == []


def test_the_wait_for_drained_workers_counts_agents_that_are_awaited(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, min_np=1, max_np=1).training(a=1, b=1)
    s.resume()
    s.send(ev.DrainRequested("a"))
    assert s.round == (1, "complete")


# ---- a journal that lacks the last events ---------------------------------------------------


def test_a_worker_that_left_a_round_the_books_do_not_have_is_in_the_next(
    scenario: MakeScenario,
) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.resume()
    s.returns("a")
    s.returns("b")
    for worker in ("a.0.1", "b.0.1"):
        s.send(ev.WorkerReady(worker, 4, 40, True, "left round 4"))
    assert s.round == (5, "complete")
    assert {member.version for member in s.world.members} == {40}


def test_a_round_that_was_to_be_formed_and_has_trained_is_left_at_once(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=2).training(a=1, b=1)
    s.exit("b.0.1", -9)
    s.ready("a.0.1", version=3)
    assert s.round == (2, "forming")
    s.resume()
    s.returns("a")
    s.send(ev.WorkerStepped("a.0.1", 2, 30))
    assert (s.notice.round, s.notice.after_step) == (2, None)
    assert s.round == (3, "forming")


def test_a_round_that_the_books_do_not_have_is_left_at_once(scenario: MakeScenario) -> None:
    s = scenario(**ELASTIC).training(a=1, b=1)
    s.resume()
    s.send(ev.WorkerStepped("a.0.1", 3, 30))
    assert (s.notice.round, s.notice.after_step) == (3, None)


def test_a_worker_that_hangs_in_a_round_that_the_books_do_not_have_is_given_up(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=2).training(a=1, b=1)
    s.exit("b.0.1", -9)
    s.ready("a.0.1", version=3)
    s.resume()
    s.returns("a")
    stalled = ev.WorkerStalled("a.0.1", 2, 5.0, "elsewhere", "in f")
    s.send(stalled)
    assert (s.notice.round, s.notice.after_step) == (2, None)
    s.send(stalled)
    assert s.in_state("lost") == []  # the same report
    s.send(ev.WorkerStalled("a.0.1", 2, 10.0, "elsewhere", "in f"))
    assert s.in_state("lost") == ["a.0.1"]


def test_a_newcomer_that_has_trained_in_a_round_that_the_books_do_not_have_hands_its_state_over(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=1).training(a=1, b=1)
    s.exit("b.0.1", -9)
    assert s.starting == ["b.0.2"]
    s.resume()
    for host in "ab":
        s.returns(host)
    s.send(ev.WorkerReady("b.0.2", 2, 30, True, "left round 2"))
    s.hosts(a=1)
    s.ready("a.0.1", version=3)
    assert {member.version for member in s.world.members} == {3, 30}


# ---- every event may come twice --------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_an_event_from_the_wire_that_comes_twice_changes_nothing(
    scenario: MakeScenario, seed: int
) -> None:
    random = Random(seed)
    sizes = {"start_np": 2, "min_np": 1, "max_np": 4}
    more = {"fruitless_restarts": 99, "on_difference": "repair"}
    s = scenario(**sizes, spares=seed % 2, **more)
    s.training(a=2, b=2)
    for _ in range(60):
        s.now += random.choice([0.0, 0.01, 1.0])
        event = absurd(random)
        s.send(event)
        if isinstance(event, ev.WireEvent):
            before = books(s.job)
            assert s.job.handle(event, s.now) == [], event
            assert books(s.job) == before, event


def books(job: Job) -> bytes:
    """The state without the count of ignored events."""
    effects = job.effects
    ignored = effects.ignored, effects.ignored_events
    effects.ignored, effects.ignored_events = "", 0
    found = job.snapshot()
    effects.ignored, effects.ignored_events = ignored
    return found
