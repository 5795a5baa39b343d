"""A job trains, loses a worker and gets a new one where NumPy is not installed."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.job import JOBS, ROOT, assert_no_step_lost_or_repeated, elasticrun


def test_a_job_that_loses_a_worker_goes_on_without_numpy(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy')\n")
    env = {"STEPS": "150", "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    with elasticrun("-np", "2", "--", str(JOBS / "train.py"), env=env) as job:
        first, _ = sorted(job.until_size(2))
        job.kill(first)
        assert job.wait(60) == 0, job.describe()
        assert_no_step_lost_or_repeated(job, 150)
        assert job.rounds() == [2, 1, 2]
