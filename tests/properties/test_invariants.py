"""No news, however absurd, breaks an invariant of the job."""

from __future__ import annotations

from random import Random

import pytest

from elastic_driver.core import events as ev
from elastic_driver.core.invariants import check
from elastic_driver.core.job import Job
from elastic_driver.settings import Settings

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
