"""Speed, samples and usage in the status of a real job, against records of the script itself."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import psutil
import pytest

from rendezvous.auth import read_credentials
from rendezvous.client import RendezvousClient
from tests.support.job import JOBS, RunningJob, elasticrun

BATCH = 16  # samples of one worker in a step of the script
LATE_S = (0.0, 1.0, 2.0, 3.0)  # the age of what a worker has reported
WINDOWS_S = (3.0, 4.0, 5.0, 6.0, 7.0)  # from which the driver computes a speed


def client_of(job: RunningJob) -> RendezvousClient:
    endpoint = json.loads((job.run_dir / "endpoint.json").read_text())
    given = read_credentials(job.run_dir / "token")
    return RendezvousClient(endpoint["url"], given.token, fingerprint=given.fingerprint)


def test_the_status_measures_what_a_stopwatch_measures() -> None:
    args = ("-H", "localhost:2", "-np", "2", "--", str(JOBS / "train.py"))
    with elasticrun(*args, env={"STEPS": "100000", "STEP_MS": "20"}) as job:
        job.until_size(2)
        with client_of(job) as client:

            def measured() -> dict[str, Any]:
                found: dict[str, Any] = json.loads(client.get_bytes("/v1/status"))["measured"]
                return found

            before = BATCH * len(job.steps())
            first = job.until(
                lambda: (m := measured())["samples"] >= before and m, "the samples so far"
            )
            assert first["samples"] <= BATCH * (len(job.steps()) + 2), "none counts twice"
            assert first["total"] == 100000
            assert first["numbers"]["loss"] > 0.0

            def agrees() -> bool:
                """Return whether the speed is that of the records of some of the last seconds."""
                now, found = time.time(), measured()
                records = job.steps()
                for late, window in itertools.product(LATE_S, WINDOWS_S):
                    recent = [r for r in records if now - late - window < r.t <= now - late]
                    rate = len(recent) / 2 / window
                    if found["steps_per_s"] == pytest.approx(rate, rel=0.02):
                        samples = found["samples_per_s"]
                        return bool(samples == pytest.approx(2 * BATCH * rate, rel=0.02))
                return False

            job.until(agrees, "the speeds agree with the records")
            job.until(lambda: sees_usage(job, measured()), "the usage of host and workers")
            history = json.loads(client.get_bytes(f"/v1/history?since={time.time() - 3.0}"))
            assert history["world_size"][-1] == 2
            assert history["step"] == sorted(history["step"])
            assert {len(column) for column in history.values()} == {len(history["t"])}


def sees_usage(job: RunningJob, found: dict[str, Any]) -> bool:
    """Return whether host and workers are as psutil sees them; agents sample now and then."""
    workers = {record.worker: pid for pid, record in job.live().items()}
    if set(found["hosts"]) != {"localhost"} or set(found["workers"]) != set(workers):
        return False
    assert found["hosts"]["localhost"]["disk_total"] == psutil.disk_usage("/").total
    memory = {worker: psutil.Process(pid).memory_info().rss for worker, pid in workers.items()}
    return all(
        found["workers"][worker]["memory"] == pytest.approx(expected, rel=0.05)
        and 0.0 < found["workers"][worker]["cpu"] < (psutil.cpu_count() or 1)
        and found["workers"][worker]["times"]["compute"] > 0.0
        and found["workers"][worker]["memory_peak"] >= found["workers"][worker]["memory"]
        for worker, expected in memory.items()
    )
