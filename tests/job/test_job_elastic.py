"""Losing, gaining and exchanging workers that keep their process."""

from __future__ import annotations

from elastic_driver.job.decisions import PublishNotice, SealRound
from elastic_driver.job.events import AgentLost, LeaseExpired
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario


def test_a_loss_tells_the_survivors_to_leave_and_replaces_the_worker_in_place(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3).training(a=3)
    s.exit("a.1.1", -9)
    assert (s.notice.round, s.notice.after_step) == (1, None)
    assert s.starting == ["a.1.2"]
    assert s.orders(msg.StartWorkerOrder)[-1].round == 2
    assert [order.elastic for order in s.orders(msg.StartWorkerOrder)] == [False] * 3 + [True]


def test_the_next_round_does_not_wait_for_the_replacement(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, max_np=3).training(a=3)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", version=7)
    assert s.round == (1, "closing")
    s.ready("a.2.1", version=8)
    assert s.round == (2, "complete")
    assert [(m.worker, m.place.rank, m.version) for m in s.world.members] == [
        ("a.1.1", 0, 7),
        ("a.2.1", 1, 8),
    ]
    assert s.all(SealRound)[-1].round == 1


def test_whose_state_a_round_went_on_with_is_said_once_its_first_step_is_done(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3).training(a=3)
    (first,) = s.announced("state_synced")
    assert (first.round, first.worker, first.what.facts()["receivers"]) == (1, "a.0.1", 2)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", version=7, clean=False)
    s.ready("a.2.1", version=7)
    assert len(s.announced("state_synced")) == 1
    s.step("a.1.1", "a.2.1", step=8)
    second = s.announced("state_synced")[1:]
    assert [(e.round, e.worker, e.rank, e.what.facts()) for e in second] == [
        (2, "a.2.1", 1, {"step": 7, "receivers": 1, "first_step": 8})
    ]
    s.ready("a.0.2")
    s.ready("a.1.1", "a.2.1", version=9)
    s.step("a.0.2", step=10)
    assert s.announced("state_synced")[-1].reason == "1 of 3 took over a.1.1's"


def test_below_min_np_the_replacement_is_waited_for(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=2, max_np=2).training(a=2)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", version=3)
    assert s.round == (2, "forming")
    s.ready("a.0.2")
    assert s.members == ["a.1.1", "a.0.2"]


def test_below_min_np_for_the_elastic_timeout_ends_the_job_with_75(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=2, max_np=2, elastic_timeout=60.0).training(a=1, b=1)
    s.hosts(a=1)
    s.wait(1.0)
    s.ready("a.0.1", "b.0.1", version=3)
    s.obey_stops()
    s.wait(59.9)
    assert s.end is None
    s.wait(0.1)
    assert s.end is not None
    assert s.end.exit_code == 75
    assert s.end.reason == (
        "need 2 slots, found 1 after 60 s; lower --min-np, raise --elastic-timeout, or check the "
        "hosts (elasticctl events); of the state of step 3 only a checkpoint is left, if there is "
        "one"
    )


def test_a_job_that_finds_no_host_says_so_and_blames_no_cool_down(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, start_timeout=6.0)
    s.hosts()
    s.wait(6.0)
    assert s.end is not None
    assert s.end.exit_code == 75
    assert s.end.reason == (
        "need 2 slots, found 0 after 6 s; lower -np or --min-np, raise --start-timeout, or check "
        "why no host can be used (elasticctl events)"
    )


def test_a_newcomer_is_let_in_at_a_boundary_after_the_last_call(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=2, last_call=0.5).training(a=1)
    s.hosts(a=1, b=1)
    assert s.starting == ["b.0.1"]
    s.wait(5.0)
    assert s.round == (1, "complete")  # booting disturbs nobody
    s.ready("b.0.1")
    s.wait(0.4)
    assert s.all(PublishNotice) == []
    s.wait(0.1)
    assert (s.notice.after_step, s.notice.reason) == (2, "b.0.1 is ready to join")
    s.ready("a.0.1", version=9)
    assert s.members == ["a.0.1", "b.0.1"]


def test_newcomers_that_arrive_together_cost_one_change(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=3, last_call=0.5).training(a=1)
    s.hosts(a=1, b=2)
    s.ready("b.0.1")
    s.wait(0.3)
    s.ready("b.1.1")
    s.wait(0.2)
    s.ready("a.0.1", version=9)
    assert len(s.all(PublishNotice)) == 1
    assert s.world.size == 3


def test_a_loss_while_leaving_at_a_boundary_turns_into_leaving_now(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=3).training(a=2)
    s.hosts(a=2, b=1)
    s.ready("b.0.1")
    s.wait(1.0)
    assert s.notice.after_step is not None
    s.exit("a.1.1", -9)
    assert s.notice.after_step is None
    assert s.notice.round == 1
    s.ready("a.0.1", version=4)
    assert s.members == ["a.0.1", "b.0.1"]


def test_newcomers_follow_the_survivors_of_their_host(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, max_np=4).training(a=2, b=2)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", "b.0.1", "b.1.1", version=5)
    assert s.members == ["a.1.1", "b.0.1", "b.1.1"]
    s.ready("a.0.2")
    s.wait(1.0)
    s.ready("a.1.1", "b.0.1", "b.1.1", version=6)
    assert s.members == ["a.1.1", "a.0.2", "b.0.1", "b.1.1"]
    assert [m.place.local_rank for m in s.world.members] == [0, 1, 0, 1]


