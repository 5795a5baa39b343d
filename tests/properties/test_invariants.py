"""No news, however absurd, breaks an invariant of the job."""

from __future__ import annotations

from random import Random

import pytest

from elastic_driver.job import events as seen
from elastic_driver.job.events import EventBatch
from elastic_driver.job.job import Job
from elastic_driver.kernel.machine import kinds
from elastic_driver.settings import Settings
from elastic_driver.words import wire_events as ev

WORKERS = [f"{host}.{slot}.{n}" for host in "ab" for slot in range(3) for n in range(1, 6)]
WHY = "absurd"


def usual(random: Random) -> list[ev.Event]:
    """What brings a job forward, about anybody, whether it makes sense or not."""
    worker, host, number = random.choice(WORKERS), random.choice("ab"), random.randint(1, 5)
    return [
        seen.HostsDiscovered(tuple((h, random.randint(0, 3)) for h in random.sample("abc", 2))),
        ev.AgentReady(host, number, 1, "10.0.0.1", ()),
        ev.AgentReady(host, 1, 1, "x", (5000,)),
        ev.AgentReady(host, 1, 1, "y", (), probe_port=7000),
        seen.AgentLost(host, number, WHY),
        seen.AgentLost(host, number, WHY, refused=True),
        seen.AgentSuspected(host, 1, random.choice(["silent", "disconnected", "backend"]), WHY),
        seen.AgentHeard(host, 1),
        seen.AgentProbed(host, 1, number, random.choice(["answered", "refused", "silent"]), 0.1),
        ev.WorkerStarted(worker, number),
        ev.WorkerReady(worker, number - 1, number - 2, random.random() < 0.5, WHY),
        ev.WorkerReady(worker, 0, -1, True, WHY),
        ev.WorkerReady(worker, number - 1, number, True, "Read error [10.0.0.1]:1: reset"),
        ev.WorkerStepped(worker, number, number),
        ev.WorkerExited(worker, random.choice([0, 1, -9]), "", random.random() < 0.2),
        seen.LeaseExpired(random.choice(["agent", "worker"]), worker, 30.0),
        seen.ProgressReported(number, (seen.ProgressReading(number, 0.1, answered=True),)),
        seen.RankSlow(worker, number, 2.0),
        seen.RankRecovered(worker, number),
        seen.StatesEqual(number, number),
        ev.ScaleRequested(random.choice([None, random.randint(-1, 9)])),
        seen.SizeProposed(random.randint(-1, 9), WHY),
        ev.PlanApplied(
            number=random.randint(1, 9),
            workers=random.choice([None, random.randint(-1, 9)]),
            slots_per_host=random.choice([None, random.randint(-1, 3)]),
            cpu_per_worker=random.choice([None, random.random() + 0.01]),
        ),
        ev.PlanApplied(number=random.randint(1, 9), min=1, max=random.randint(1, 9)),
        seen.HostsGranted(
            random.randint(1, 9),
            tuple((h, random.randint(0, 3)) for h in random.sample("abc", 2)),
            WHY,
        ),
        seen.DiscoveryFailed(WHY),
        EventBatch((ev.AgentReady(host, 1, 1, "x", ()), ev.WorkerStepped(worker, number, number))),
        seen.Tick(),
    ]


def returned(random: Random, host: str, term: int) -> ev.AgentReturned:
    """An agent with any story."""
    names = random.sample(WORKERS, random.randint(0, 3))
    told = tuple(ev.RunningWorker(name, random.randint(0, 1)) for name in names)
    up = host, random.randint(1, 2), 1, "x", (5000,)
    return ev.AgentReturned(*up, probe_port=7000, term=term, workers=told)


def seldom(random: Random) -> list[ev.Event]:
    """The rest of the vocabulary, but for what ends the job at once."""
    worker, host, number = random.choice(WORKERS), random.choice("ab"), random.randint(1, 5)
    passed = seen.HostResult(host, random.random() < 0.5, WHY)
    soon = random.choice([0.0, 1.0, 60.0])
    return [
        ev.WorkerStalled(worker, number, soon, random.choice(["collective", "elsewhere"]), WHY),
        ev.WorkerResumed(worker, number),
        ev.WorkerEnding(worker, random.choice([0, number])),
        ev.WorkerStack(worker, number, WHY, WHY, random.random() < 0.5),
        seen.LeaseExpired("half", worker, 30.0),
        ev.WorkerSaved(worker, number, random.choice(["", "step-1"]), random.choice(["", WHY])),
        ev.WorkerLeaving(worker, soon, random.choice(["", WHY])),
        ev.HostLeaving(host, random.randint(1, 2), soon, random.choice(["", WHY])),
        ev.ConnectionUnanswered(host, random.randint(1, 2), worker, "x", 5000, soon),
        ev.DrainRequested(host, WHY, random.choice([None, soon])),
        ev.DrainCancelled(host, random.choice(["", WHY])),
        seen.HostsChecked((passed,), random.randint(1, 2)),
        seen.HostProbed(host, number, random.random() < 0.5),
        seen.HostsMeasured((("a", random.choice([0, 10, 2**40])), ("b", 2**30))),
        ev.WorkerExited(
            worker, -9, "", out_of_memory=ev.OutOfMemory(random.choice([None, 8, 2**29]), 2**29)
        ),
        seen.HostStarved(host, random.randint(0, 2), WHY),
        seen.MemoryExpected(random.choice([0, 8, 2**29]), WHY),
        seen.StatesDiffer(number, number, "", (), WHY),
        ev.StacksRequested(random.choice(["", WHY])),
        seen.DriverResumed(random.randint(1, 2), random.choice(["", WHY]), random.random() < 0.5),
        *(returned(random, host, term) for term in (1, 2)),
    ]


ENDS = (seen.JobLeaving(WHY, 60.0), seen.StopRequested(WHY, 130))


def absurd(random: Random) -> ev.Event:
    if random.random() < 0.01:
        return random.choice(ENDS)
    return random.choice(seldom(random) if random.random() < 0.2 else usual(random))


def test_every_event_there_is_is_among_them() -> None:
    random = Random(0)
    made = {type(event) for event in (*usual(random), *seldom(random), *ENDS)}
    assert made == set(kinds(ev.Event))


@pytest.mark.parametrize("seed", range(40))
def test_no_news_breaks_an_invariant_or_raises(seed: int) -> None:
    random = Random(seed)
    job = Job(
        Settings(
            start_np=random.randint(1, 3),
            max_np=random.choice([None, 3]),
            node_unit=random.choice([1, 1, 2]),
            fixed_hosts=random.random() < 0.5,
            fruitless_restarts=99,
            blacklist_cooldown=(1, 5),
            replace_slow=True,
            auto_scale=seed % 3 == 0,
            slow_for=0.0,
            on_difference=random.choice([None, "repair", "warn"]),
        )
    )
    now = 0.0
    for _ in range(100):
        now += random.choice([0.0, 0.01, 1.0, 20.0])
        event = absurd(random)
        job.handle(event, now)
        assert job.check() == [], (seed, event)
        job.status(now)
