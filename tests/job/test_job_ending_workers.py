"""Workers whose scripts are over: the others do not wait until their processes have ended."""

from __future__ import annotations

from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario


def ends(s: Scenario, *workers: str, round_id: int = 1) -> None:
    """The scripts of these workers end in a round."""
    for worker in workers:
        s.send(ev.WorkerEnding(worker, round_id))


def test_the_next_round_does_not_wait_for_the_process_of_a_worker_whose_script_is_over(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3).training(a=3)
    ends(s, "a.1.1")
    assert s.round == (1, "complete")
    s.ready("a.0.1", "a.2.1", version=7)
    assert (s.round, s.members) == ((2, "complete"), ["a.0.1", "a.2.1"])
    assert s.world.reason == "without a.1.1, whose script is over"


def test_a_script_that_has_raised_is_not_called_over(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1).training(a=2)
    s.send(ev.WorkerEnding("a.1.1", 1, failed=True))
    s.ready("a.0.1", version=1)
    assert s.world.reason == "without a.1.1, whose script has failed"
    assert [(a.worker, a.what.facts()) for a in s.announced("worker_left")] == [
        ("a.1.1", {"failed": True})
    ]


def test_its_failure_is_counted_but_does_not_break_the_round_of_the_others(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3).training(a=3)
    ends(s, "a.1.1")
    s.ready("a.0.1", "a.2.1", version=7)
    s.step(*s.members)
    assert s.starting == []  # its process still has the slot
    s.exit("a.1.1", 1)
    assert s.round == (2, "complete")
    assert s.job.outcome.budget.failures == 1
    assert s.starting == ["a.1.2"]


def test_a_script_that_has_failed_is_a_failure_though_its_process_exits_0(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3).training(a=3)
    s.send(ev.WorkerEnding("a.1.1", 1, failed=True))
    s.ready("a.0.1", "a.2.1", version=7)
    s.step(*s.members)
    s.exit("a.1.1", 0)
    assert s.round == (2, "complete")
    assert s.job.outcome.budget.failures == 1
    assert s.starting == ["a.1.2"], "it gets a successor: the job does not finish"
    (exited,) = s.announced("worker_exited")
    assert (exited.what.is_loss, exited.what.facts()["lost"]) == (True, True)


def test_a_newcomer_that_exits_0_is_told_as_the_failure_that_it_is(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=1, max_np=2).training(a=2)
    s.exit("a.1.1", -9)
    s.ready("a.0.1", version=3)
    s.step(*s.members)
    s.exit("a.1.2", 0)
    assert s.job.outcome.budget.failures == 2
    assert [told.what.is_loss for told in s.announced("worker_exited")] == [True, True]


def test_a_member_that_exits_0_or_a_worker_that_was_told_to_stop_is_not_lost(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=2).training(a=2)
    ends(s, "a.1.1")
    s.exit("a.1.1", 0)
    s.exit("a.0.1", 0)
    assert [told.what.is_loss for told in s.announced("worker_exited")] == [False, False]
    assert s.job.outcome.budget.failures == 0


WHY = "optimizer is of the class SGD, in the trained state it is Adam"


def unfit(s: Scenario, worker: str) -> None:
    """A worker cannot take over the state; the others go on without it."""
    number = s.job.rounds.current.number
    s.send(ev.WorkerEnding(worker, number, failed=True, unfit=WHY))
    s.ready(*s.in_state("running"), version=20)
    s.step(*s.members, step=21)
    s.exit(worker, 1)


def test_no_worker_is_started_again_where_one_cannot_take_over_the_state(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3).training(a=2, b=1)
    s.exit("b.0.1", -9)
    s.ready(*s.in_state("running"), version=9)
    s.step(*s.members)
    s.ready("b.0.2")
    s.wait(0.1)
    s.ready(*s.in_state("running"), version=10)
    assert len(s.members) == 3
    unfit(s, "b.0.2")
    (told,) = s.announced("worker_unfit")
    assert told.worker == "b.0.2"
    assert told.reason.startswith(f"{WHY}; no more workers are started on b")
    assert (s.starting, len(s.members), s.end) == ([], 2, None), "the others train on"
    s.wait(1000.0)
    assert s.starting == []
    s.hosts(a=2, b=1, c=1)
    assert s.starting == ["c.0.1"], "another host may have another script"


def replace_by_one_that_does_not_fit(s: Scenario) -> None:
    """Lose one of two workers on one host; the next one there cannot take over the state."""
    s.exit("a.1.1", -9)
    s.ready("a.0.1", version=9)
    s.step("a.0.1")
    s.ready("a.1.2")
    s.wait(0.1)
    s.ready("a.0.1", version=10)
    unfit(s, "a.1.2")


def test_another_size_that_is_asked_for_tries_the_host_again(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=3).training(a=2)
    replace_by_one_that_does_not_fit(s)
    assert s.starting == []
    s.send(ev.ScaleRequested(2))
    assert s.starting == ["a.1.3"]


