"""Last words: shown once, when it is clear what they mean."""

from __future__ import annotations

from elastic_driver.core.documents import Failure
from elastic_driver.core.events import WorkerExited
from elastic_driver.runtime.failures import (
    MAX_HELD,
    MAX_TAIL_LINES,
    HeldTails,
    describe_exit,
    describe_failure,
    last_words,
    traceback_in,
)

BOOM = "Traceback (most recent call last):\n  File 'x'\nValueError: boom"


def failed(worker: str, tail: str = BOOM, *, code: int = 1, victim: bool = False) -> WorkerExited:
    return WorkerExited(worker, code, tail, victim)


def test_nothing_is_shown_while_the_round_it_failed_in_is_the_newest() -> None:
    tails = HeldTails()
    tails.add(failed("a.0.1"), round_id=1)
    assert tails.world_published(1) == []
    assert tails.world_published(2) == [("a.0.1", BOOM)]
    assert tails.world_published(3) == []


def test_the_same_traceback_of_many_workers_is_shown_once_ever() -> None:
    tails = HeldTails()
    for slot in range(5):
        tails.add(failed(f"a.{slot}.1"), round_id=1)
    assert tails.world_published(2) == [("a.0.1", BOOM)]
    tails.add(failed("a.0.2"), round_id=2)
    assert tails.world_published(3) == []


def test_different_tracebacks_are_all_shown() -> None:
    tails = HeldTails()
    tails.add(failed("a.0.1"), 1)
    tails.add(failed("a.1.1", BOOM + "!"), 1)
    assert [worker for worker, _ in tails.world_published(2)] == ["a.0.1", "a.1.1"]


def test_before_the_first_step_of_an_elastic_job_a_later_round_proves_nothing() -> None:
    tails = HeldTails(elastic=True)
    tails.add(failed("a.0.1"), 1)
    assert tails.world_published(2) == []
    assert tails.step_finished(1) == []  # a step of the round it failed in
    assert tails.step_finished(2) == [("a.0.1", BOOM)]


def test_a_job_that_succeeded_shows_what_it_survived() -> None:
    tails = HeldTails(elastic=True)
    tails.add(failed("a.0.1"), 1)
    assert tails.job_succeeded() == [("a.0.1", BOOM)]


def test_victims_and_successes_and_silent_deaths_have_nothing_to_tell() -> None:
    tails = HeldTails()
    tails.add(failed("a.0.1", victim=True), 1)
    tails.add(failed("a.1.1", code=0), 1)
    tails.add(failed("a.2.1", "just some lines\nkilled", code=-9), 1)
    assert tails.world_published(2) == []


def test_what_is_held_is_bounded() -> None:
    tails = HeldTails()
    for number in range(3 * MAX_HELD):
        tails.add(failed("a.0.1", f"{BOOM} {number}"), 1)
    assert len(tails.world_published(2)) == MAX_HELD


def test_a_traceback_is_found_behind_other_lines_and_so_is_a_syntax_error() -> None:
    assert traceback_in(f"warning\nepoch 3\n{BOOM}\n") == BOOM
    syntax = '  File "x.py", line 3\n    if True\n           ^\nSyntaxError: expected ":"'
    assert traceback_in(f"warning\n{syntax}\n") == syntax
    assert traceback_in("Killed\n") == ""


def test_the_ranks_that_torch_puts_before_each_line_make_no_difference() -> None:
    tails = HeldTails()
    for rank in range(3):
        prefixed = "\n".join(f"[rank{rank}]: {line}" for line in BOOM.split("\n"))
        tails.add(failed(f"a.{rank}.1", prefixed), 1)
    assert tails.world_published(2) == [("a.0.1", BOOM)]


def test_last_words_are_the_traceback_or_else_the_last_lines_bounded() -> None:
    def failure(tail: str) -> Failure:
        return Failure("a.0.1", 0, "a", 7, 1, tail)

    assert last_words(failure(f"noise\n{BOOM}\n"))[0].startswith("Traceback")
    assert last_words(failure("one\ntwo\n")) == ["one", "two"]
    assert last_words(failure("")) == []
    long = "\n".join(f"line {n}" for n in range(1000))
    assert last_words(failure(long))[-1] == "line 999"
    assert len(last_words(failure(long))) == MAX_TAIL_LINES


def test_exits_are_described_by_code_and_signal() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "exit code -9 (SIGKILL)"
    assert describe_exit(-100) == "exit code -100 (signal 100)"


def test_a_failure_is_described_by_rank_host_worker_pid_and_exit() -> None:
    assert describe_failure(Failure("a.1.2", 3, "a", 4711, -11)) == (
        "rank 3 on host a (worker a.1.2, pid 4711): exit code -11 (SIGSEGV)"
    )
    assert "never started" in describe_failure(Failure("a.1.2", 3, "a", 0, 127))
