"""Where the boundary lies: beyond what anyone can have reached, and no further than needed.

Ranks that hold different states are repaired, or the job ends.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import ExitCode
from elastic_driver.job import events as seen
from elastic_driver.job.boundary import (
    ANSWERS_KEPT,
    BASE_MARGIN,
    LEAST_MARGIN,
    LONGEST_AHEAD,
    MARGIN_PER_ANSWER,
    MARGIN_PER_WORKER,
    REPORT_S,
    Reading,
    leave_after,
    margin_for,
)
from elastic_driver.job.decisions import AskProgress, PublishNotice
from elastic_driver.job.events import ProgressReading, ProgressReported
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from elastic_driver.words.findings import StateValue
from tests.job.scenario import MakeScenario, Scenario


def test_the_margin_covers_the_message_delay_in_steps() -> None:
    readings = [Reading(step=100, step_time=0.01, age=0.0)] * 2
    assert leave_after(readings, base=90, margin=0.055) == 100 + 5 + 1


def test_the_margin_follows_what_a_question_to_all_just_took() -> None:
    assert margin_for(3, 0.001) == LEAST_MARGIN
    assert margin_for(3, 0.015) == 0.015 * MARGIN_PER_ANSWER
    assert margin_for(3, 5.0) == BASE_MARGIN + 3 * MARGIN_PER_WORKER


def test_where_somebody_did_not_answer_the_margin_is_the_longest() -> None:
    assert margin_for(3, None) == BASE_MARGIN + 3 * MARGIN_PER_WORKER


def test_slow_steps_are_left_after_the_one_under_way() -> None:
    assert leave_after([Reading(step=100, step_time=5.0, age=0.0)], base=0, margin=0.1) == 101


def test_old_news_is_extrapolated_to_now() -> None:
    fresh = leave_after([Reading(step=100, step_time=0.1, age=0.0)], base=0, margin=0.1)
    old = leave_after([Reading(step=100, step_time=0.1, age=10.0)], base=0, margin=0.1)
    assert old == fresh + 100


def test_the_furthest_worker_counts_even_when_another_spoke_later() -> None:
    readings = [Reading(step=90, step_time=1.0, age=0.0), Reading(step=95, step_time=1.0, age=3.0)]
    assert leave_after(readings, base=0, margin=0.1) == 99


def test_a_first_step_that_takes_long_is_left_after_it() -> None:
    slow = Reading(step=0, step_time=0.0, age=0.0, since=4.0)
    assert leave_after([slow, slow], base=0, margin=0.1) == 1
    begun = slow._replace(since=0.05)
    assert leave_after([slow, begun], base=0, margin=0.1) == 2


def test_without_any_progress_the_round_is_left_after_its_second_step() -> None:
    assert leave_after([], base=41, margin=0.1) == 43
    assert leave_after([Reading(step=41, step_time=0.0, age=3.0)], base=41, margin=0.1) == 43


def test_the_step_the_round_began_with_is_a_floor_for_stale_readings() -> None:
    assert leave_after([Reading(step=3, step_time=1.0, age=0.0)], base=50, margin=0.1) == 51


@pytest.mark.parametrize("step_time", [0.0, -1.0, math.nan, math.inf, 1e-300])
def test_a_nonsensical_step_time_never_names_a_step_out_of_reach(step_time: float) -> None:
    step = leave_after([Reading(step=7, step_time=step_time, age=60.0)], base=0, margin=0.1)
    assert 7 < step <= 7 + 2 * LONGEST_AHEAD + 1


@given(
    st.lists(
        st.builds(
            Reading,
            step=st.integers(0, 10**6),
            step_time=st.floats(0.001, 10.0),
            age=st.floats(0.0, 30.0),
        ),
        max_size=8,
    ),
    st.integers(0, 10**6),
)
def test_the_boundary_is_beyond_everyone_s_last_word(readings: list[Reading], base: int) -> None:
    step = leave_after(readings, base=base, margin=0.1)
    assert step > base
    assert all(step > reading.step for reading in readings)


# ---- question and answer -----------------------------------------------------------------


def asked(scenario: MakeScenario) -> tuple[Scenario, AskProgress]:
    """A job that wants to grow and does not know yet how far its two members are."""
    s = scenario(start_np=2, min_np=1).training(a=1, b=1)
    s.progress = False
    s.hosts(a=1, b=1, c=1)
    s.ready("c.0.1")
    s.wait(0.02)
    (question,) = s.all(AskProgress)
    return s, question


def reading(step: int, *, answered: bool = True) -> ProgressReading:
    return ProgressReading(step, 0.1, answered)


def test_the_members_are_asked_and_their_answers_name_the_step(scenario: MakeScenario) -> None:
    s, question = asked(scenario)
    assert question.workers == ("a.0.1", "b.0.1")
    assert s.all(PublishNotice) == []
    s.now += 0.01
    s.send(ProgressReported(question.number, (reading(50), reading(51))))
    # 51 steps, 0.01 s ago; twice those 0.01 s are the margin
    assert (s.notice.round, s.notice.after_step) == (1, 52)


def test_the_slowest_of_the_last_answers_counts_until_enough_were_faster(
    scenario: MakeScenario,
) -> None:
    def steps_ahead(waited: float) -> int:
        """How far ahead the step is that is named when the answers take this long."""
        s.wait(0.02)
        s.now += waited
        s.send(ProgressReported(s.all(AskProgress)[-1].number, (reading(50), reading(50))))
        ahead = (s.notice.after_step or 0) - 50
        s.ready(*s.in_state("running"), version=50)
        s.step(*s.members, step=51)
        s.exit(s.members[-1], -9)
        s.ready(*s.in_state("running"), version=50)
        s.ready(*s.starting)
        return ahead

    s, _ = asked(scenario)
    assert steps_ahead(0.045) == 2  # of 0.1 s: answers 0.045 s old, and twice that as the margin
    assert [steps_ahead(0.015) for _ in range(ANSWERS_KEPT)] == [2] * (ANSWERS_KEPT - 1) + [1]


def test_who_did_not_answer_is_asked_once_more(scenario: MakeScenario) -> None:
    s, question = asked(scenario)
    s.send(ProgressReported(question.number, (reading(50), reading(50, answered=False))))
    assert s.all(PublishNotice) == []
    again = s.all(AskProgress)[-1]
    assert (again.number, again.workers) == (question.number + 1, question.workers)
    s.now += 0.01
    s.send(ProgressReported(again.number, (reading(50), reading(51))))
    assert s.notice.after_step == 52


def test_who_does_not_answer_twice_is_taken_to_be_further(scenario: MakeScenario) -> None:
    s, question = asked(scenario)
    for number in (question.number, question.number + 1):
        s.send(ProgressReported(number, (reading(50), reading(51, answered=False))))
    assert s.notice.after_step == 51 + 20 + 1 + 1  # two seconds of steps, and the longest margin


def test_without_an_answer_the_members_leave_at_once(scenario: MakeScenario) -> None:
    s, question = asked(scenario)
    s.wait(REPORT_S - 0.1)
    assert s.all(PublishNotice) == []
    s.wait(0.2)
    assert s.notice.after_step is None
    assert "could not be read" in s.notice.reason
    s.send(ProgressReported(question.number, (reading(50), reading(51))))
    assert len(s.all(PublishNotice)) == 1  # too late


def test_an_answer_to_another_question_changes_nothing(scenario: MakeScenario) -> None:
    s, question = asked(scenario)
    s.send(ProgressReported(question.number + 1, (reading(50),)))
    assert s.all(PublishNotice) == []


def test_a_loss_meanwhile_is_not_made_to_wait(scenario: MakeScenario) -> None:
    s, question = asked(scenario)
    s.exit("b.0.1", -9)
    assert s.notice.after_step is None
    s.send(ProgressReported(question.number, (reading(50),)))
    assert len(s.all(PublishNotice)) == 1


LR = "learning rate of group 0 of 'optimizer'"
REASON = f"{LR} is 0.02 on ranks 0, 1 and 0.01 on rank 2"
VALUES = (StateValue((0, 1), "0.02"), StateValue((2,), "0.01"))


def differ(
    s: Scenario, step: int = 120, leaf: str = LR, values: tuple[StateValue, ...] = VALUES
) -> None:
    number = s.job.rounds.current.number
    s.send(seen.StatesDiffer(number, step, leaf, values, REASON))


def equal(s: Scenario, step: int = 100) -> None:
    s.send(seen.StatesEqual(s.job.rounds.current.number, step))


def after_a_kill(scenario: MakeScenario, **settings: Any) -> Scenario:
    """Three ranks that trained, of which one was killed and replaced."""
    s = scenario(start_np=3, max_np=3, **settings).training(a=2, b=1)
    s.exit("b.0.1", -9)
    s.ready(*s.in_state("running"), version=9)
    assert s.round == (2, "complete")
    s.step(*s.members)
    s.ready(*s.starting)
    leave(s, version=10)
    assert (s.round, len(s.members)) == ((3, "complete"), 3)
    return s


def leave(s: Scenario, version: int) -> None:
    """Every member arrives at the boundary, and the next round has a step."""
    s.wait(0.1)
    assert s.notice.after_step is not None, "at a step boundary"
    s.ready(*s.in_state("running"), version=version)
    s.step(*s.members, step=version + 1)


def actions(s: Scenario) -> list[object]:
    return [told.what.facts()["action"] for told in s.announced("state_differs")]


def test_a_difference_that_began_at_a_change_of_the_world_is_repaired_from_rank_0(
    scenario: MakeScenario,
) -> None:
    s = after_a_kill(scenario)
    before = s.members
    differ(s, 120)
    (told,) = s.announced("state_differs")
    assert told.reason == f"{REASON}; all ranks take over the state of rank 0"
    assert told.what.facts() == {"step": 120, "leaf": LR, "values": VALUES, "action": "repair"}
    assert told.round == 3
    assert s.round == (3, "closing")
    leave(s, version=130)
    assert (s.round, s.members) == ((4, "complete"), before), "nobody is lost"
    assert s.world.repair
    assert s.world.reason == "the ranks held different states after step 120"
    synced = s.announced("state_synced")[-1]
    assert (synced.worker, synced.what.facts()["receivers"]) == (before[0], 2)
    assert s.end is None


def test_worlds_before_and_after_a_repair_ask_for_none(scenario: MakeScenario) -> None:
    s = after_a_kill(scenario)
    assert not s.world.repair
    differ(s)
    leave(s, version=130)
    assert s.world.repair
    equal(s)
    s.exit("a.1.1", -9)
    s.ready(*s.in_state("running"), version=140)
    assert (s.round, s.world.repair) == ((5, "complete"), False)


def test_a_repair_counts_neither_as_a_reset_nor_as_a_failure(scenario: MakeScenario) -> None:
    s = after_a_kill(scenario, reset_limit=2)
    assert s.job.rounds.resets == 2
    failures = s.job.outcome.budget.failures
    differ(s)
    leave(s, version=130)
    assert (s.round, s.end) == ((4, "complete"), None)
    assert (s.job.rounds.resets, s.job.outcome.budget.failures) == (2, failures)


def test_a_difference_after_a_step_at_which_all_were_equal_ends_the_job(
    scenario: MakeScenario,
) -> None:
    s = after_a_kill(scenario)
    equal(s, 100)
    differ(s, 120)
    assert actions(s) == ["stop"]
    assert s.end is not None
    assert s.end.exit_code == ExitCode.STATES_DIFFER == 65
    assert s.end.reason == (
        f"the ranks hold different states after step 120: {REASON}; see docs/verify-state.md"
    )


def test_an_equal_step_of_an_earlier_round_does_not_count(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2).training(a=2)
    equal(s)
    s.exit("a.1.1", -9)
    s.ready("a.0.1", version=9)
    s.step(*s.members)
    differ(s)
    assert actions(s) == ["repair"]


def test_a_difference_in_the_first_round_ends_the_job(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2).training(a=2)
    differ(s)
    assert actions(s) == ["stop"]
    assert s.end is not None
    assert s.end.exit_code == 65


@pytest.mark.parametrize("proven", [True, False])
def test_a_second_repair_needs_a_step_in_between_at_which_all_were_equal(
    scenario: MakeScenario, proven: bool
) -> None:
    s = after_a_kill(scenario, on_difference="repair")
    differ(s)
    leave(s, version=130)
    if proven:
        equal(s, 131)
    differ(s, 140)
    assert actions(s) == ["repair", "repair" if proven else "stop"]
    if proven:
        leave(s, version=150)
        assert (s.round, s.world.repair) == ((5, "complete"), True)
    else:
        assert s.end is not None
        assert s.end.exit_code == 65
        assert "the repair after round 3 did not help" in s.end.reason


def test_a_change_for_another_reason_in_between_makes_no_repair_succeed(
    scenario: MakeScenario,
) -> None:
    s = after_a_kill(scenario)
    differ(s)
    leave(s, version=130)
    s.exit("a.1.1", -9)
    s.ready(*s.in_state("running"), version=140)
    s.step(*s.members)
    differ(s)
    assert actions(s) == ["repair", "stop"]


@pytest.mark.parametrize("number", [1, 3])
def test_the_action_that_is_asked_for_is_taken_whenever_it_began(
    scenario: MakeScenario, number: int
) -> None:
    for mode in ("stop", "repair", "warn"):
        if number == 1:
            s = scenario(start_np=2, max_np=2, on_difference=mode).training(a=2)
        else:
            s = after_a_kill(scenario, on_difference=mode)
        equal(s)
        differ(s)
        assert actions(s) == [mode]
        assert (s.end is not None) == (mode == "stop")
        assert s.round == (number, "closing" if mode == "repair" else "complete")


@pytest.mark.parametrize(
    ("leaf", "values", "mode", "action"),
    [
        ("state.img_secs", ("[1.25, 2.5]", "[1.5, …"), None, "warn"),
        ("state.seconds", ("1e-05", "-2.5"), None, "warn"),
        ("state.img_secs", ("[1.25]", "[1.5]"), "stop", "stop"),
        ("state.epoch", ("1", "2"), None, "stop"),
        ("state.counts", ("[1, 2]", "[1, 3]"), None, "stop"),
        ("state.name", ("a", "b"), None, "stop"),
        ("model.weight", ("0.5", "0.25"), None, "stop"),
    ],
)
def test_floats_of_horovods_states_may_differ_and_models_and_counters_may_not(
    scenario: MakeScenario, leaf: str, values: tuple[str, str], mode: str | None, action: str
) -> None:
    s = scenario(start_np=2, max_np=2, own_values=True, on_difference=mode).training(a=2)
    differ(s, leaf=leaf, values=tuple(StateValue((n,), v) for n, v in enumerate(values)))
    assert actions(s) == [action]
    assert (s.end is not None) == (action == "stop")


def test_with_warn_each_difference_is_told_and_nothing_else_happens(
    scenario: MakeScenario,
) -> None:
    s = after_a_kill(scenario, on_difference="warn")
    differ(s, 120)
    differ(s, 140)
    assert actions(s) == ["warn", "warn"]
    assert s.round == (3, "complete")
    assert s.announced("state_differs")[0].reason.endswith("the job goes on (--on-difference warn)")


def test_news_of_a_round_that_is_over_or_is_left_already_change_nothing(
    scenario: MakeScenario,
) -> None:
    s = after_a_kill(scenario)
    s.send(seen.StatesDiffer(2, 120, LR, VALUES, REASON))
    s.send(seen.StatesEqual(2, 120))
    assert actions(s) == []
    differ(s)
    differ(s)
    assert actions(s) == ["repair"]
    leave(s, version=130)
    s.send(seen.StatesDiffer(3, 125, LR, VALUES, REASON))
    assert (actions(s), s.end) == (["repair"], None)


def test_a_round_that_is_being_left_for_a_loss_is_followed_by_a_repair(
    scenario: MakeScenario,
) -> None:
    s = after_a_kill(scenario)
    s.exit("a.1.1", -9)
    assert s.round == (3, "closing")
    differ(s)
    assert actions(s) == ["repair"]
    s.ready(*s.in_state("running"), version=11)
    assert (s.round, s.world.repair) == ((4, "complete"), True)


def test_a_repair_that_breaks_before_a_step_is_made_again(scenario: MakeScenario) -> None:
    s = after_a_kill(scenario)
    differ(s)
    s.wait(0.1)
    s.ready(*s.in_state("running"), version=130)
    assert (s.round, s.world.repair) == ((4, "complete"), True)
    s.exit("a.1.1", -9)
    s.ready(*s.in_state("running"), version=130)
    assert (s.round, s.world.repair) == ((5, "complete"), True), "nobody knows who was repaired"
    s.step(*s.members)
    s.exit(s.members[-1], -9)
    s.ready(*s.in_state("running"), version=140)
    assert (s.round, s.world.repair) == ((6, "complete"), False)


def test_when_a_rank_has_finished_its_script_there_is_no_repair_any_more(
    scenario: MakeScenario,
) -> None:
    s = after_a_kill(scenario)
    s.send(ev.WorkerEnding("a.0.1", 3))
    differ(s)
    assert actions(s) == ["stop"]
    assert s.end is not None
    assert s.end.exit_code == 65
    assert "as a rank has finished its script" in s.end.reason


def test_a_job_whose_ranks_finish_before_they_are_repaired_does_not_succeed(
    scenario: MakeScenario,
) -> None:
    s = after_a_kill(scenario)
    differ(s)
    assert actions(s) == ["repair"]
    for worker in s.members:
        s.send(ev.WorkerEnding(worker, 3))
    for worker in s.members:
        s.exit(worker, 0)
    assert s.end is not None
    assert s.end.exit_code == 65
    assert "a rank has finished its script before the repair" in s.end.reason


def test_ranks_that_finish_once_they_are_repaired_succeed(scenario: MakeScenario) -> None:
    s = after_a_kill(scenario)
    differ(s)
    s.wait(0.1)
    s.ready(*s.in_state("running"), version=130)
    assert s.world.repair
    for worker in s.members:  # their loops had nothing left
        s.exit(worker, 0)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_a_job_that_has_to_go_is_not_repaired_and_writes_no_such_state(
    scenario: MakeScenario,
) -> None:
    s = after_a_kill(scenario)
    s.send(seen.JobLeaving("its time is over", 60.0))
    differ(s)
    assert s.end is not None
    assert s.end.exit_code == 65


def test_a_resumed_driver_knows_of_a_repair_and_of_steps_at_which_all_were_equal(
    scenario: MakeScenario,
) -> None:
    s = after_a_kill(scenario)
    equal(s)
    s.resume()
    for host in ("a", "b"):
        s.returns(host)
    differ(s)
    assert actions(s) == ["stop"], "all were equal in this round"
    s = after_a_kill(scenario)
    differ(s)
    s.wait(0.1)
    s.ready(*s.in_state("running"), version=130)
    assert s.round == (4, "complete")
    s.resume()
    assert s.round == (4, "closing"), "no step proves that its members were repaired"
    assert s.world.repair, "it is published again"
    for host in ("a", "b"):
        s.returns(host)
    s.ready(*s.in_state("running"), version=130)
    assert (s.round, s.world.repair) == ((5, "complete"), True)


def test_a_world_that_is_to_be_repaired_travels_with_that_mark() -> None:
    for repair in (True, False):
        world = msg.World(1, (), "a test", repair)
        assert msg.decode_world(msg.encode_world(world)).repair == repair
