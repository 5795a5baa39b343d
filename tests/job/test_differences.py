"""Ranks that hold different states are repaired, or the job ends."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.errors import ExitCode
from elastic_driver.job import events as seen
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from elastic_driver.words.findings import StateValue
from tests.job.scenario import MakeScenario, Scenario

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
