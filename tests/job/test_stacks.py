"""Where every rank stands: who is asked, what is kept, who is named."""

from __future__ import annotations

import pytest

from elastic_driver.job.decisions import Announce, AskStacks
from elastic_driver.job.events import LeaseExpired
from elastic_driver.job.hangs import ANSWER_S, StackAnswer, describe, group
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from elastic_driver.words.findings import StackGroup
from elastic_driver.words.wire_events import SEEN_ELSEWHERE, SEEN_WAITING
from tests.job.scenario import MakeScenario, Scenario


@pytest.fixture
def three(scenario: MakeScenario) -> Scenario:
    return scenario(start_np=3, max_np=3, settle=1.0).training(a=2, b=1)


def answer(s: Scenario, worker: str, where: str, stack: str = "", *, own: bool = True) -> None:
    s.send(ev.WorkerStack(worker, s.all(AskStacks)[-1].number, where, stack, own))


def collected(s: Scenario) -> tuple[StackGroup, ...]:
    detail = s.announced("stacks_collected")[-1].what.facts()["stacks"]
    assert isinstance(detail, tuple)
    return detail


# ---- who stands where --------------------------------------------------------------------

IN, OUT = "collective", "elsewhere"


@pytest.mark.parametrize(
    ("places", "odd"),
    [
        ("iio", {2}),
        ("oi", {0}),
        ("ooi", {0, 1}),
        ("oio", {0, 2}),
        ("iii", set()),
        ("ooo", set()),
        ("iiioo", {3, 4}),
        ("iim", {2}),  # in a collective, but in another one
        ("im", set()),
        ("ooN", {2}),
        ("ws", {1}),  # plain scripts: nobody speaks for itself
        ("sws", {0, 2}),
        ("ss", set()),
        ("is", {1}),
    ],
)
def test_the_odd_ones_are_those_that_the_others_may_wait_for(places: str, odd: set[int]) -> None:
    meaning = {
        "i": StackAnswer(IN, "all_reduce", own=True),
        "m": StackAnswer(IN, "recv", own=True),
        "o": StackAnswer(OUT, "step", own=True),
        "N": StackAnswer("no answer", "", own=False),
        "w": StackAnswer(SEEN_WAITING, "all_reduce", own=False),
        "s": StackAnswer(SEEN_ELSEWHERE, "step", own=False),
    }
    groups = group({rank: meaning[place] for rank, place in enumerate(places)})
    assert {rank for g in groups if g.odd for rank in g.ranks} == odd
    assert sorted(rank for g in groups for rank in g.ranks) == list(range(len(places)))


def test_a_group_is_told_in_a_sentence_the_odd_one_first() -> None:
    places = dict.fromkeys((0, 2), StackAnswer(IN, "x", own=True)) | {
        1: StackAnswer(OUT, "y", own=True)
    }
    said = describe(group(places))
    assert said == (
        "rank 1 outside of collectives (apart from the others), ranks 0, 2 in a collective"
    )


# ---- asking ------------------------------------------------------------------------------


def test_all_workers_and_all_agents_are_asked_and_the_answers_kept(three: Scenario) -> None:
    three.send(ev.StacksRequested("somebody"))
    assert [order.number for order in three.orders(msg.StacksOrder)] == [1, 1]
    for worker in three.members[:-1]:
        answer(three, worker, IN, "all_reduce")
    assert three.announced("stacks_collected") == []
    answer(three, three.members[-1], OUT, "lock")
    (odd, others) = collected(three)
    assert (odd.ranks, odd.stack, odd.odd) == ((2,), "lock", True)
    assert (others.ranks, others.odd) == ((0, 1), False)


def test_who_does_not_answer_is_seen_by_its_agent_or_said_to_be_silent(three: Scenario) -> None:
    three.send(ev.StacksRequested("somebody"))
    answer(three, "a.0.1", IN, "all_reduce")
    answer(three, "a.0.1", "no answer; its process is sleeping", own=False)
    answer(three, "a.1.1", "no answer; its process is stopped", own=False)
    three.wait(ANSWER_S - 0.1)
    assert three.announced("stacks_collected") == []
    three.wait(0.1)
    where = {rank: g.where for g in collected(three) for rank in g.ranks}
    assert where == {0: IN, 1: "no answer; its process is stopped", 2: "no answer"}


def test_a_second_question_waits_for_the_first_and_late_answers_change_nothing(
    three: Scenario,
) -> None:
    three.send(ev.StacksRequested("somebody"))
    three.send(ev.StacksRequested("somebody else"))
    assert len(three.all(AskStacks)) == 1
    three.wait(ANSWER_S)
    answer(three, "a.0.1", IN)
    assert three.job.effects.ignored_events == 1
    three.send(ev.StacksRequested("again"))
    assert [question.number for question in three.all(AskStacks)] == [1, 2]
    three.send(ev.WorkerStack("a.0.1", 1, IN, ""))
    assert three.job.effects.ignored_events == 2


def test_without_workers_there_is_an_answer_too(scenario: MakeScenario) -> None:
    s = scenario(start_np=1)
    s.send(ev.StacksRequested("somebody"))
    assert collected(s) == ()
    assert "there are no workers" in s.announced("stacks_collected")[0].reason


def test_when_a_worker_hangs_the_stacks_of_all_are_kept_before_it_is_killed(
    three: Scenario,
) -> None:
    three.send(ev.WorkerStalled("a.1.1", 1, 60.0, OUT, "lock"))
    answer(three, "a.0.1", IN, "all_reduce")
    three.wait(1.0)
    names = [a.event for a in three.all(Announce)]
    assert names.index("stacks_collected") < names.index("worker_hung")
    where = {rank: (g.where, g.odd) for g in collected(three) for rank in g.ranks}
    assert where == {0: (IN, False), 1: (OUT, True), 2: ("no answer", True)}


def test_who_is_silent_is_looked_at_before_its_lease_ends_and_it_is_killed(three: Scenario) -> None:
    three.send(LeaseExpired("half", "a.1.1", 30.0))
    assert [order.number for order in three.orders(msg.StacksOrder)] == [1, 1]
    answer(three, "a.1.1", SEEN_ELSEWHERE, "in C", own=False)
    three.lost("a.1.1")
    names = [a.event for a in three.all(Announce)]
    assert names.index("stacks_collected") < names.index("worker_hung")
    said = three.announced("stacks_collected")[0].reason
    assert said.startswith("a.1.1: it has not been heard from for 15 s")
    assert {g.stack for g in collected(three) if 1 in g.ranks} == {"in C"}


def test_the_silence_of_a_worker_that_is_no_member_asks_nobody(three: Scenario) -> None:
    three.exit("a.1.1", 1)
    three.send(LeaseExpired("half", "a.1.1", 30.0))
    three.send(LeaseExpired("half", "z.0.1", 30.0))
    assert three.all(AskStacks) == []
