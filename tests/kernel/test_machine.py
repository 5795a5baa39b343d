"""Every decision knows the event that caused it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elastic_driver.job.decisions import Decision, SealRound
from elastic_driver.job.events import AgentLost, EventBatch, Tick, takes
from elastic_driver.job.job import DECLARATION
from elastic_driver.job.parts import TAKERS
from elastic_driver.kernel.machine import CausedDecision, kinds, stamped
from elastic_driver.words.wire_events import Event


def test_a_stamped_decision_names_the_event_that_caused_it() -> None:
    decided = [SealRound(1, "all members have left"), SealRound(2, "again")]
    assert [decision.cause for decision in stamped(decided, 7)] == [7, 7]
    assert [decision.cause for decision in decided] == [0, 0]


def test_every_kind_of_decision_has_a_reason_and_a_cause() -> None:
    for kind in kinds(Decision):
        assert issubclass(kind, CausedDecision)
        assert "reason" in kind.__struct_fields__


def test_every_kind_of_event_is_declared_and_taken_in() -> None:
    assert set(DECLARATION.event_types()) == set(kinds(Event))
    assert {kind for kind, _ in TAKERS} == set(kinds(Event)) - {EventBatch}


def test_an_event_that_no_part_takes_in_is_found_before_a_job_begins() -> None:
    script = (
        "from elastic_driver.words.wire_events import Event\n"
        "class Lonely(Event, frozen=True, tag='lonely'): pass\n"
        "import elastic_driver.job.parts\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "0 parts take in Lonely; it is for one" in run.stderr


def test_a_method_takes_in_only_what_its_annotation_names() -> None:
    def on_lost(event: AgentLost) -> None:
        raise AssertionError(event)

    on_lost.__annotations__["event"] = AgentLost
    with pytest.raises(TypeError, match="on_lost cannot take in Tick"):
        takes(Tick)(on_lost)
