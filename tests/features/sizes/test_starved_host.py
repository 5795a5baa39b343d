"""A host with too few processors, from what agents and workers measure to what the Brain hears."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from elastic_driver import contract
from elastic_driver.brain.grants import Kind
from elastic_driver.features.sizes import machine as starvation
from elastic_driver.runtime.brain_link import BrainLink, BrainReports
from elastic_driver.words.orders import encode
from elastic_driver.words.progress import HostUsage, Pressure, Progress, StepTimes, Usage
from rendezvous.client import RendezvousClient
from rendezvous.wire import Set
from tests.runtime.cluster import Cluster
from tests.runtime.jobs import JobUnderTest, StartJob
from tests.runtime.waiting import until
from tests.support.brain import played_brain, token_of

WORKERS = "a.0.1", "a.1.1", "b.0.1", "b.1.1"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starvation, "LASTS_S", 1.5)


def starving(cluster: Cluster) -> Callable[[], None]:
    """All train; those of host `a` wait for its processors, and compute twice as long."""
    steps = count(1)

    def look() -> None:
        step = next(steps)
        for worker in WORKERS:
            times = StepTimes(compute=0.2 if worker.startswith("a") else 0.1)
            done = Progress(1, step, 0.3, at=0.3 * step, steps_done=step, times=times)
            cluster.client.set(contract.worker_progress(worker), encode(done))
        for host, cpu in (("a", 1.0), ("b", 0.5)):
            measured: Any = {"memory_used": 1, "memory_total": 9, "disk_used": 1, "disk_total": 9}
            usage = Usage(HostUsage(cpu=cpu, pressure=Pressure(cpu=0.8), **measured))
            cluster.client.batch(Set(contract.agent_usage(host, 1), encode(usage)))

    return look


def trained(job: JobUnderTest) -> JobUnderTest:
    job.cluster.until_workers(*WORKERS)
    job.cluster.ready(*WORKERS)
    job.cluster.world(1)
    for worker in WORKERS:
        job.cluster.stepped(worker, 1)
    return job


def test_the_brain_hears_of_it_and_decides(start_job: StartJob) -> None:
    with played_brain() as played:
        link = BrainLink(RendezvousClient(played.url, token_of("run0"), 5.0), "run0", [].append)
        kind = Kind(name="run0", command="")
        brain = BrainReports(link=link, began=5.0, weight=1.0, kind=kind, lives_on=30.0)
        link.update(brain.first(1, None))
        played.grant("run0", 1, a=2, b=2)
        job = trained(start_job(brain=brain, start_np=1, min_np=1, max_np=None))
        look = starving(job.cluster)

        def told() -> bool:
            look()
            return played.reports[-1][1].starved == {"a": 1}

        until(told, "the Brain hears that a is starved", 30.0)
        event = job.cluster.until_event("host_starved", host="a")
        assert event["slots"] == 1
        assert job.cluster.workers() == list(WORKERS), "the next grant moves the worker"
        played.grant("run0", 2, a=1, b=2)
        until(lambda: job.cluster.client.get(contract.JOB_NOTICE), "a notice to leave")


def test_a_job_of_a_fixed_size_is_left_alone(start_job: StartJob) -> None:
    job = trained(start_job((("a", 2), ("b", 2))))
    look, over = starving(job.cluster), time.monotonic() + 3 * starvation.LASTS_S

    def is_over() -> bool:
        look()
        return time.monotonic() >= over

    until(is_over, "three times as long as it takes", 30.0)
    assert [e for e in job.logged() if e["event"] == "host_starved"] == []