def test_a_job_that_cannot_go_on_without_such_a_worker_ends(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_np=2, max_np=2).training(a=2)
    s.exit("a.1.1", -9)
    s.ready("a.0.1", version=9)
    s.ready("a.1.2")
    assert s.round == (2, "complete")
    s.send(ev.WorkerEnding("a.1.2", 2, failed=True, unfit=WHY))
    s.ready("a.0.1", version=9)
    s.exit("a.1.2", 1)
    assert s.end is not None
    assert s.end.exit_code == 1
    assert s.end.reason == (
        "1 of at least 2 workers are left, and those that were started on a cannot take over the "
        f"state: {WHY}; run the same script on every worker"
    )


def test_ranks_that_build_different_states_at_the_start_end_the_job(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=2)
    s.hosts(a=2)
    s.ready(*s.starting)
    assert s.round == (1, "complete")
    s.send(ev.WorkerEnding("a.1.1", 1, failed=True, unfit=WHY))
    assert s.end is not None
    assert s.end.exit_code == 1
    assert s.end.reason.startswith(f"rank 1 on a cannot take over the state of rank 0: {WHY}; run")


def test_when_no_worker_lives_any_more_all_are_started_anew(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2).training(a=2)
    replace_by_one_that_does_not_fit(s)
    s.exit("a.0.1", -9)
    assert len(s.starting) == 2


def test_its_failure_ends_the_wait_of_a_round_that_is_not_complete(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, min_np=3, max_np=3).training(a=3)
    ends(s, "a.1.1")
    s.ready("a.0.1", "a.2.1", version=7)
    assert s.round == (2, "forming")
    s.exit("a.1.1", 1)
    s.ready("a.1.2")
    assert (s.round, s.members) == ((2, "complete"), ["a.0.1", "a.2.1", "a.1.2"])


def test_a_success_that_becomes_known_later_ends_the_job_with_the_others(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=4).training(a=3)
    ends(s, "a.1.1")
    s.ready("a.0.1", "a.2.1", version=7)
    s.hosts(a=3, b=1)
    assert s.starting == ["b.0.1"]
    s.exit("a.1.1", 0)
    assert s.starting == []  # no new worker joins
    assert s.round == (2, "complete")
    s.exit("a.0.1", 0)
    s.exit("a.2.1", 0)
    s.obey_stops()
    assert s.end is not None
    assert s.end.exit_code == 0


def test_without_a_survivor_the_exit_statuses_decide(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=3).training(a=2)
    s.hosts(a=2, b=1)
    ends(s, "a.0.1", "a.1.1")
    s.ready("b.0.1")
    assert s.round == (1, "complete")  # a newcomer does not begin the training anew
    s.exit("a.0.1", 0)
    s.exit("a.1.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_all_workers_that_fail_by_themselves_are_one_failure_of_the_script(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2).training(a=2)
    ends(s, "a.0.1", "a.1.1")
    s.exit("a.0.1", 3)
    assert s.end is None
    s.exit("a.1.1", 3)
    assert s.end is not None
    assert s.end.exit_code == 3
    assert "every worker failed" in s.end.reason


def test_a_process_that_does_not_end_after_its_script_is_killed(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, max_np=3, elastic_timeout=20.0).training(a=3)
    ends(s, "a.1.1")
    s.ready("a.0.1", "a.2.1", version=7)
    s.wait(19.0)
    assert s.in_state("ending") == ["a.1.1"]
    s.wait(2.0)
    assert s.in_state("lost") == ["a.1.1"]
    assert [a.reason for a in s.announced("worker_hung")] == [
        "its process did not end within 20 s after its script"
    ]
    assert s.round == (2, "complete")


def test_the_end_of_a_script_in_an_earlier_round_changes_nothing(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2).training(a=2)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", version=2)
    ends(s, "a.1.1", round_id=1)
    assert s.in_state("running") == ["a.1.1"]


def test_a_rank_that_ends_its_script_before_the_others_is_named_once(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3).training(a=3)
    ends(s, "a.1.1")
    s.ready("a.0.1", "a.2.1", version=7)
    assert s.announced("finished_alone") == [], "it may have failed"
    s.exit("a.1.1", 0)
    s.step(*s.members)
    (named,) = s.announced("finished_alone")
    assert named.worker == "a.1.1"
    assert named.reason.startswith("rank 1 is done, 2 others train on from step 7; every rank has")


def test_ranks_that_end_their_scripts_together_are_not_named(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, max_np=3).training(a=3)
    ends(s, "a.0.1", "a.1.1", "a.2.1")
    for worker in ("a.1.1", "a.0.1", "a.2.1"):
        s.exit(worker, 0)
    assert s.announced("finished_alone") == []
    assert s.end is not None


def test_a_rank_that_fails_or_a_lost_peer_at_the_end_is_no_such_mistake(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3).training(a=3)
    ends(s, "a.1.1")
    s.ready("a.0.1", "a.2.1", version=7)
    s.exit("a.1.1", 1)
    assert s.announced("finished_alone") == []

    s = scenario(start_np=3, max_np=3).training(a=3)
    s.exit("a.2.1", -9)
    ends(s, "a.1.1")
    s.ready("a.0.1", version=7)
    s.exit("a.1.1", 0)
    assert s.announced("finished_alone") == []
