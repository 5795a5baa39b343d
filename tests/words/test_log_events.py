"""Every event of the log has a class; somebody writes it, and it has a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import elastic_driver
from elastic_driver.kernel.log import Level, LogEvent
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.log_lines import KINDS, line_of, read_line, sentence

_WRITTEN = re.compile(r"\b(?:worker_|host_)?log\.([A-Z]\w+)")
FACTS = {"host": "b", "worker": "b.0.1", "rank": 1, "round": 2, "size": 3, "hosts": 1, "step": 120}


def test_every_class_is_written_and_has_the_name_of_its_event() -> None:
    package = Path(elastic_driver.__file__).parent
    files = [f for f in package.rglob("*.py") if f.parent != package / "words"]
    sources = [file.read_text() for file in files]
    written = {name for text in sources for name in _WRITTEN.findall(text)}
    written |= {"JobSucceeded", "JobFailed"}  # `job_end` chooses
    for name, kind in KINDS.items():
        assert kind.__name__ == "".join(part.capitalize() for part in name.split("_"))
        assert kind.__name__ in written
    assert len(KINDS) > 70


@pytest.mark.parametrize(
    ("event", "is_loss"),
    [
        (worker_log.WorkerExited(exit_code=1), True),
        (worker_log.WorkerExited(exit_code=-9, expected=True), False),
        (worker_log.WorkerExited(exit_code=0), False),
        (worker_log.WorkerExited(exit_code=0, lost=True), True),
        (worker_log.WorkerLost(), True),
        (worker_log.WorkerHung(), True),
        (worker_log.WorkerLeft(failed=True), True),
        (worker_log.WorkerLeft(failed=False), False),
        (worker_log.WorkerStarted(), False),
    ],
)
def test_a_loss_is_an_end_that_was_not_intended(event: LogEvent, is_loss: bool) -> None:
    assert event.is_loss is is_loss
    line = line_of(event.name, 1.0, event.facts())
    assert line is not None
    assert line.is_loss is is_loss


def test_a_failure_is_shown_by_default_and_another_end_only_when_verbose() -> None:
    assert worker_log.WorkerExited(exit_code=1).level is Level.NORMAL
    assert worker_log.WorkerExited(exit_code=1, expected=True).level is Level.VERBOSE


def test_a_line_of_a_newer_driver_is_read_without_its_class() -> None:
    line = read_line(b'{"t": 2.0, "event": "something_new", "host": "a", "size": "large"}')
    assert line is not None
    assert (line.t, line.event, line.host, line.what) == (2.0, "something_new", "a", None)
    assert not line.is_loss
    assert sentence("something_new", "because", {}) == "something new: because"


def test_a_sentence_names_whom_it_is_about_and_why() -> None:
    for name in KINDS:
        said = sentence(name, "because", FACTS)
        assert said.endswith(": because")
        assert "{" not in said
        assert "?" not in said
        assert sentence(name, "", {}).strip(), "no fact is needed"
    assert sentence("worker_lost", "its host", FACTS) == "worker b.0.1 (rank 1) lost: its host"
    assert sentence("round_completed", "", FACTS) == "round 2 complete: 3 workers on 1 host"
    assert sentence("spare_ready", "", {"worker": "b.2.1", "rank": -1}) == "spare b.2.1 is ready"


def test_a_job_that_was_told_to_stop_has_not_failed() -> None:
    told = {"exit_code": 143, "first_failure": None}
    assert sentence("job_failed", "Ctrl-C", told) == "the job was stopped: Ctrl-C"
    own = {"exit_code": 143, "first_failure": {"rank": 0}}
    assert sentence("job_failed", "rank 0", own) == "the job has failed: rank 0"


@pytest.mark.parametrize(
    ("facts", "who"),
    [
        ({"host": "b"}, "worker of host b"),
        ({"host": "b", "worker": None}, "worker of host b"),
        ({"host": "b", "worker": "b.0.1"}, "worker b.0.1"),
    ],
)
def test_a_sentence_about_a_worker_that_is_not_known_names_its_host(
    facts: dict[str, str | None], who: str
) -> None:
    told = sentence("connection_unanswered", "b gets no answer from c", facts)
    assert told == f"{who} reaches a host not: b gets no answer from c"
