"""Data that is shared by rank and size never takes the numbers of an earlier world, or of none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.job import JOBS, elasticrun


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_of_a_loader_that_outlive_a_world_know_the_next_one(method: str) -> None:
    script = str(JOBS / "part_of_stream.py")
    with elasticrun("-np", "2", script, env={"METHOD": method}) as job:
        assert job.wait(120) == 0, job.describe()
        assert "done" in job.stdout, job.describe()
        assert len(job.rounds()) >= 2, job.describe()


LENGTH = """
import torch
from torch.utils.data import DataLoader
import elastic_driver as elastic

elastic.init() if {init} else None
sampler = elastic.ElasticSampler(range(64))
loader = DataLoader(range(64), batch_size=4, sampler=sampler)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(loader) * 3)
print("total steps", schedule.total_steps, flush=True)
torch.distributed.barrier()
"""


def test_a_schedule_by_the_length_of_a_loader_needs_a_world_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LENGTH.format(init=False))
    with elasticrun("-np", "2", str(script)) as job:
        assert job.wait(60) == 1, job.describe()
        assert "call elastic.init() first" in job.stderr, job.describe()
    script.write_text(LENGTH.format(init=True))
    with elasticrun("-np", "2", str(script)) as job:
        assert job.wait(60) == 0, job.describe()
        assert job.stdout.count("total steps 24") == 2
