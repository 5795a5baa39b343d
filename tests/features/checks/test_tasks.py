"""When the processes of a node check's round begin to measure."""

from __future__ import annotations

import pytest

from elastic_driver.features.checks.tasks import PATIENCE_S, StartingGate


def test_it_opens_when_everybody_is_up_or_gone() -> None:
    gate = StartingGate("abcd")
    for worker in "abc":
        gate.passed(worker, 1.0)
        assert not gate.is_open(1.0)
    gate.passed("d", 2.0)
    assert gate.is_open(2.0)


def test_more_than_half_wait_for_the_others_and_not_for_ever() -> None:
    gate = StartingGate("abcd")
    gate.passed("a", 1.0)
    gate.passed("b", 2.0)
    assert gate.opens_at is None, "half of them: who is late may be the rule"
    gate.passed("c", 3.0)
    assert gate.opens_at == 3.0 + PATIENCE_S
    assert not gate.is_open(3.0 + PATIENCE_S - 0.1)
    assert gate.is_open(3.0 + PATIENCE_S)


@pytest.mark.parametrize("again", ["a", "x"])
def test_news_that_is_none_changes_nothing(again: str) -> None:
    gate = StartingGate("abc")
    gate.passed("a", 1.0)
    gate.passed(again, 1.0)
    assert gate.opens_at is None


def test_a_round_of_nobody_is_open() -> None:
    assert StartingGate(()).is_open(0.0)
