"""A rank that is slowed for real is named while the job trains, and nobody is without a reason."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.worker.heartbeat.training_progress import steps_per_sample
from tests.e2e.test_control import ctl
from tests.support.job import JOBS, RunningJob, elasticrun
from tests.support.processes import descendants
from tests.support.slowing import slowed

PACED = str(JOBS / "paced.py")
# Of a processor: twelve times slower, which is seen beside busy neighbours too. Ranks that are two
# and three times slower need an idle machine: `slow_rank_trial`, at night.
SHARE = 1 / 12
REPORTED_STEPS = 30
PRIORITY = -15  # as niceness
HELD_UP = 1.3  # a rank that others hold up so many times as much as the rest is really slower
BEFORE_ALARM = 20  # steps
SLOW_S = 10.0  # for the ledger


def step_time(job: RunningJob, rank: int) -> float:
    """The median time of this rank's steps so far, in seconds."""
    times = [r.t for r in job.steps() if r.rank == rank]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def held_up_s(job: RunningJob, since: float, until: float) -> float:
    """By how many seconds the steps between two moments took longer than those before, as ranks
    that are not slow have measured it.
    """
    found = []
    for rank in (0, 2):
        ends = [r.t for r in job.steps() if r.rank == rank and r.size == 3]
        steps = list(itertools.pairwise(ends))
        usual = statistics.median(end - begin for begin, end in steps if end < since)
        found.append(sum(e - b - usual for b, e in steps if since < e < until))
    return statistics.fmean(found)


def before_other_programs(job: RunningJob) -> None:
    """Let the processes of the job run first, where we may: tests run side by side, and a rank that
    others hold up for seconds *is* slow.

    Linux shares processors out among sessions before niceness counts (`sched_autogroup`), and
    every worker has one of its own.
    """
    for pid in [job.process.pid, *(process.pid for process in descendants(job.process.pid))]:
        with contextlib.suppress(OSError):  # no root, no autogroups, or it has just ended
            os.setpriority(os.PRIO_PROCESS, pid, PRIORITY)
            Path(f"/proc/{pid}/autogroup").write_text(str(PRIORITY))


def without_reason(job: RunningJob, slowed_rank: int | None = None) -> list[dict[str, Any]]:
    """The alarms about ranks that were not held up more than others, as they measured it
    themselves: only the jitter of their own work can have raised them.
    """
    found = []
    for event in (e for e in job.events("rank_slow") if e["rank"] != slowed_rank):
        step, held_up = event["step"], dict[int, list[float]]()
        for record in job.steps():
            if step - BEFORE_ALARM < record.step <= step:
                held_up.setdefault(record.rank, []).append(record.held_up)
        mean = {rank: statistics.fmean(values) for rank, values in held_up.items()}
        if mean[event["rank"]] < HELD_UP * min(mean.values()):
            found.append({**event, "held_up": mean})
    return found


@pytest.mark.slow
def test_a_rank_slowed_twelve_times_is_named_with_its_host_until_it_has_recovered() -> None:
    hosts = "localhost:1,127.0.0.2:1,127.0.0.3:1"
    with elasticrun("-H", hosts, "-np", "3", "--", PACED) as job:
        job.until_size(3, within=90.0)
        before_other_programs(job)
        workers = job.until_size(3, steps=60, within=90.0)
        (victim,) = (r for r in workers.values() if r.rank == 1)
        every = steps_per_sample(step_time(job, 1))
        with slowed(victim.pid, SHARE) as how:
            begun = max(r.step for r in job.steps())
            event = job.until(
                lambda: next((e for e in job.events("rank_slow") if e["rank"] == 1), None),
                "the slowed rank is named",
                within=120.0,
            )
            job.until(lambda: time.time() - event["t"] > SLOW_S, "it is slow for a while", 60.0)
            ended = time.time()
        took = event["step"] - begun
        print(f"{how}: named after {took} steps, {every} told together before: {event}")
        assert (event["host"], event["worker"]) == ("127.0.0.2", victim.worker)
        assert event["kind"] == "compute"
        assert took <= REPORTED_STEPS * every
        assert without_reason(job, slowed_rank=1) == [], job.describe()
        recovered = job.until(
            lambda: next((e for e in job.events("rank_recovered") if e["rank"] == 1), None),
            "it has recovered",
            within=120.0,
        )
        # That it is slow no longer is noticed after some steps, which the ledger counts alike.
        late = 3 * event["share"] * (recovered["t"] - ended)
        waited = 3 * held_up_s(job, event["t"], ended)
        report = json.loads(ctl("report", str(job.run_dir), "--json"))
        slow = report["goodput"]["seconds"]["slow"]
        print(f"slow: {slow:.2f} s, {late:.2f} s of it late; by the workers' clocks {waited:.2f} s")
        assert slow - late == pytest.approx(waited, rel=0.25)
        assert "rank 1 on 127.0.0.2 holds the others up" in job.stderr


@pytest.mark.slow
def test_hundreds_of_jittered_steps_name_nobody() -> None:
    # More ranks than processors: two would share one, and really be slower than the third.
    ranks = max(2, min(3, os.cpu_count() or 2))
    env = {"STEPS": "400", "WORK_MS": "10", "JITTER": "0.25"}
    with elasticrun("-np", str(ranks), "--", PACED, env=env) as job:
        job.until_size(ranks, within=90.0)
        before_other_programs(job)
        assert job.wait(120.0) == 0, job.describe()
        assert max(r.step for r in job.steps()) == 400
        assert without_reason(job) == [], job.describe()
