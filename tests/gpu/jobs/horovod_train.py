"""A script for Horovod on DEVICE: its operations in each world, and training with kills.

STREAM=1: the operations' tensors are still being computed on a stream of the script's own when they
are given to Horovod. All ranks have the same batch, so each loss is that of one process.
"""

import contextlib
import json
import os
import time
from pathlib import Path

os.environ["NCCL_HOSTID"] = os.environ["ELASTIC_WORKER_ID"]  # several ranks share one device

import horovod.torch as hvd
import torch
import torch.distributed as dist

DEVICE, STREAM = os.environ["DEVICE"], os.environ.get("STREAM") == "1"
STEPS, WIDTH = int(os.environ["STEPS"]), 512
WORKER, BUSY_CYCLES = os.environ["ELASTIC_WORKER_ID"], 200_000_000  # 0.1 s
RECORDS = Path(os.environ["STEP_RECORDS"])
VALUES = RECORDS.parent / "values"
VALUES.mkdir(exist_ok=True)
hvd.init()
if DEVICE == "cuda":
    torch.cuda.set_device(0)


def values(number, size=1000):
    """A tensor that is full of a number, once the device gets to it."""
    tensor = torch.zeros(size, device=DEVICE)
    if STREAM and DEVICE == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)
    return tensor.add_(number)


def full_of(tensor, number, length=1000):
    assert tensor.device.type == DEVICE
    right = torch.full((length,), float(number), device=DEVICE)
    assert torch.equal(tensor, right), (tensor[:4], number)


def check_operations():
    """Each operation gives what its definition says, on the tensors' own device."""
    rank, size = hvd.rank(), hvd.size()
    total = size * (size + 1) / 2
    full_of(hvd.allreduce(values(rank + 1), op=hvd.Sum), total)
    full_of(hvd.allreduce(values(rank + 1), op=hvd.Average), total / size)
    full_of(hvd.broadcast(values(rank + 1), root_rank=size - 1), size)
    in_place = values(rank + 1)
    hvd.allreduce_(in_place, op=hvd.Max)
    full_of(in_place, size)
    handles = [hvd.allreduce_async(values(rank + n), op=hvd.Sum, name=f"n{n}") for n in range(3)]
    for n, handle in enumerate(handles):
        full_of(hvd.synchronize(handle), total - size + size * n)
    for n, each in enumerate(hvd.grouped_allreduce([values(1), values(2)], op=hvd.Sum)):
        full_of(each, size * (n + 1))
    gathered = hvd.allgather(values(rank + 1, size=rank + 1))
    assert gathered.tolist() == [r + 1.0 for r in range(size) for _ in range(r + 1)]
    full_of(hvd.reducescatter(values(1, size=1000 * size), op=hvd.Sum), size)
    sent, splits = hvd.alltoall(values(rank + 1, size=size), torch.ones(size, dtype=torch.int32))
    assert sent.tolist() == [r + 1.0 for r in range(size)]
    assert splits.tolist() == [1] * size
    half = hvd.allreduce(values(1).half(), op=hvd.Sum, compression=hvd.Compression.fp16)
    full_of(half.float(), size)


class Training:
    def __init__(self):
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
        ).to(DEVICE)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(64, 32, generator=generator).to(DEVICE)
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - inputs.sin().sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss


def write(path, facts):
    with path.open("a") as file:
        file.write(json.dumps(facts) + "\n")


training = Training()
training.optimizer = hvd.DistributedOptimizer(
    training.optimizer, named_parameters=training.model.named_parameters()
)
state = hvd.elastic.TorchState(training.model, training.optimizer, step=0, losses=[], rounds=0)


@hvd.elastic.run
def train(state):
    state.rounds += 1
    stream = torch.cuda.Stream() if STREAM and DEVICE == "cuda" else None
    with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
        check_operations()
    while state.step < STEPS:
        loss = training.step(state.step)
        state.step += 1
        state.losses.append(loss.item())
        parameters = (parameter.detach() for parameter in training.model.parameters())
        bits = [int(p.view(torch.int32).sum(dtype=torch.int64)) for p in parameters]
        write(VALUES / WORKER, {"step": state.step, "bits": bits})
        place = {"rank": hvd.rank(), "size": hvd.size(), "worker": WORKER, "round": state.rounds}
        facts = {"t": time.time(), "step": state.step, "pid": os.getpid(), **place}
        write(RECORDS / f"{WORKER}.jsonl", facts)
        time.sleep(0.02)
        state.commit()


train(state)
backend = dist.get_backend()
alone = Training()
difference = 0.0
for number, loss in enumerate(state.losses):
    expected = alone.step(number).item()
    difference = max(difference, abs(loss - expected) / abs(expected))
print(
    f"done step={state.step} losses={len(state.losses)} first={state.losses[0]:.4f} "
    f"last={state.losses[-1]:.4f} difference={difference:.2e} backend={backend}",
    flush=True,
)
