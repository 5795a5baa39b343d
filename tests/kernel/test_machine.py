"""Every decision knows the event that caused it."""

from __future__ import annotations

from typing import get_args

from elastic_driver.job.decisions import Decision, SealRound
from elastic_driver.job.events import EventBatch, JobEvent
from elastic_driver.kernel.machine import CausedDecision, stamped
from tests.job.conversation import kinds


def test_a_stamped_decision_names_the_event_that_caused_it() -> None:
    decided = [SealRound(1, "all members have left"), SealRound(2, "again")]
    assert [decision.cause for decision in stamped(decided, 7)] == [7, 7]
    assert [decision.cause for decision in decided] == [0, 0]


def test_every_kind_of_decision_has_a_reason_and_a_cause() -> None:
    for kind in get_args(Decision):
        assert issubclass(kind, CausedDecision)
        assert "reason" in kind.__struct_fields__


def test_every_kind_of_event_is_in_the_union_whose_handlers_mypy_checks() -> None:
    assert set(kinds()) - {EventBatch} == set(get_args(JobEvent))
