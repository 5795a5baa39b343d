"""Where the boundary lies: beyond what anyone can have reached, and no further than needed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_who_did_not_answer_is_taken_to_be_further(scenario: MakeScenario) -> None:
    s, question = asked(scenario)
    s.send(ProgressReported(question.number, (reading(50), reading(51, answered=False))))
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
