"""Last words: shown once, when it is clear what they mean."""

from __future__ import annotations

from elastic_driver.runtime.results import (
    HOLD_S,
    MAX_HELD,
    MAX_TAIL_LINES,
    REPEATS_S,
    HeldTails,
    describe_exit,
    describe_failure,
    last_words,
    traceback_in,
)
from elastic_driver.words.findings import Failure
from elastic_driver.words.wire_events import WorkerExited

BOOM = "Traceback (most recent call last):\n  File 'x'\nValueError: boom"


def failed(worker: str, tail: str = BOOM, *, code: int = 1, victim: bool = False) -> WorkerExited:
    return WorkerExited(worker, code, tail, victim)


def test_nothing_is_shown_while_the_round_it_failed_in_is_the_newest() -> None:
    tails = HeldTails()
    tails.add(failed("a.0.1"), round_id=1, now=0.0)
    assert tails.world_published(1) == []
    assert tails.world_published(2) == [("a.0.1", BOOM)]
    assert tails.world_published(3) == []


def test_the_same_traceback_of_many_workers_is_shown_once_ever() -> None:
    tails = HeldTails()
    for slot in range(5):
        tails.add(failed(f"a.{slot}.1"), round_id=1, now=0.0)
    assert tails.world_published(2) == [("a.0.1", BOOM)]
    tails.add(failed("a.0.2"), round_id=2, now=0.0)
    assert tails.world_published(3) == []


def test_different_tracebacks_are_all_shown() -> None:
    tails = HeldTails()
    tails.add(failed("a.0.1"), 1, now=0.0)
    tails.add(failed("a.1.1", BOOM + "!"), 1, now=0.0)
    assert [worker for worker, _ in tails.world_published(2)] == ["a.0.1", "a.1.1"]


def test_before_the_first_step_of_an_elastic_job_a_later_round_proves_nothing() -> None:
    tails = HeldTails(elastic=True)
    tails.add(failed("a.0.1"), 1, now=0.0)
    assert tails.world_published(2) == []
    assert tails.step_finished(1) == []  # a step of the round it failed in
    assert tails.step_finished(2) == [("a.0.1", BOOM)]


def test_a_job_that_succeeded_shows_what_it_survived() -> None:
    tails = HeldTails(elastic=True)
    tails.add(failed("a.0.1"), 1, now=0.0)
    assert tails.job_succeeded() == [("a.0.1", BOOM)]


def test_victims_and_successes_and_silent_deaths_have_nothing_to_tell() -> None:
    tails = HeldTails()
    tails.add(failed("a.0.1", victim=True), 1, now=0.0)
    tails.add(failed("a.1.1", code=0), 1, now=0.0)
    tails.add(failed("a.2.1", "just some lines\nkilled", code=-9), 1, now=0.0)
    assert tails.world_published(2) == []


def test_what_is_held_is_bounded() -> None:
    tails = HeldTails()
    for number in range(3 * MAX_HELD):
        tails.add(failed("a.0.1", f"{BOOM} {number}"), 1, now=0.0)
    assert len(tails.world_published(2)) == MAX_HELD


def test_what_waits_is_shown_after_a_moment_though_the_job_may_still_fail() -> None:
    tails = HeldTails(elastic=True)
    assert tails.deadline is None
    tails.add(failed("a.0.1"), 1, now=5.0)
    assert tails.overdue(5.0 + HOLD_S - 0.01) == ([], 0)
    assert tails.deadline == 5.0 + HOLD_S
    assert tails.overdue(5.0 + HOLD_S) == ([("a.0.1", BOOM)], 0)
    assert tails.deadline is None
    assert tails.world_published(2) == []
    own, other = (Failure(worker, 0, "a", 7, 1, BOOM) for worker in ("a.0.1", "a.0.2"))
    assert tails.was_shown(own)
    assert not tails.was_shown(other), "of a later failure only an equal text was shown"


def test_equal_tracebacks_are_counted_now_and_then_and_a_new_one_is_shown() -> None:
    tails = HeldTails()
    tails.add(failed("a.0.1"), 1, now=0.0)
    assert tails.world_published(2) == [("a.0.1", BOOM)]
    for count in range(3):
        tails.add(failed(f"a.0.{count}"), 2, now=1.0)
    assert tails.overdue(1.0 + HOLD_S) == ([], 3)
    tails.add(failed("a.0.7"), 3, now=3.0)
    tails.add(failed("a.0.8", BOOM + "!"), 3, now=3.0)
    assert tails.overdue(3.0 + HOLD_S) == ([("a.0.8", BOOM + "!")], 0)
    assert tails.deadline == 1.0 + HOLD_S + REPEATS_S
    assert tails.overdue(1.0 + HOLD_S + REPEATS_S) == ([], 1)
    assert tails.deadline is None


def test_tracebacks_that_differ_in_an_address_only_are_equal() -> None:
    tails = HeldTails()
    for number in range(3):
        tails.add(failed(f"a.{number}.1", f"{BOOM} <object at {hex(0x7F00 + number)}>"), 1, now=0.0)
    assert len(tails.job_succeeded()) == 1


def test_after_many_different_tracebacks_further_ones_are_only_counted() -> None:
    tails = HeldTails()
    for number in range(MAX_HELD + 5):
        tails.add(failed("a.0.1", f"{BOOM} {number}"), 1, now=0.0)
        assert len(tails.world_published(2)) == (number < MAX_HELD)
    assert tails.overdue(HOLD_S) == ([], 5)


def test_a_traceback_is_found_behind_other_lines_and_so_is_a_syntax_error() -> None:
    assert traceback_in(f"warning\nepoch 3\n{BOOM}\n") == BOOM
    syntax = '  File "x.py", line 3\n    if True\n           ^\nSyntaxError: expected ":"'
    assert traceback_in(f"warning\n{syntax}\n") == syntax
    assert traceback_in("Killed\n") == ""


def test_the_ranks_that_torch_puts_before_each_line_make_no_difference() -> None:
    tails = HeldTails()
    for rank in range(3):
        prefixed = "\n".join(f"[rank{rank}]: {line}" for line in BOOM.split("\n"))
        tails.add(failed(f"a.{rank}.1", prefixed), 1, now=0.0)
    assert tails.world_published(2) == [("a.0.1", BOOM)]


def test_last_words_are_the_traceback_or_else_the_last_lines_bounded() -> None:
    assert last_words(f"noise\n{BOOM}\n")[0].startswith("Traceback")
    assert last_words("one\ntwo\n") == ["one", "two"]
    assert last_words("") == []
    long = "\n".join(f"line {n}" for n in range(1000))
    assert last_words(long)[-1] == "line 999"
    assert len(last_words(long)) == MAX_TAIL_LINES


def test_exits_are_described_by_code_and_signal() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "exit code -9 (SIGKILL)"
    assert describe_exit(-100) == "exit code -100 (signal 100)"


def test_a_failure_is_described_by_rank_host_worker_pid_and_exit() -> None:
    assert describe_failure(Failure("a.1.2", 3, "a", 4711, -11)) == (
        "rank 3 on host a (worker a.1.2, pid 4711): exit code -11 (SIGSEGV)"
    )
    assert "never started" in describe_failure(Failure("a.1.2", 3, "a", 0, 127))
