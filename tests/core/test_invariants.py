"""The invariants see what is broken."""

from __future__ import annotations

from elastic_driver.core.job import Job
from elastic_driver.core.rules.fleet import AgentNews
from elastic_driver.core.rules.rounds import RoundState
from elastic_driver.core.rules.workers import WorkerState
from elastic_driver.settings import Settings
from tests.core.scenario import Scenario


def broken(s: Scenario, expected: str) -> None:
    found = s.job.check()
    assert any(expected in sentence for sentence in found), found


def training() -> Scenario:
    return Scenario(start_np=3, max_np=3, reset_limit=5).training(a=2, b=1)


def test_a_job_in_order_violates_nothing() -> None:
    assert training().job.check() == []
    assert Job(Settings()).check() == []


def test_a_worker_filed_wrongly_is_named() -> None:
    s = training()
    s.job.workers.workers["a.0.1"].state = WorkerState.READY
    broken(s, "a.0.1 is filed under running but is ready")


def test_two_processes_in_a_slot_are_named() -> None:
    s = training()
    s.job.workers.workers["a.1.1"].slot = 0
    broken(s, "2 processes share slot 0 of a")


def test_a_worker_without_an_agent_is_named() -> None:
    s = training()
    s.job.fleet.apply(s.job.fleet.agents["b"], AgentNews.LOST)
    broken(s, "b.0.1 has a process but its host has no agent")


def test_somebody_who_trains_in_no_round_is_named() -> None:
    s = training()
    s.job.rounds.current.members = ("a.0.1", "a.1.1")
    broken(s, "['b.0.1'] are running but are no members of round 1")
    s.job.rounds.current.state = RoundState.FORMING
    broken(s, "round 1 is forming but")


def test_ranks_that_repeat_are_named() -> None:
    s = training()
    workers = s.job.workers.workers
    workers["a.1.1"].place = workers["a.0.1"].place
    broken(s, "two members of round 1 have the same rank")


def test_a_waiting_round_without_a_deadline_is_named() -> None:
    s = training()
    s.job.rounds.current.state = RoundState.CLOSING
    broken(s, "round 1 is closing without a deadline")


def test_too_many_rounds_are_named() -> None:
    s = training()
    s.job.rounds.current.number = 9
    broken(s, "round 9 exceeds the reset limit of 5")
