"""Job files whose functions `check_…` run on every rank of a real job, and what came of them."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from tests.support.job import elasticrun

JOBS = Path(__file__).with_name("jobs")
STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "15"}


def checks_of(job: str) -> list[str]:
    """Return the names of the checks of a job file."""
    return [
        node.name
        for node in ast.parse((JOBS / job).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]


def run_on(
    ranks: int, job: str, folder: Path, env: dict[str, str] | None = None
) -> list[dict[str, str]]:
    """Run a job file on so many ranks; return what each found, by check.

    `env`: further variables. With those of `STALL` an operation that some rank never calls is an
    error after 15 s, so a check that hangs says so.
    """
    with elasticrun("-np", str(ranks), "--", str(JOBS / job), str(folder), env=env) as running:
        assert running.wait(within=200) == 0, running.describe()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
