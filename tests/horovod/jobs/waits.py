"""Trains quick steps; after the tenth, rank 0 waits until a change of the world is announced.

Each process writes the step and the size of each world that it enters.
"""

import os
import sys
import time
from pathlib import Path

import torch

import elastic_driver.horovod.torch as hvd

folder = Path(sys.argv[1])
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    with (folder / f"{os.getpid()}.entered").open("a") as file:
        file.write(f"{state.step} {hvd.size()}\n")
    while state.step < 20:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        if state.step == 10 and hvd.rank() == 0:
            (folder / "waits").touch()
            until = time.monotonic() + 60
            while state._host_messages.empty():
                assert time.monotonic() < until
                time.sleep(0.01)
        state.commit()


train(hvd.elastic.TorchState(model, optimizer, step=0))
