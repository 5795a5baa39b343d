"""What rogue clients leave behind in a driver: nothing, once their keys are gone."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.support.job import ROOT, elasticrun

SECONDS = "3"
MEMORY_MIB = 12  # it was 26 and more while the C library kept what large requests had taken


@pytest.mark.timeout(120)
def test_large_batches_leave_no_memory_behind() -> None:
    train = (sys.executable, "-c", "import time; time.sleep(600)")
    with elasticrun("-np", "1", "--", *train) as job:
        job.until(lambda: job.events("worker_ready", "round_formed", "worker_started"), "a worker")
        # The thread that writes statistics has loaded what it needs.
        job.until((job.run_dir / "statistics.db").exists, "statistics")
        driver = psutil.Process(job.process.pid)
        before = driver.memory_info().rss
        argv = [sys.executable, "-m", "tests.chaos.rogues", str(job.run_dir), SECONDS, "1"]
        subprocess.run([*argv, "big_batches"], cwd=ROOT, check=True, timeout=60)
        grown = (driver.memory_info().rss - before) / 2**20
    assert grown < MEMORY_MIB
