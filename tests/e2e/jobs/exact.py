"""Trains so that every sample counts: a fixed batch to the bit, or one pass by ElasticSampler.

MODE is `fixed` or `sampler`. The last line of rank 0 is the fingerprint of model and optimizer, or
how often samples were trained. Steps take at least STEP_MS milliseconds, and a micro-batch of a
fixed batch WORK_MS of a processor. Whoever's share of a step changes says so.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import quick_end
import torch
import torch.distributed as dist

import elastic_driver as elastic

quick_end.prepare()

MODE = os.environ["MODE"]
EPOCHS = int(os.environ.get("EPOCHS", "2"))
WORK_S = float(os.environ.get("WORK_MS", "0")) / 1000
STEP_S = float(os.environ.get("STEP_MS", "20")) / 1000
SAMPLES = 2000


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(10, generator=generator) + 0.1 * torch.randn(10)


torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Linear(10, 20), torch.nn.BatchNorm1d(20), torch.nn.Dropout(0.3), torch.nn.Linear(20, 1)
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
common = {"model": model, "optimizer": optimizer, "epoch": 0, "step": 0}


def note():
    """For the test to see that training goes on; a failure is about to strike at any moment."""
    time.sleep(STEP_S)
    if (folder := os.environ.get("STEP_RECORDS")) is None:
        return
    line = {
        "t": time.time(),
        "step": state.step,
        "round": elastic.round_id(),
        "rank": elastic.rank(),
        "size": elastic.size(),
        "pid": os.getpid(),
        "worker": os.environ["ELASTIC_WORKER_ID"],
    }
    with (Path(folder) / f"{line['worker']}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def work():
    """Compute for WORK_S seconds of this process's own time."""
    began = time.thread_time()
    while time.thread_time() - began < WORK_S:
        pass


def loss_of(inputs):
    return (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()


def train_fixed(state):
    share = None
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020 - the state keeps the epoch
        batches.set_epoch(state.epoch)
        for step in batches:
            if len(step) != share:
                share = len(step)
                print(f"share {share} of step {step.number} in epoch {step.epoch}", flush=True)
            for _, inputs in step:
                work()
                loss_of(inputs).backward()
            optimizer.step()
            state.step += 1
            note()
            state.commit()


def train_sampler(state):
    ddp = elastic.wrap(model)
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020 - the state keeps the epoch
        for indices, inputs in loader:
            optimizer.zero_grad()
            (ddp(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean().backward()
            counts = torch.bincount(indices, minlength=SAMPLES)
            dist.all_reduce(counts)
            optimizer.step()
            state.counts = state.counts + counts
            state.step += 1
            note()
            state.commit()
        state.replayed = state.replayed + sampler.replayed


def fingerprint():
    digest = hashlib.sha256()
    moments = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    for tensor in [*model.state_dict().values(), *moments]:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


if MODE == "fixed":
    batches = elastic.FixedBatch(Samples(), 5, model=model, virtual_workers=8, deterministic=True)
    state = elastic.TorchState(**common, batches=batches)
    elastic.run(train_fixed)(state)
    result = fingerprint()
else:
    sampler = elastic.ElasticSampler(Samples())
    loader = torch.utils.data.DataLoader(Samples(), batch_size=4, sampler=sampler, num_workers=1)
    counts = torch.zeros(SAMPLES, dtype=torch.int64)
    state = elastic.TorchState(**common, sampler=sampler, counts=counts, replayed=0)
    elastic.run(train_sampler)(state)
    extra = int(state.counts.sum()) - EPOCHS * SAMPLES
    result = f"least={int(state.counts.min())} extra={extra} replayed={state.replayed}"
if elastic.rank() == 0:
    print(f"result {result}", flush=True)
