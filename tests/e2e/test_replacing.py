"""A rank that is slowed for real gives its place to a worker on another host; no step is lost."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.support.job import JOBS, RunningJob, assert_no_step_lost_or_repeated, elasticrun
from tests.support.slowing import slowed

PACED = str(JOBS / "paced.py")
SHARE = 0.08  # of a processor: several times slower, also beside busy neighbours


def longest_gap(job: RunningJob, worker: str, since: float) -> float:
    """Seconds this worker went without finishing a step, at most."""
    times = [r.t for r in job.steps() if r.worker == worker and r.t >= since]
    return max(b - a for a, b in itertools.pairwise(times))


@pytest.mark.slow
def test_a_slowed_worker_is_replaced_on_an_idle_host_before_it_leaves() -> None:
    hosts = "localhost:1,127.0.0.2:1,127.0.0.3:1"
    args = ("-H", hosts, "-np", "2", "--max-np", "2", "--replace-slow", "--debug", "--", PACED)
    with elasticrun(*args, env={"WORK_MS": "8"}) as job:
        workers = job.until_size(2, steps=5)
        (stays,) = (r for r in workers.values() if r.rank == 0)
        (victim,) = (r for r in workers.values() if r.rank == 1)
        with slowed(victim.pid, SHARE):
            slowed_at = time.time()
            event = job.until(
                lambda: next(iter(job.events("worker_replaced")), None), "it is replaced", 90.0
            )
        job.until(lambda: len(job.rounds()) == 2, "the world has changed")
        newest = job.until_size(2, steps=5)
        assert (event["worker"], event["host"]) == (victim.worker, "127.0.0.2")
        assert {r.worker for r in newest.values()} == {stays.worker, event["replacement"]}
        assert event["replacement"] == "127.0.0.3.0.1"
        assert job.rounds() == [2, 2], "the world has never been smaller"
        assert [e["expected"] for e in job.events("worker_exited")] == [True]
        (begun,) = job.events("replacement_started")
        print(
            f"decided after {begun['t'] - slowed_at:.1f} s, replaced after "
            f"{event['t'] - slowed_at:.1f} s, longest pause of the other rank "
            f"{longest_gap(job, stays.worker, begun['t']):.2f} s"
        )
        assert_no_step_lost_or_repeated(job, max(r.step for r in job.steps()) - 1)
        assert "rank 1 on 127.0.0.2 is slow and will be replaced" in job.stderr
