"""A data set whose processes take a part of a stream by rank and size, and outlive the worlds.

Its loader is made once, with `persistent_workers=True`. Each epoch yields what its processes
believe to be rank and size, and the trainer compares.
"""

import os
import time
from pathlib import Path

import quick_end
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import elastic_driver as elastic

KILLED = Path(os.environ["STEP_RECORDS"], "killed")


class Part(IterableDataset):
    def __iter__(self):
        for _ in range(3):
            yield torch.tensor([elastic.rank(), elastic.size()])


if __name__ == "__main__":
    quick_end.prepare()
    loader = DataLoader(
        Part(),
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=os.environ["METHOD"],
    )
    state = elastic.TorchState(model=torch.nn.Linear(2, 1), epoch=0)

    @elastic.run
    def train(state):
        while state.epoch < 6:
            for batch in loader:
                believed = batch.tolist()[0]
                assert believed == [elastic.rank(), elastic.size()], believed
            if state.epoch == 3 and elastic.rank() == 0 and not KILLED.exists():
                KILLED.touch()
                os.kill(os.getpid(), 9)  # the other is rank 0 from now on
            while state.epoch == 3 and elastic.size() < 2:
                time.sleep(0.05)  # until its successor joins, by one of the commits
                state.commit()
            dist.all_reduce(torch.zeros(1))  # breaks where a peer is lost
            state.epoch += 1
            state.commit()

    train(state)
    if elastic.rank() == 0:
        print("done", flush=True)
