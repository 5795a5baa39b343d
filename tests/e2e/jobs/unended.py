"""A job in which a wait for a peer does not end: a stand-in for an operation that gloo forgets.

At step LOST_STEP of the first round rank 1 leaves, and all connections stay open and unread. So the
collective of rank 0 neither ends nor fails. WAITS_IN: its place, `hook` or `buffers` (of
`elastic.wrap`), or `reducer` (of torch, in C++). THEN: the answer of the script to its end,
`rejoin` or `raise`.
"""

import os
import time
from pathlib import Path

import quick_end
import torch
from torch.nn.parallel import DistributedDataParallel

import elastic_driver as elastic
from elastic_driver.errors import WorldBrokenError
from elastic_driver.worker.world.gloo import GroupConnections

quick_end.prepare()

LOST_STEP, STEPS = 3, 30
THEN = os.environ.get("THEN", "rejoin")
WAITS_IN = os.environ["WAITS_IN"]
WRAP = DistributedDataParallel if WAITS_IN == "reducer" else elastic.wrap
WAITS = Path(os.environ["STEP_RECORDS"], "waits")  # rank 0 begins the step that is lost
GroupConnections.shut_reads = GroupConnections.shut_writes = lambda self: None

model = torch.nn.Linear(4, 1)
if WAITS_IN == "buffers":
    model = torch.nn.Sequential(model, torch.nn.BatchNorm1d(1))
state = elastic.TorchState(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.01), step=0)


def lose_link() -> None:
    if elastic.round_id() == 1 and state.step == LOST_STEP and elastic.rank() == 0:
        WAITS.touch()
    elif elastic.round_id() == 1 and state.step == LOST_STEP:
        until = time.monotonic() + 30
        while not WAITS.exists() and time.monotonic() < until:
            time.sleep(0.01)
        raise WorldBrokenError("this worker's link is cut")


@elastic.run
def train(state):
    print(f"round={elastic.round_id()} rank={elastic.rank()} pid={os.getpid()}", flush=True)
    ddp = WRAP(state.model)
    while state.step < STEPS:
        state.optimizer.zero_grad()
        if WAITS_IN == "buffers":
            lose_link()
        loss = ddp(torch.randn(16, 4)).pow(2).mean()
        if WAITS_IN != "buffers":
            lose_link()
        try:
            loss.backward()
        except RuntimeError:
            if THEN == "raise":
                raise ValueError("the script gives up") from None
            raise
        state.optimizer.step()
        state.step += 1
        state.commit()


train(state)
print(f"done step={state.step} pid={os.getpid()}", flush=True)
