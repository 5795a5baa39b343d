"""What the user sees: short lines, at the level asked for, never at the price of the job."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from elastic_driver.job.decisions import Announce
from elastic_driver.runtime.library_logs import logs_shown
from elastic_driver.runtime.reporter import MAX_EXITS_SHOWN, Level, Reporter
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import log_events as log
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.findings import Failure


def completed(round_id: int, size: int, hosts: int, reason: str) -> Announce:
    return Announce(log.RoundCompleted(size=size, hosts=hosts), reason, round=round_id)


def exited(code: int, *, expected: bool = False, worker: str = "a.0.1") -> Announce:
    what = worker_log.WorkerExited(exit_code=code, expected=expected)
    return Announce(what, f"exit code {code}", worker=worker)


def said(*events: Announce, level: Level = Level.NORMAL, as_json: bool = False) -> list[str]:
    stream = io.StringIO()
    reporter = Reporter(stream, level=level, as_json=as_json)
    for event in events:
        reporter.announced(event, b'{"event":"%b"}' % event.event.encode())
    return stream.getvalue().splitlines()


def test_a_complete_round_tells_its_size_and_why() -> None:
    event = completed(2, 2, 1, "worker localhost.1.1 killed by SIGKILL")
    assert said(event) == [
        "elasticrun: round 2 complete: 2 workers on 1 host (worker localhost.1.1 killed by SIGKILL)"
    ]
    assert said(completed(1, 1, 1, "")) == ["elasticrun: round 1 complete: 1 worker on 1 host"]


def test_a_failed_worker_is_shown_and_an_expected_end_only_when_verbose() -> None:
    assert said(exited(1)) == ["elasticrun: worker a.0.1 exited (exit code 1)"]
    assert said(exited(0)) == []
    assert said(exited(-15, expected=True)) == []
    assert len(said(exited(0), level=Level.VERBOSE)) == 1
    assert said(exited(1), level=Level.QUIET) == []


def test_a_thousand_failing_workers_are_a_few_lines_a_round() -> None:
    many = [exited(1, worker=f"a.{n}.1") for n in range(1000)]
    assert len(said(*many)) == MAX_EXITS_SHOWN
    assert len(said(*many, completed(2, 1, 1, ""), exited(1))) == MAX_EXITS_SHOWN + 2


def test_quiet_still_says_what_needs_somebody_s_attention() -> None:
    events = [
        completed(1, 1, 1, ""),
        Announce(host_log.HostBlacklisted(), "3 failures", host="a"),
        Announce(host_log.DiscoveryFailed(), "script exited with status 1"),
    ]
    assert [line.split(" (")[0] for line in said(*events, level=Level.QUIET)] == [
        "elasticrun: host a in cool-down",
        "elasticrun: discovery failed, the last known hosts stay",
    ]


def test_an_event_about_a_worker_that_is_not_known_names_its_host() -> None:
    event = Announce(host_log.ConnectionUnanswered(), "no answer from b", host="a")
    assert said(event, level=Level.QUIET) == [
        "elasticrun: worker of host a reaches a host not (no answer from b)"
    ]


def test_json_lines_are_those_of_the_event_log() -> None:
    lines = said(completed(1, 1, 1, ""), as_json=True)
    assert [json.loads(line) for line in lines] == [{"event": "round_completed"}]


def test_a_failed_job_ends_with_last_words_who_and_why() -> None:
    stream = io.StringIO()
    failure = Failure("a.1.1", 1, "a", 4711, 1, "Traceback (most recent call last):\nE: boom\n")
    Reporter(stream).job_ended("all workers failed", failure, 1)
    assert stream.getvalue().splitlines() == [
        "elasticrun: last words of rank 1 (a.1.1):",
        "Traceback (most recent call last):",
        "E: boom",
        "elasticrun: first failure: rank 1 on host a (worker a.1.1, pid 4711): exit code 1",
        "elasticrun: job failed: all workers failed",
    ]


def test_a_script_that_ends_with_the_status_of_a_stop_has_failed() -> None:
    stream = io.StringIO()
    Reporter(stream).job_ended("rank 1 on a exited 130", Failure("a.1.1", 1, "a", 4, 130), 130)
    assert stream.getvalue().splitlines()[-1] == "elasticrun: job failed: rank 1 on a exited 130"
    Reporter(stream).job_ended("interrupted by Ctrl-C", None, 130)
    assert stream.getvalue().splitlines()[-1] == "elasticrun: job stopped: interrupted by Ctrl-C"


def test_a_failed_job_ends_with_one_json_line_in_json() -> None:
    stream = io.StringIO()
    failure = Failure("a.1.1", 1, "a", 4711, 1, "E: boom\n")
    Reporter(stream, as_json=True).job_ended("all failed", failure, 1)
    (line,) = stream.getvalue().splitlines()
    ended = json.loads(line)
    assert ended["event"] == "job_ended"
    assert ended["first_failure"]["pid"] == 4711


def test_a_success_says_nothing_unless_verbose() -> None:
    stream = io.StringIO()
    Reporter(stream).job_ended("done", None, 0)
    assert stream.getvalue() == ""


def test_a_worker_s_words_cannot_control_the_terminal() -> None:
    stream = io.StringIO()
    Reporter(stream).worker_raised("a.0.1", "\x1b[2JTraceback\r\x07")
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


DIFFER = Announce(log.StateDiffers(step=120), "lr is 1 on rank 0 and 2 on rank 1")
SAID = "elasticrun: the ranks hold different states after step 120 (lr is 1 on rank 0 and 2 on "
SAID += "rank 1)"


def test_that_training_goes_wrong_is_said_even_when_quiet() -> None:
    assert said(DIFFER, level=Level.QUIET) == [SAID]


def test_that_training_goes_wrong_is_red_on_a_terminal_and_nothing_else_is() -> None:
    for colors, as_json in ((True, False), (False, False), (True, True)):
        stream = io.StringIO()
        reporter = Reporter(stream, colors=colors, as_json=as_json)
        reporter.announced(DIFFER, b'{"a":1}')
        reporter.announced(completed(1, 1, 1, "\x1b[2J"), b"{}")
        first, second = stream.getvalue().splitlines()
        red = f"\x1b[31m{SAID}\x1b[0m" if colors else SAID
        assert first == ('{"a":1}' if as_json else red)
        assert "\x1b" not in second


# ---- streams that are no help ------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    reading, writing = os.pipe()
    with open(writing, "w", encoding="utf-8") as stream:
        yield reading, stream
    os.close(reading)


def test_a_pipe_nobody_reads_costs_a_moment_once_and_the_loss_is_told_later(
    pipe: tuple[int, TextIO],
) -> None:
    reading, stream = pipe
    reporter = Reporter(stream)
    began = time.monotonic()
    for number in range(10_000):
        reporter.note(f"line {number} " + "x" * 60)
    assert time.monotonic() - began < 5.0
    with open(reading, closefd=False) as lines:
        assert lines.readline().startswith("elasticrun: line 0 ")
        for line in lines:  # until there is room for another one
            reporter.note("back again")
            if "lines were dropped" in line:
                break
        assert next(lines) == "elasticrun: back again\n"
    reporter.close()


def test_a_reader_that_has_gone_is_no_error(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, reading)  # the pipe's last reader is gone
    os.close(null)
    Reporter(stream).note("anybody?")


def test_what_the_rendezvous_complains_of_is_said_like_everything_else() -> None:
    stream = io.StringIO()
    log = logging.getLogger("rendezvous.service")
    with logs_shown(Reporter(stream).logged):
        log.warning("stood still for %.1fs", 1.5)
        log.info("nothing of interest")
    assert stream.getvalue() == "elasticrun: stood still for 1.5s\n"
    assert logging.getLogger("rendezvous").handlers == []


def test_a_closed_stream_is_no_error() -> None:
    stream = io.StringIO()
    reporter = Reporter(stream)
    stream.close()
    reporter.note("anybody?")


def test_lines_of_several_threads_never_mix(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    reporter = Reporter(stream)
    text = "y" * 50
    threads = [
        threading.Thread(target=lambda: [reporter.note(text) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = os.read(reading, 1 << 20).decode().splitlines()
    assert lines == [f"elasticrun: {text}"] * 200


def test_a_json_line_is_one_object_with_its_time_whatever_is_in_it() -> None:
    stream, strange = io.StringIO(), "a\x85b\x1b[31m\x7f\U000e0001é\n"
    reporter = Reporter(stream, as_json=True)
    reporter.note(strange)
    reporter.bug(f"Traceback …\n{strange}")
    notes = [json.loads(line) for line in stream.getvalue().split("\n")[:-1]]
    assert [note["event"] for note in notes] == ["note", "bug", "note"]
    assert notes[0]["text"] == strange
    assert all(note["t"] > 1.7e9 for note in notes)


def test_a_plain_round_is_told_when_its_workers_run_and_not_again() -> None:
    run = Announce(log.ProcessesStarted(size=2, hosts=1), "every process was started", round=1)
    completed = log.RoundCompleted(size=2, hosts=1, told=True)
    told = Announce(completed, "every process was started", round=1)
    assert said(run, told) == [
        "elasticrun: round 1: 2 workers on 1 host (every process was started)"
    ]
