"""Torch's own collectives and DDP find the same in our worlds as under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import elasticrun

JOBS = Path(__file__).with_name("jobs")
pytestmark = pytest.mark.timeout(240)  # torch is imported by each rank


def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_torchs_interfaces_are_torchs(tmp_path: Path) -> None:
    script, ours, theirs = JOBS / "torch_interfaces.py", tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(script), str(theirs), "plain"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=120, env=one_thread, capture_output=True)
    with elasticrun("-np", "2", "--", str(script), str(ours)) as job:
        assert job.wait(within=120) == 0, job.describe()
    for rank, (mine, other) in enumerate(zip(found(ours), found(theirs), strict=True)):
        assert mine.keys() == other.keys()
        for name, expected in other.items():
            assert mine[name] == expected, f"{name} on rank {rank}"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("before", "the script has called init_process_group() before the function under"),
        ("inside", "init_process_group() is called in a world"),
    ],
)
def test_a_process_group_of_the_script_is_answered_by_a_sentence(
    tmp_path: Path, where: str, message: str
) -> None:
    call = "dist.init_process_group('gloo')"
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\nimport elastic_driver as elastic\n"
        f"{call if where == 'before' else ''}\n"
        f"def train(state):\n    {call if where == 'inside' else 'pass'}\n"
        "elastic.run(train)(elastic.ObjectState(step=0))\n"
    )
    with elasticrun("-np", "2", "--", str(script)) as job:
        assert job.wait(within=90) == 1, job.describe()
        assert message in job.stdout + job.stderr
