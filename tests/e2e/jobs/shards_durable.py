"""Trains two data sets that the driver hands out, with checkpoints in the folder CHECKPOINTS.

First RECORDS records for two epochs, then a stream of two partitions that grow while it is trained.
The state counts the records that its model was trained with; the last line of rank 0 tells.
"""

import json
import os
import time
from pathlib import Path

import quick_end
import torch
import torch.distributed as dist

import elastic_driver as elastic

quick_end.prepare()

FOLDER = Path(os.environ["STEP_RECORDS"])
STEP_S = float(os.environ.get("STEP_MS", "10")) / 1000
RECORDS, EPOCHS, GROWTH, ENDS = 600, 2, 40, {"p": 200, "q": 120}


class Numbers(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return torch.tensor(
            index if isinstance(index, int) else RECORDS + OFFSETS[index[0]] + index[1]
        )


OFFSETS = {"p": 0, "q": ENDS["p"]}
SIZE = RECORDS + sum(ENDS.values())
fixed = elastic.ShardedDataset(
    "fixed", Numbers(), 4, records=RECORDS, shard_records=32, epochs=EPOCHS
)
stream = elastic.ShardedDataset(
    "stream", Numbers(), 4, partitions=dict.fromkeys(ENDS, 0), shard_records=16
)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
state = elastic.TorchState(
    model=model,
    optimizer=optimizer,
    fixed=fixed,
    stream=stream,
    step=0,
    known=0,  # records of each partition that the driver was told of
    counts=torch.zeros(SIZE, dtype=torch.int64),
    checkpoint_dir=os.environ["CHECKPOINTS"],
    every=20,
)


def note():
    time.sleep(STEP_S)
    line = {
        "t": time.time(),
        "step": state.step,
        "round": elastic.round_id(),
        "rank": elastic.rank(),
        "size": elastic.size(),
        "pid": os.getpid(),
        "worker": os.environ["ELASTIC_WORKER_ID"],
    }
    with (FOLDER / f"{line['worker']}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def grow():
    """Tell the driver of more records, once for each of them."""
    if state.known < max(ENDS.values()):
        state.known += GROWTH
        if elastic.rank() == 0:
            for partition, end in ENDS.items():
                reached = min(state.known, end)
                stream.client.extend(partition, reached, closed=reached == end)


@elastic.run
def train(state):
    net = elastic.wrap(model)
    print(f"enters step={state.step}", flush=True)
    for data in (fixed, stream):
        if data is stream and state.known == 0:
            grow()
        for batch in data:
            optimizer.zero_grad()
            net(batch.float().unsqueeze(1) / SIZE).sum().backward()
            counts = torch.bincount(batch, minlength=SIZE)
            dist.all_reduce(counts)
            optimizer.step()
            state.counts = state.counts + counts
            state.step += 1
            if data is stream:
                grow()
            note()
            state.commit()


train(state)
if elastic.rank() == 0:
    wanted = torch.ones(SIZE, dtype=torch.int64)
    wanted[:RECORDS] = EPOCHS
    result = {
        "never": int((state.counts < wanted).sum()),
        "extra": int((state.counts - wanted).sum()),
        "replayed": fixed.replayed + stream.replayed,
        "done": [d.client.checkpoint().state.done_records for d in (fixed, stream)],
    }
    print("result", json.dumps(result), flush=True)
