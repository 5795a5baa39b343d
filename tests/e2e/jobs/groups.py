"""Sums ranks in the groups of this host and across hosts, at every step, and writes them down."""

import json
import os
import time
from pathlib import Path

import quick_end
import torch
import torch.distributed as dist

import elastic_driver as elastic

quick_end.prepare()
model = torch.nn.Linear(2, 1)
state = elastic.TorchState(model=model, step=0)
RECORDS = Path(os.environ["STEP_RECORDS"])


def ranks_in(group) -> list[int]:
    """Return the ranks that meet in a collective of the group, by the group's own order."""
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, torch.tensor([elastic.rank()]), group=group)
    return [int(rank) for rank in found]


@elastic.run
def train(state):
    with (RECORDS / f"{os.environ['ELASTIC_WORKER_ID']}.jsonl").open("a") as file:
        while state.step < int(os.environ["STEPS"]):
            local, cross = elastic.local_group(), elastic.cross_group()
            assert local is elastic.local_group(), "a second call returns the same group"
            assert dist.get_rank(local) == elastic.local_rank()
            assert dist.get_rank(cross) == elastic.cross_rank()
            record = {
                "t": time.time(),
                "step": state.step + 1,
                "round": elastic.round_id(),
                "rank": elastic.rank(),
                "size": elastic.size(),
                "pid": os.getpid(),
                "worker": os.environ["ELASTIC_WORKER_ID"],
            }
            groups = {"local": ranks_in(local), "cross": ranks_in(cross)}
            state.step += 1
            name = f"groups.{record['round']}.{record['rank']}"
            (RECORDS / f"new.{name}").write_text(json.dumps(groups))
            (RECORDS / f"new.{name}").replace(RECORDS / name)  # never read half written
            file.write(json.dumps(record) + "\n")
            file.flush()
            state.commit()
            time.sleep(0.01)


train(state)
