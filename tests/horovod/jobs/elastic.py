"""Trains with `hvd.elastic` until a file `stop` is there; commits and records every fifth step.

Weights follow from the number of steps alone: a gradient is 1 on every rank. A worker that was
started later writes how long `hvd.init()` took, and what a collective before `run` said; LATE: the
seconds, by the rank that it was told, after which it comes.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

import elastic_driver.horovod.torch as hvd

folder, pace = Path(sys.argv[1]), float(sys.argv[2])
began = time.monotonic()
hvd.init()
took, told = time.monotonic() - began, (hvd.rank(), hvd.size())
early = ""
if "ELASTIC_NEWCOMER" in os.environ:
    try:
        hvd.allreduce(torch.ones(1), name="early")
    except ValueError as error:
        early = str(error)
    time.sleep(float(os.environ.get("LATE", "0,0,0,0").split(",")[hvd.rank()]))

model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
resets = []


def write(name: str, **facts: object) -> None:
    with (folder / f"{os.getpid()}.{name}").open("a") as file:
        file.write(json.dumps(facts) + "\n")


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    here = {"rank": hvd.rank(), "size": hvd.size()}
    write("entered", told=told, took=took, early=early, resets=len(resets), step=state.step, **here)
    while not state.over:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        expected = torch.full((1, 4), -float(state.step))
        assert torch.equal(model.weight, expected), (model.weight, state.step)
        time.sleep(pace)
        if state.step % 5 == 0:
            state.over = hvd.broadcast_object((folder / "stop").exists(), 0)
            write("steps", step=state.step, t=time.time(), **here)
            state.commit()


state = hvd.elastic.TorchState(model, optimizer, step=0, over=False)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
write("done", rank=hvd.rank(), size=hvd.size(), step=state.step)
