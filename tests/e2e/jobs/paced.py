"""An elastic job whose steps are real computing, so that a slowed process is a slow rank.

STEPS steps of about WORK_MS milliseconds of one processor, a part IDLE of which is asleep; JITTER
is the sigma of the lognormal factor by which that varies, and one step in a hundred takes five
times as long. Each record says how many times as long as its work the step took (`held_up`).
"""

import json
import os
import random
import time
from pathlib import Path

import quick_end
import torch

import elastic_driver as elastic

quick_end.prepare()

STEPS = int(os.environ.get("STEPS", "100000"))
WORK_S = float(os.environ.get("WORK_MS", "20")) / 1000
JITTER = float(os.environ.get("JITTER", "0"))
IDLE = float(os.environ.get("IDLE", "0"))
RECORDS = Path(os.environ["STEP_RECORDS"])

torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)
matrix = torch.rand(192, 192)


def products(seconds: float) -> int:
    """How many products of the matrix take one processor so long."""
    for _ in range(20):
        matrix @ matrix
    began = time.thread_time()
    for _ in range(100):
        matrix @ matrix
    return max(1, int(seconds * 100 / (time.thread_time() - began)))


PRODUCTS = products(WORK_S)


@elastic.run
def train(state) -> None:
    ddp = elastic.wrap(state.model)
    chance = random.Random(elastic.rank())
    worker = os.environ["ELASTIC_WORKER_ID"]
    with (RECORDS / f"{worker}.jsonl").open("a") as file:
        while state.step < STEPS:
            pause = 5.0 if JITTER and chance.random() < 0.01 else 1.0
            factor = pause * chance.lognormvariate(0.0, JITTER)
            began = time.perf_counter()
            time.sleep(IDLE * WORK_S * factor)
            for _ in range(int((1 - IDLE) * PRODUCTS * factor)):
                matrix @ matrix
            held_up = (time.perf_counter() - began) / (WORK_S * factor)
            state.optimizer.zero_grad()
            ddp(torch.rand(4, 20)).sum().backward()
            state.optimizer.step()
            state.step += 1
            place = {"round": elastic.round_id(), "rank": elastic.rank(), "size": elastic.size()}
            note = {"t": time.time(), "step": state.step, "held_up": held_up, **place}
            file.write(json.dumps({**note, "pid": os.getpid(), "worker": worker}) + "\n")
            file.flush()
            state.commit()


train(state)
