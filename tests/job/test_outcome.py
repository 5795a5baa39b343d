"""Verdicts over failures, and the budget of restarts."""

from __future__ import annotations

import pytest

from elastic_driver.job.outcome import (
    Budget,
    Cause,
    Loss,
    ScriptKind,
    exit_status,
    failed_by_itself,
    first_failure,
)
from elastic_driver.settings import Settings
from elastic_driver.words.findings import Failure


def loss(cause: Cause, code: int = 1, *, member: bool = True) -> Loss:
    return Loss(Failure("a.0.1", 0, "a", 7, code), cause, "exited", member)


@pytest.mark.parametrize(
    ("code", "victim", "cause"),
    [(1, False, Cause.OWN), (-9, False, Cause.SIGNAL), (1, True, Cause.VICTIM)],
)
def test_an_exit_tells_its_cause(code: int, victim: bool, cause: Cause) -> None:
    assert Cause.of(code, victim=victim) is cause


@pytest.mark.parametrize(("code", "status"), [(3, 3), (-9, 137), (-15, 143), (0, 1)])
def test_the_jobs_status_is_the_workers_own(code: int, status: int) -> None:
    assert exit_status(loss(Cause.OWN, code).failure) == status


def test_without_a_failure_the_status_is_1() -> None:
    assert exit_status(None) == 1


def test_the_first_failure_is_no_victim_unless_there_are_only_victims() -> None:
    victim, culprit = loss(Cause.VICTIM, 1), loss(Cause.SIGNAL, -9)
    assert first_failure([victim, culprit]) is culprit.failure
    assert first_failure([victim]) is victim.failure
    assert first_failure([]) is None


@pytest.mark.parametrize(
    ("causes", "kind", "fruitful", "failed"),
    [
        ([Cause.OWN, Cause.OWN], ScriptKind.PLAIN, False, True),
        ([Cause.OWN, Cause.VICTIM], ScriptKind.PLAIN, False, False),
        ([Cause.SIGNAL], ScriptKind.PLAIN, False, False),
        ([Cause.OWN, Cause.SIGNAL], ScriptKind.ELASTIC, True, False),
        ([Cause.OWN, Cause.OWN], ScriptKind.ELASTIC, True, True),
        ([Cause.SIGNAL, Cause.SIGNAL], ScriptKind.ELASTIC, False, True),
        ([Cause.AGENT, Cause.AGENT], ScriptKind.ELASTIC, False, False),
        ([Cause.AGENT, Cause.OWN], ScriptKind.ELASTIC, False, True),
    ],
)
def test_losing_everybody_is_judged_by_how(
    causes: list[Cause], kind: ScriptKind, fruitful: bool, failed: bool
) -> None:
    losses = [loss(cause) for cause in causes]
    assert failed_by_itself(losses, kind=kind, has_progress=fruitful) is failed


def test_newcomers_do_not_count_in_the_verdict() -> None:
    losses = [loss(Cause.SIGNAL), loss(Cause.OWN, member=False)]
    assert not failed_by_itself(losses, kind=ScriptKind.ELASTIC, has_progress=True)
    assert not failed_by_itself(losses[1:], kind=ScriptKind.ELASTIC, has_progress=True)


def test_workers_that_die_together_are_one_fruitless_failure() -> None:
    budget = Budget(Settings(settle=1.0))
    for _ in range(8):
        budget.count(0.5, fruitless=True)
    assert (budget.failures, budget.fruitless) == (8, 1)
    budget.count(1.5, fruitless=True)
    assert budget.fruitless == 2


def test_a_finished_step_ends_the_row() -> None:
    budget = Budget(Settings(fruitless_restarts=1))
    budget.count(0.0, fruitless=True)
    budget.record_step()
    budget.count(5.0, fruitless=True)
    assert budget.exceeded() is None
    budget.count(10.0, fruitless=True)
    assert budget.exceeded() is not None


def test_a_given_limit_counts_all_and_only_failures() -> None:
    budget = Budget(Settings(max_restarts=2, fruitless_restarts=0))
    budget.count(0.0, fruitless=False)
    budget.count(0.0, fruitless=True)
    assert budget.exceeded() is None
    budget.count(0.0, fruitless=False)
    assert (
        budget.exceeded()
        == "3 failures are more than the limit of 2 restarts; raise --max-restarts"
    )
