"""Who is taken to hang, from what the workers say of their training threads.

After five seconds the user hears for whom the job waits, and why.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from elastic_driver.job import hangs
from elastic_driver.job.decisions import Decision, PublishNotice, PublishSave
from elastic_driver.job.hangs import BOOT_S, SILENT_S
from elastic_driver.job.job import Job
from elastic_driver.settings import Settings
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario

STACK = '  File "/srv/train.py", line {line}, in {name}\n    x()\n'
TORCH = '  File "/lib/torch/distributed/c10d.py", line 9, in all_reduce\n    work.wait()\n'
Where = Literal["collective", "elsewhere"]


def stall(
    s: Scenario,
    worker: str,
    where: Where,
    *,
    seconds: float = 60.0,
    line: int = 7,
    round_id: int | None = None,
    begun: int = 0,
) -> list[Decision]:
    stack = STACK.format(line=line, name="step") + (TORCH if where == "collective" else "")
    number = s.job.rounds.current.number if round_id is None else round_id
    return s.send(ev.WorkerStalled(worker, number, seconds, where, stack, collectives=begun))


def killed(s: Scenario) -> list[str]:
    return [order.worker for order in s.orders(msg.StopWorkerOrder) if order.grace == 0.0]


@pytest.fixture
def three(scenario: MakeScenario) -> Scenario:
    return scenario(start_np=3, max_np=3, settle=1.0).training(a=3)


def test_one_that_stands_elsewhere_while_the_others_wait_for_it_is_killed(three: Scenario) -> None:
    stall(three, "a.0.1", "collective")
    stall(three, "a.2.1", "collective")
    assert killed(three) == []
    stall(three, "a.1.1", "elsewhere", line=41)
    assert killed(three) == ["a.1.1"]
    (hung,) = three.announced("worker_hung")
    assert hung.worker == "a.1.1"
    assert "line 41, in step" in hung.reason
    assert "line 41" in str(hung.what.facts()["stack"])
    assert (three.notice.round, three.notice.after_step) == (1, None)


def test_the_verdict_does_not_wait_for_members_that_say_nothing(three: Scenario) -> None:
    stall(three, "a.1.1", "elsewhere")
    three.wait(0.9)
    assert killed(three) == []
    three.wait(0.1)
    assert killed(three) == ["a.1.1"]


def test_who_waits_in_a_collective_for_a_member_that_is_busy_is_left_alone(three: Scenario) -> None:
    stall(three, "a.1.1", "collective")
    stall(three, "a.2.1", "collective")
    three.wait(100.0)
    assert killed(three) == []
    assert three.round == (1, "complete")
    assert three.all(PublishNotice) == []


def test_a_worker_that_goes_on_is_no_longer_counted(three: Scenario) -> None:
    stall(three, "a.1.1", "elsewhere")
    three.send(ev.WorkerResumed("a.1.1", 1))
    three.wait(10.0)
    assert killed(three) == []
    assert len(three.announced("worker_resumed")) == 1


def test_collectives_that_do_not_match_break_the_round_and_nobody_is_killed(
    three: Scenario,
) -> None:
    for worker, line in (("a.0.1", 7), ("a.1.1", 9), ("a.2.1", 7)):
        stall(three, worker, "collective", line=line)
    assert killed(three) == []
    assert three.round == (1, "closing")
    assert "ranks 0, 2 at" in three.notice.reason
    assert "rank 1 at" in three.notice.reason
    three.ready("a.0.1", "a.1.1", "a.2.1", version=5)
    assert three.round == (2, "complete")
    assert len(three.members) == 3


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        ((41, 40, 40), "; rank 0 has called a collective that ranks 1, 2 did not"),
        ((40, 42, 42), "; ranks 1, 2 have called 2 collectives that rank 0 did not"),
        ((40, 40, 40), ""),
    ],
)
def test_a_mismatch_is_announced_with_the_ranks_that_have_called_more(
    three: Scenario, begun: tuple[int, int, int], said: str
) -> None:
    for worker, count in zip(three.members, begun, strict=True):
        stall(three, worker, "collective", begun=count)
    (told,) = three.announced("collectives_differ")
    place = 'ranks 0, 1, 2 at File "/srv/train.py", line 7, in step'
    assert told.reason.startswith(f"{place}{said}; every rank has to call the same collectives")


def mismatch(s: Scenario) -> None:
    for worker in s.members:
        stall(s, worker, "collective")


def test_a_mismatch_again_without_a_step_in_between_fails_the_job(three: Scenario) -> None:
    mismatch(three)
    three.ready(*three.members, version=5)
    mismatch(three)
    assert three.end is not None
    assert three.end.exit_code == 1
    assert "collectives that do not match, again: ranks 0, 1, 2 at" in three.end.reason


def test_a_mismatch_that_ends_the_job_on_the_way_out_of_a_round_ends_it(three: Scenario) -> None:
    mismatch(three)
    three.ready(*three.members, version=5)
    three.hosts(a=2)
    three.wait(0.1)
    assert three.round == (2, "closing")
    mismatch(three)
    assert three.end is not None
    assert three.job.deadline() is None


def test_a_mismatch_after_steps_is_a_first_one_again(three: Scenario) -> None:
    for _ in range(3):
        mismatch(three)
        three.ready(*three.members, version=5)
        three.step(*three.members, step=6)
    assert three.end is None
    assert three.round == (4, "complete")


def test_several_that_stand_elsewhere_are_told_apart_by_who_leaves(three: Scenario) -> None:
    stall(three, "a.0.1", "collective")
    stall(three, "a.1.1", "elsewhere")
    stall(three, "a.2.1", "elsewhere")
    assert killed(three) == []
    assert three.round == (1, "closing")
    three.ready("a.0.1", "a.2.1", version=5)
    three.wait(hangs.LEAVE_S - 0.1)
    assert killed(three) == []
    three.wait(0.1)
    assert killed(three) == ["a.1.1"]
    assert three.round == (2, "complete")


def test_an_evaluation_of_all_that_does_not_report_itself_is_waited_for(three: Scenario) -> None:
    for seconds in (60.0, 120.0, 240.0, 479.0):
        for worker in three.members:
            stall(three, worker, "elsewhere", seconds=seconds)
        three.wait(10.0)
    assert three.round == (1, "complete")
    assert len(three.announced("worker_stalled")) == 3, "said once each"
    for worker in three.members:
        stall(three, worker, "elsewhere", seconds=480.0)
    assert three.round == (1, "closing")


def test_a_driver_that_did_not_get_the_first_report_waits_no_longer(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=1).training(a=1)
    s.send(ev.WorkerStalled("a.0.1", 1, 240.0, "elsewhere", "in f", first=60.0))
    assert s.round == (1, "complete")
    s.send(ev.WorkerStalled("a.0.1", 1, 480.0, "elsewhere", "in f", first=60.0))
    assert s.round == (1, "closing")


def test_reports_of_a_stall_that_come_out_of_order_are_the_same_stall(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, max_np=1).training(a=1)
    for seconds in (240.0, 480.0, 60.0, 120.0):
        stall(s, "a.0.1", "elsewhere", seconds=seconds)
    assert s.round == (1, "closing")


def test_where_the_user_set_the_limit_it_holds_for_all(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2, hang_timeout=3.0).training(a=2)
    for worker in s.members:
        stall(s, worker, "elsewhere", seconds=3.0)
    assert s.round == (1, "closing")
    s.wait(hangs.LEAVE_S)
    assert killed(s) == ["a.0.1", "a.1.1"]


def test_one_that_hangs_alone_in_its_world_is_killed_too(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=1, hang_timeout=3.0).training(a=1)
    stall(s, "a.0.1", "elsewhere", seconds=3.0)
    s.wait(hangs.LEAVE_S)
    assert killed(s) == ["a.0.1"]


def test_one_that_hangs_while_a_peer_is_lost_does_not_hold_up_the_rest(three: Scenario) -> None:
    three.exit("a.0.1", -9)
    three.ready("a.2.1", version=5)
    stall(three, "a.1.1", "elsewhere")
    three.wait(hangs.LEAVE_S)
    assert killed(three) == ["a.1.1"]
    assert three.round == (2, "complete")
    assert three.members == ["a.2.1"]


@pytest.mark.parametrize("version", [0, 7])
def test_who_was_to_leave_stays_when_the_one_to_be_kept_hangs(
    scenario: MakeScenario, version: int
) -> None:
    s = scenario(start_np=3, min_np=1, settle=1.0).training(a=3)
    s.lost("a.2.1")
    s.ready("a.1.1", version=version)
    s.send(ev.ScaleRequested(1))  # of the two that are left, the oldest: but that one hangs
    stall(s, "a.0.1", "elsewhere")
    s.wait(hangs.LEAVE_S)
    assert killed(s) == ["a.2.1", "a.0.1"]
    assert s.members == ["a.1.1"]
    assert s.all(PublishSave) == []  # it stays, and its state with it
    assert s.round == (2, "complete")


def test_a_planned_change_with_a_hang_before_its_boundary_is_not_waited_for(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=3).training(a=2)
    s.hosts(a=3)
    s.ready("a.2.1")
    s.wait(1.0)
    assert (s.round, s.notice.after_step) == ((1, "closing"), 2)
    stall(s, "a.0.1", "collective")
    stall(s, "a.1.1", "elsewhere")
    assert killed(s) == ["a.1.1"]
    s.ready("a.0.1", version=3)
    assert s.round == (2, "complete")


def test_late_and_foreign_words_change_nothing(three: Scenario) -> None:
    stall(three, "a.1.1", "elsewhere", round_id=7)
    stall(three, "b.0.1", "elsewhere")
    three.send(ev.WorkerResumed("a.0.1", 1))
    three.send(ev.WorkerResumed("a.0.1", 9))
    three.wait(10.0)
    assert three.job.effects.ignored_events == 4
    assert three.round == (1, "complete")


def test_a_stack_in_the_log_is_bounded(three: Scenario) -> None:
    three.send(ev.WorkerStalled("a.1.1", 1, 60.0, "elsewhere", "x" * 60_000))
    detail: dict[str, Any] = dict(three.announced("worker_stalled")[0].what.facts())
    assert len(detail["stack"]) == hangs.MAX_STACK_CHARS
    assert detail["stack"].startswith("  (more than 52000 characters of outer frames were cut)\nxx")


def test_a_report_with_a_very_long_stack_is_cut_and_not_refused() -> None:
    stack = "".join(f'  File "x.py", line {n}\n' for n in range(10_000))
    sent = {"type": "worker_stack", "worker": "a.0.1", "number": 1, "where": "elsewhere"}
    body = msgspec.json.encode({**sent, "stack": stack})
    read = msgspec.json.decode(body, type=ev.WireEvent)
    assert isinstance(read, ev.WorkerStack)
    assert len(read.stack) < 65536
    assert read.stack.startswith("  (more than ")
    assert read.stack.endswith("line 9999\n")


TWO = {"start_np": 2, "max_np": 2, "expects": "-np 2 (command line) asks for them"}


def told(job: Scenario) -> list[str]:
    return [announced.reason for announced in job.announced("job_waits")]


def test_hosts_that_are_not_known_are_expected_for_a_reason() -> None:
    job = Scenario(**TWO)
    job.hosts(a=1)
    job.wait(SILENT_S - 0.1)
    assert told(job) == []
    job.wait(60.0)
    (said,) = told(job)
    assert "1 of 2 slots have an agent; only a is known, others are expected" in said
    assert said.endswith("; -np 2 (command line) asks for them")


def test_hosts_without_an_agent_are_named_with_what_keeps_them() -> None:
    job = Scenario(agents=False, **TWO)
    job.hosts(a=1, b=1)
    job.agent_up("a")
    job.wait(SILENT_S)
    (said,) = told(job)
    assert "missing: b (its agent starts)" in said
    other = Scenario(agents=False, **TWO)
    other.silent.add("b")
    other.hosts(a=1, b=1)
    other.agent_up("a")
    other.agent_lost("b", "ssh: no route", unreachable=True)
    other.wait(SILENT_S)
    assert "missing: b (unreachable: ssh: no route" in told(other)[0]


def test_workers_that_boot_for_long_are_named() -> None:
    job = Scenario(**TWO)
    job.hosts(a=1, b=1)
    job.ready("a.0.1")
    job.wait(BOOT_S - 1)
    assert told(job) == []
    job.wait(2)
    assert told(job) == [f"for {BOOT_S:g} s: b.0.1 started, and did not call @elastic.run yet"]


def test_a_job_that_begins_at_once_says_nothing() -> None:
    job = Scenario(**TWO).training(a=1, b=1)
    job.wait(100.0)
    assert told(job) == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_later_round_with_too_few_workers_says_so(steps: int) -> None:
    job = Scenario(min_np=2, **TWO).training(steps=steps, a=1, b=1)
    job.silent.add("b")
    job.agent_lost("b", "silent", unreachable=True)
    job.ready("a.0.1", version=1)
    job.wait(SILENT_S + 1)
    assert [said for said in told(job) if "missing: b (unreachable: silent" in said]


def test_what_was_told_is_told_no_more_by_the_next_driver() -> None:
    job = Scenario(**TWO)
    job.hosts(a=1)
    job.wait(SILENT_S)
    assert len(told(job)) == 1
    job.job = Job.restored(job.job.snapshot())
    job.wait(60.0)
    assert len(told(job)) == 1
    assert isinstance(job.job.settings, Settings)
