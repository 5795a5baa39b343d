"""The invariants see what is broken, and no news, however absurd, breaks them."""

from __future__ import annotations

from random import Random

import pytest

from elastic_driver.core import events as ev
from elastic_driver.core.invariants import check
from elastic_driver.core.job import Job
from elastic_driver.core.registry import WorkerState
from elastic_driver.core.rounds import RoundState
from elastic_driver.settings import Settings
from tests.core.scenario import Scenario


def broken(s: Scenario, expected: str) -> None:
    found = check(s.job)
    assert any(expected in sentence for sentence in found), found


def training() -> Scenario:
    return Scenario(start_np=3, max_np=3, reset_limit=5).training(a=2, b=1)


def test_a_job_in_order_violates_nothing() -> None:
    assert check(training().job) == []
    assert check(Job(Settings())) == []


def test_a_worker_filed_wrongly_is_named() -> None:
    s = training()
    s.job.state.registry.workers["a.0.1"].state = WorkerState.READY
    broken(s, "a.0.1 is filed under running but is ready")


def test_two_processes_in_a_slot_are_named() -> None:
    s = training()
    s.job.state.registry.workers["a.1.1"].slot = 0
    broken(s, "2 processes share slot 0 of a")


def test_a_worker_without_an_agent_is_named() -> None:
    s = training()
    s.job.state.fleet.drop("b")
    broken(s, "b.0.1 has a process but its host has no agent")


def test_somebody_who_trains_in_no_round_is_named() -> None:
    s = training()
    s.job.state.round.members = ("a.0.1", "a.1.1")
    broken(s, "['b.0.1'] are running but are no members of round 1")
    s.job.state.round.state = RoundState.FORMING
    broken(s, "round 1 is forming but")


def test_ranks_that_repeat_are_named() -> None:
    s = training()
    workers = s.job.state.registry.workers
    workers["a.1.1"].place = workers["a.0.1"].place
    broken(s, "two members of round 1 have the same rank")


def test_a_waiting_round_without_a_deadline_is_named() -> None:
    s = training()
    s.job.state.round.state = RoundState.CLOSING
    broken(s, "round 1 is closing without a deadline")


def test_too_many_rounds_are_named() -> None:
    s = training()
    s.job.state.round.number = 9
    broken(s, "round 9 exceeds the reset limit of 5")


WORKERS = [f"{host}.{slot}.{n}" for host in "ab" for slot in range(3) for n in range(1, 6)]


def absurd(random: Random) -> ev.Event:
    """Any event of the vocabulary, about anybody, whether it makes sense or not."""
    worker, host, number = random.choice(WORKERS), random.choice("ab"), random.randint(1, 5)
    makers: list[ev.Event] = [
        ev.HostsDiscovered(tuple((h, random.randint(0, 3)) for h in random.sample("abc", 2))),
        ev.AgentReady(host, number, 1, "x", ()),
        ev.AgentReady(host, 1, 1, "x", (5000,)),
        ev.AgentLost(host, number, "absurd"),
        ev.WorkerStarted(worker, number),
        ev.WorkerReady(worker, number - 1, number - 2, random.random() < 0.5, "absurd"),
        ev.WorkerReady(worker, 0, -1, True, "absurd"),
        ev.WorkerStepped(worker, number, number),
        ev.WorkerExited(worker, random.choice([0, 1, -9]), "", random.random() < 0.2),
        ev.WorkerLost(worker, "absurd"),
        ev.RankSlow(worker, number, 2.0),
        ev.RankRecovered(worker, number),
        ev.ScaleRequested(random.randint(-1, 9)),
        ev.DiscoveryFailed("absurd"),
        ev.Tick(),
    ]
    return random.choice(makers)


@pytest.mark.parametrize("seed", range(20))
def test_no_news_breaks_an_invariant_or_raises(seed: int) -> None:
    random = Random(seed)
    job = Job(
        Settings(
            start_np=random.randint(1, 3),
            max_np=random.choice([None, 3]),
            fruitless_restarts=99,
            blacklist_cooldown=(1, 5),
            replace_slow=True,
            slow_for=0.0,
        )
    )
    now = 0.0
    for _ in range(100):
        now += random.choice([0.0, 0.01, 1.0, 20.0])
        event = absurd(random)
        job.handle(event, now)
        assert check(job) == [], (seed, event)
        job.snapshot(now)
