"""Every event of the log has a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import elastic_driver
from elastic_driver.runtime.event_words import WORDS, sentence

# The name of an event where one is announced or logged, or in a choice of two.
_NAME = re.compile(
    r'(?:announce|append|Announce|_about_rank)\(\s*"([a-z_]+)"|(?:name|event) = "([a-z_]+)"'
)
_CHOICE = re.compile(r'(?:announce\(|(?:name|event) = )"([a-z_]+)" if .* else "([a-z_]+)"')
FACTS = {"host": "b", "worker": "b.0.1", "rank": 1, "round": 2, "size": 3, "hosts": 1, "step": 120}


def announced() -> set[str]:
    """The names of all events that the source announces."""
    found: set[str] = set()
    for file in Path(elastic_driver.__file__).parent.rglob("*.py"):
        text = file.read_text()
        if "nnounce" in text or "log.append" in text:
            for pattern in (_NAME, _CHOICE):
                found.update(name for names in pattern.findall(text) for name in names if name)
    return {name for name in found if "_" in name}


def test_every_event_that_is_announced_has_a_sentence() -> None:
    names = announced()
    assert len(names) > 50
    assert {"worker_hung", "spare_promoted", "job_failed", "rank_slow", "worker_result"} <= names
    assert not names - set(WORDS)
    assert not set(WORDS) - names


def test_a_sentence_names_whom_it_is_about_and_why() -> None:
    for name in WORDS:
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
