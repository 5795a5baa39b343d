"""Trains with a rate that follows the number of workers, through Horovod's API or our own.

    python rescaled.py FOLDER horovod|native set|multiplied

The reset callback sets the rate, or multiplies it. Each process writes, after each step, the size
of the world, the rate and a digest of weights and momentum. Ends ten steps after the third worker.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import elastic_driver as elastic
import elastic_driver.horovod.torch as hvd

folder, api, rule = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
BASE = 0.01
with_horovod = api == "horovod"
if with_horovod:
    hvd.init()
here = hvd if with_horovod else elastic
model = torch.nn.Linear(3, 1)
size_at_start = hvd.size() if with_horovod else 1
optimizer = torch.optim.SGD(model.parameters(), lr=BASE * size_at_start, momentum=0.5)
if with_horovod:
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0, left=10, workers=size_at_start)
else:
    state = elastic.TorchState(
        model=model, optimizer=optimizer, step=0, left=10, workers=size_at_start
    )


def adapt_the_rate() -> None:
    for group in optimizer.param_groups:
        factor = here.size() / state.workers
        group["lr"] = group["lr"] * factor if rule == "multiplied" else BASE * here.size()
    state.workers = here.size()


def digest() -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
        found.update(optimizer.state[parameter]["momentum_buffer"].numpy().tobytes())
    return found.hexdigest()[:16]


def train(state: elastic.TorchState) -> None:
    net = model if with_horovod else elastic.wrap(model)
    torch.manual_seed(state.step * 10 + here.rank())  # batches of each rank's own
    while state.left:
        optimizer.zero_grad()
        net(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.left -= here.size() == 3
        facts = {"step": state.step, "rank": here.rank(), "size": here.size(), "digest": digest()}
        rate = optimizer.param_groups[0]["lr"]
        with (folder / f"{os.getpid()}.steps").open("a") as file:
            file.write(json.dumps({**facts, "rate": rate, "t": time.time()}) + "\n")
        time.sleep(0.05)
        state.commit()


state.register_reset_callbacks([adapt_the_rate])
(hvd.elastic.run if with_horovod else elastic.run)(train)(state)
