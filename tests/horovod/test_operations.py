"""Horovod's operations in real jobs; the checks are functions of `jobs/operations.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.horovod.on_ranks import JOBS, checks_of, run_on
from tests.support.job import elasticrun

JOB = "operations.py"
pytestmark = pytest.mark.timeout(240)  # torch is imported by each rank


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found."""
    return run_on(4, JOB, tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("check", checks_of(JOB))
def test_on_every_rank(results: list[dict[str, str]], check: str) -> None:
    for rank, found in enumerate(results):
        assert found[check] == "ok", f"rank {rank}:\n{found[check]}"


def test_a_lost_peer_fails_everything_that_is_pending(tmp_path: Path) -> None:
    job_file = JOBS / "broken.py"
    files = [tmp_path / "0", tmp_path / "1"]
    with elasticrun("-np", "3", "--", str(job_file), str(tmp_path)) as job:
        job.until(lambda: all(map(Path.exists, files)), "both survivors have seen it", within=90)
        said = job.stderr
    for file in files:
        step, ended, until_left, error = file.read_text().split(" ", 3)
        assert (int(step), int(ended)) == (20, 8)
        assert "allreduce '20." in error
        assert float(until_left) < 20
    assert "terminate called" not in said


def test_an_exchange_that_takes_longer_than_the_gloo_timeout_fails(tmp_path: Path) -> None:
    job_file, file = JOBS / "slow_exchange.py", tmp_path / "error"
    with elasticrun("-np", "2", "--gloo-timeout-seconds", "3", "--", str(job_file), str(file)) as j:
        assert j.wait(within=90) == 0, j.describe()
    assert file.read_text().startswith("allreduce 'late': ")
    assert "3000ms" in file.read_text()
