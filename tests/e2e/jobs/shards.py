"""Trains data that the driver hands out in shards.

MODE is `together` (in step, by all workers of the world), or `apart` (each worker its own shards).
LOADERS loader processes read ahead. Record POISON, if given, kills whoever reads it; its
shard is left out after MAX_LOSSES. The last
line of rank 0 says how often records were trained, by the state and by the driver.
"""

import json
import os
import signal
import time
from pathlib import Path

import quick_end
import torch
import torch.distributed as dist

import elastic_driver as elastic

quick_end.prepare()

MODE = os.environ["MODE"]
STEP_S = float(os.environ.get("STEP_MS", "10")) / 1000
POISON = int(os.environ.get("POISON", "-1"))
FOLDER = Path(os.environ["STEP_RECORDS"])
RECORDS, SHARD, EPOCHS = int(os.environ.get("RECORDS", "1500")), 64, 2


class Records(torch.utils.data.Dataset):
    def __getitem__(self, index):
        if index == POISON:
            time.sleep(0.05)  # the peers finish the step before
            os.kill(os.getpid(), signal.SIGKILL)
        return index, torch.full((4,), index / RECORDS)


def note(**facts):
    time.sleep(STEP_S)
    line = {
        "t": time.time(),
        "round": elastic.round_id(),
        "rank": elastic.rank(),
        "size": elastic.size(),
        "pid": os.getpid(),
        "worker": os.environ["ELASTIC_WORKER_ID"],
        **facts,
    }
    with (FOLDER / f"{line['worker']}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


data = elastic.ShardedDataset(
    "records",
    Records(),
    4,
    records=RECORDS,
    shard_records=SHARD,
    epochs=EPOCHS,
    together=MODE == "together",
    num_workers=int(os.environ.get("LOADERS", "0")),
    max_losses=int(os.environ.get("MAX_LOSSES", "3")),
)


def train_together(state):
    ddp = elastic.wrap(state.model)
    for indices, inputs in data:
        state.optimizer.zero_grad()
        ddp(inputs).pow(2).mean().backward()
        counts = torch.bincount(indices, minlength=RECORDS)
        dist.all_reduce(counts)
        state.optimizer.step()
        state.counts = state.counts + counts
        state.step += 1
        note(step=state.step)
        state.commit()


def train_apart(state):
    for indices, _ in data:
        data.advance()
        state.step += 1
        note(step=state.step)
        state.mine = state.mine + torch.bincount(indices, minlength=RECORDS)
        state.commit()


if MODE == "together":
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    state = elastic.TorchState(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data=data,
        counts=torch.zeros(RECORDS, dtype=torch.int64),
        step=0,
    )
    train = train_together
else:
    state = elastic.ObjectState(mine=torch.zeros(RECORDS, dtype=torch.int64), step=0)
    state.local("mine")  # each worker's own
    train = train_apart

missing = ""
try:
    elastic.run(train)(state)
except elastic.IncompleteDataError as error:
    missing = ",".join(error.shards)
ledger = data.client.checkpoint().state
if elastic.rank() == 0:
    least = most = extra = None
    if MODE == "together":
        least, most = int(state.counts.min()), int(state.counts.max())
        extra = int(state.counts.sum()) - EPOCHS * RECORDS
    print(
        "result",
        json.dumps(
            {
                "least": least,
                "extra": extra,
                "most": most,
                "replayed": data.replayed,
                "done": ledger.done_records,
                "open": len(ledger.outstanding),
                "missing": missing,
            }
        ),
        flush=True,
    )