def test_a_broken_group_without_any_death_reforms_with_the_same_members(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2).training(a=2)
    s.ready("a.1.1", version=4)
    assert s.notice.after_step is None
    s.ready("a.0.1", version=4)
    assert s.round == (2, "complete")
    assert s.members == ["a.0.1", "a.1.1"]
    assert s.job.status(s.now).counters.failures == 0


def test_a_hung_worker_is_killed_at_once_and_its_late_exit_is_its_end(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=2).training(a=2)
    s.lost("a.1.1")
    assert s.orders(msg.StopWorkerOrder)[-1].grace == 0.0
    assert s.announced("worker_hung")[0].worker == "a.1.1"
    assert s.starting == []  # its slot is not free yet
    s.ready("a.0.1", version=3)
    assert s.members == ["a.0.1"]
    s.exit("a.1.1", -9)
    assert s.starting == ["a.1.2"]
    assert s.job.status(s.now).counters.failures == 1


def test_a_survivor_that_never_leaves_the_round_is_killed_after_the_elastic_timeout(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, elastic_timeout=60.0).training(a=3)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", version=3)
    s.wait(60.0)
    assert s.in_state("lost") == ["a.2.1"]
    assert s.members == ["a.1.1"]


def test_a_boundary_nobody_reaches_is_announced_and_costs_nobody_a_step(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, elastic_timeout=60.0).training(a=1)
    s.hosts(a=1, b=1)
    s.ready("b.0.1")
    s.wait(1.0)
    s.wait(125.0)
    assert len(s.announced("boundary_overdue")) == 2
    assert len(s.all(PublishNotice)) == 1
    assert s.in_state("running") == ["a.0.1"]
    s.ready("a.0.1", version=9)
    assert s.world.size == 2


def test_whoever_misses_the_boundary_that_a_peer_left_at_is_told_to_leave_at_once(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=3, settle=1.0).training(a=2)
    s.hosts(a=2, b=1)
    s.ready("b.0.1")
    s.wait(1.0)
    assert [n.after_step is not None for n in s.all(PublishNotice)] == [True]
    s.ready("a.0.1", version=9)
    s.wait(0.9)
    assert [n.after_step is not None for n in s.all(PublishNotice)] == [True]
    s.wait(0.1)
    assert [n.after_step is not None for n in s.all(PublishNotice)] == [True, False]
    s.ready("a.1.1", version=9)
    assert s.world.size == 3


def test_before_any_finished_step_a_replacement_waits_to_see_who_else_fails(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3, settle=2.0).training(steps=0, a=3)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", "a.2.1")
    assert s.starting == []
    s.wait(2.0)
    assert s.starting == ["a.0.2"]


def test_a_bad_newcomer_never_disturbs_or_ends_the_training(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=2).training(a=1)
    s.hosts(a=1, b=1)
    for _ in range(12):
        for worker in s.starting:
            s.exit(worker, 1)
        s.wait(20.0)
    assert s.end is None
    assert s.round == (1, "complete")
    assert s.all(PublishNotice) == []
    assert s.announced("host_blacklisted")


def test_late_repeated_and_foreign_news_change_nothing(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", version=3)
    before = (s.round, s.in_state("running"), len(s.decisions))
    s.exit("a.0.1", -9)  # repeated
    s.send(ev.WorkerReady("a.1.1", 1, 3, True, "again"))  # of a round that is over
    s.send(ev.WorkerReady("a.0.1", 1, 3, True, "late"))  # of a worker that is gone
    s.send(ev.WorkerStepped("a.1.1", 1, 3))  # of a round that is over
    s.send(ev.WorkerStarted("a.1.1", 5))  # started long ago
    s.send(LeaseExpired("worker", "z.0.1", 30.0))
    s.send(ev.AgentReady("a", 1, 5, "x", ()))
    s.send(ev.AgentReady("a", 9, 5, "x", ()))
    s.send(AgentLost("a", 9, "another incarnation"))
    assert (s.round, s.in_state("running"), len(s.decisions)) == before
    status = s.job.status(s.now)
    assert status.counters.ignored_events == 9
    assert status.ignored == "agent a.9 is not the present one"


def test_ready_may_overtake_the_news_that_the_process_was_started(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, processes=False)
    s.hosts(a=1)
    s.ready("a.0.1")
    assert s.members == ["a.0.1"]
    s.started("a.0.1")
    assert s.job.status(s.now).members[0].pid != 0


def test_the_round_counts_at_most_reset_limit_changes(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, reset_limit=1).training(a=2)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", version=2)
    assert s.members == ["a.1.1"]
    s.step("a.1.1")
    s.ready("a.0.2")
    s.wait(1.0)
    assert s.end is not None
    assert "reset limit of 1" in s.end.reason
    assert "--reset-limit" in s.end.reason
    assert s.end.exit_code == 1


def test_a_round_says_how_many_workers_it_lacks(scenario: MakeScenario) -> None:
    s = scenario(start_np=4).training(a=4)
    s.exit("a.1.1", -9)
    s.exit("a.2.1", -9)
    s.ready("a.0.1", "a.3.1", version=4)
    assert s.members == ["a.0.1", "a.3.1"]
    reason = "without a.1.1, which was killed by signal 9, and 1 more"
    assert s.announced("round_completed")[-1].reason == f"2 workers: {reason}"
