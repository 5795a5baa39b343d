"""Horovod's operations in real jobs; the checks are functions of `jobs/operations.py`."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.support.job import elasticrun

JOB = Path(__file__).with_name("jobs") / "operations.py"
RANKS = 4
pytestmark = pytest.mark.timeout(240)  # torch is imported by each rank
CHECKS = [
    node.name
    for node in ast.parse(JOB.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("results")
    with elasticrun("-np", str(RANKS), "--", str(JOB), str(folder)) as job:
        assert job.wait(within=200) == 0, job.describe()
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(RANKS)]


@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(results: list[dict[str, str]], check: str) -> None:
    for rank, found in enumerate(results):
        assert found[check] == "ok", f"rank {rank}:\n{found[check]}"


def test_a_lost_peer_fails_everything_that_is_pending(tmp_path: Path) -> None:
    job_file = JOB.with_name("broken.py")
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
    job_file, file = JOB.with_name("slow_exchange.py"), tmp_path / "error"
    with elasticrun("-np", "2", "--gloo-timeout-seconds", "3", "--", str(job_file), str(file)) as j:
        assert j.wait(within=90) == 0, j.describe()
    assert file.read_text().startswith("allreduce 'late': ")
    assert "3000ms" in file.read_text()
