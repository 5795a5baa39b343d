"""The spans of a job: each round has one, from what made it necessary to its first step."""

from __future__ import annotations

from typing import Any

from elastic_driver.features.telemetry.spans import MOST_EVENTS, RoundSpans, Span
from elastic_driver.words.log_lines import line_of


class Log:
    """A log written by hand, and the spans that are over."""

    def __init__(self) -> None:
        self.spans = RoundSpans("run", 0.5)
        self.over: list[Span] = []

    def say(self, t: float, event: str, worker: str | None = None, **facts: Any) -> None:
        line = line_of(event, t, {"worker": worker, **facts})
        assert line is not None
        self.over += self.spans.feed(line)

    def forms(self, t: float, number: int, *workers: str) -> None:
        """A round is opened, its members are ready after a second each, and it is complete."""
        self.say(t, "round_opened", round=number)
        for n, worker in enumerate(workers):
            self.say(t + 1 + n, "worker_ready", worker, round=number)
        self.say(t + len(workers), "round_completed", round=number, size=len(workers))


def names(span: Span) -> list[str]:
    return [event.name for event in span.events]


def test_a_round_begins_with_its_opening_and_ends_with_its_first_step() -> None:
    log = Log()
    log.forms(1.0, 1, "a.0.1", "a.1.1")
    assert log.over == []
    log.say(4.0, "state_synced", "a.0.1", round=1, first_step=1)
    (span,) = log.over
    assert (span.name, span.t, span.end, span.failed) == ("round", 1.0, 4.0, False)
    ready = ["worker_ready", "worker_ready"]
    assert names(span) == ["round_opened", *ready, "round_completed", "state_synced"]
    facts = {"round": 1, "size": 2, "losses": 0, "ready": 2, "first_step": 1}
    assert span.attributes == {f"elastic.{name}": value for name, value in facts.items()}
    assert span.events[1].attributes == {"elastic.worker": "a.0.1"}


def test_a_loss_counts_once_where_the_others_go_on_before_the_process_has_ended() -> None:
    log = Log()
    log.forms(1.0, 1, "a.0.1", "a.1.1")
    log.say(9.0, "worker_left", "a.1.1", reason="its script is over")
    log.forms(9.1, 2, "a.0.1")
    log.say(11.0, "worker_exited", "a.1.1", exit_code=1, reason="exit code 1, by itself")
    log.forms(12.0, 3, "a.0.1", "a.1.2")
    log.say(15.0, "job_succeeded", exit_code=0)
    losses = [s.attributes["elastic.losses"] for s in log.over if s.name == "round"]
    assert losses == [0, 1, 0]


def test_a_worker_whose_process_fails_after_its_script_was_over_is_lost_then() -> None:
    log = Log()
    log.forms(1.0, 1, "a.0.1", "a.1.1")
    log.say(9.0, "worker_left", "a.1.1", failed=False)
    log.forms(9.1, 2, "a.0.1")
    log.say(11.0, "worker_exited", "a.1.1", exit_code=1)
    log.forms(12.0, 3, "a.0.1", "a.1.2")
    log.say(15.0, "job_succeeded", exit_code=0)
    losses = [s.attributes["elastic.losses"] for s in log.over if s.name == "round"]
    assert losses == [0, 0, 1]


def test_a_recovery_begins_with_the_loss() -> None:
    log = Log()
    log.forms(1.0, 1, "a.0.1", "a.1.1")
    log.say(4.0, "state_synced", round=1, first_step=1)
    log.say(9.0, "worker_exited", "a.1.1", exit_code=-9, reason="killed")
    log.say(9.2, "worker_ready", "a.0.1", round=1)
    log.say(9.3, "round_opened", round=2)
    log.say(9.4, "round_completed", round=2, size=1, reason="without a.1.1")
    log.say(9.5, "state_synced", round=2, first_step=40)
    span = log.over[1]
    assert (span.t, span.end) == (9.0, 9.5)
    assert (span.attributes["elastic.losses"], span.attributes["elastic.round"]) == (1, 2)
    assert span.attributes["elastic.reason"] == "without a.1.1"
    first = span.events[0]
    about = {"elastic.worker": "a.1.1", "elastic.reason": "killed"}
    assert (first.name, first.attributes) == ("worker_exited", about)


def test_a_round_that_breaks_before_its_first_step_ends_when_it_was_complete() -> None:
    log = Log()
    log.forms(1.0, 1, "a.0.1", "a.1.1")
    log.say(4.0, "worker_lost", "a.1.1")
    log.say(5.0, "state_synced", round=7)  # of another round
    assert log.over == []
    log.say(5.0, "round_opened", round=2)
    log.say(6.0, "round_completed", round=2, size=1)
    log.say(7.0, "state_synced", round=2)
    assert [(span.t, span.end) for span in log.over] == [(1.0, 3.0), (4.0, 7.0)]


def test_the_rounds_of_a_plain_script_end_when_they_are_complete() -> None:
    log = Log()
    log.say(1.0, "round_opened", round=1)
    log.say(2.0, "round_completed", round=1, size=2)
    assert [(span.t, span.end) for span in log.over] == [(1.0, 2.0)]


def test_the_span_of_the_job_says_how_it_ended() -> None:
    log = Log()
    log.forms(1.0, 1, "a.0.1")
    log.say(3.0, "worker_exited", "a.0.1", exit_code=0)
    log.say(3.5, "job_failed", exit_code=7, reason="too many failures")
    about = {"run_id": "run", "reason": "too many failures", "exit_code": 7}
    named = {f"elastic.{name}": value for name, value in about.items()}
    assert [span.name for span in log.over] == ["round", "job"]
    assert log.over[1] == Span("job", 0.5, 3.5, named, failed=True)


def test_a_round_of_many_workers_counts_those_that_it_does_not_show() -> None:
    log = Log()
    log.forms(1.0, 1, *(f"a.{n}.1" for n in range(1000)))
    log.say(2000.0, "state_synced", round=1)
    (span,) = log.over
    assert span.attributes["elastic.ready"] == 1000
    assert MOST_EVENTS <= len(span.events) <= MOST_EVENTS + 2
    assert names(span)[-2:] == ["round_completed", "state_synced"]


def test_a_driver_that_goes_on_in_the_middle_of_a_round_shows_what_it_has_seen() -> None:
    log = Log()
    log.say(5.0, "round_completed", round=4, size=2)
    log.say(6.0, "round_opened", round=5)
    assert [(span.t, span.end) for span in log.over] == [(5.0, 5.0)]
