"""Workers whose scripts are over: the others do not wait until their processes have ended."""

from __future__ import annotations

from elastic_driver.core import events as ev
from tests.core.scenario import MakeScenario, Scenario


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
    assert [a.worker for a in s.announced("worker_left")] == ["a.1.1"]


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
    assert "all 2 workers failed" in s.end.reason


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
