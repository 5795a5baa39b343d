"""A minute of every fault: `benchmarks/plans/minute.yaml` says which, and what must be kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.plan import read_plan
from tests.support.job import ROOT

PLANS = ROOT / "benchmarks" / "plans"
LONGEST_S = 400.0


@pytest.mark.parametrize("plan", sorted(PLANS.glob("*.yaml")), ids=lambda plan: plan.stem)
def test_a_plan_can_be_read(plan: Path) -> None:
    assert read_plan(plan).faults


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S + 20)
@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own needs root")
def test_a_job_trains_through_a_minute_of_faults(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    argv = [sys.executable, "-m", "benchmarks.chaos", "--plan", str(PLANS / "minute.yaml")]
    done = subprocess.run(
        [*argv, "--report", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    found = json.loads(report.read_text())
    assert found["missed"] == []
    assert found["faults"]["rogue_clients"]["times"]
    assert {"forbidden", "malformed", "wrong_tokens"} <= set(found["answers to rogue clients"])
