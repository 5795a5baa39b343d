"""Trains over a pretended device (`tests.support.second_gloo`) in NCCL's place, for ever.

FROZEN_MB: the size of a parameter that nothing trains; it differs until the state is shared.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import quick_end
import torch

import elastic_driver as elastic
from elastic_driver.worker.world import session
from elastic_driver.worker.world.groups import BackendChoice
from tests.support.second_gloo import SecondGloo

quick_end.prepare()

STEPS = int(os.environ.get("STEPS", "100000"))
WORKER = os.environ["ELASTIC_WORKER_ID"]

device = SecondGloo()
session.choose_backend = lambda *_: BackendChoice(device)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
trained = list(model.parameters())
if size := int(os.environ.get("FROZEN_MB", "0")) * 2**18:
    model.frozen = torch.nn.Parameter(torch.full((size,), float(os.getpid())), requires_grad=False)
optimizer = torch.optim.Adam(trained, lr=0.01)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0)


def digest():
    found = hashlib.sha256()
    for parameter in model.parameters():
        assert torch.isfinite(parameter).all(), "garbage has come into the parameters"
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()[:12]


@elastic.run
def train(state):
    path = Path(os.environ["STEP_RECORDS"]) / f"{WORKER}.jsonl"
    with path.open("a", buffering=1) as file:
        while state.step < STEPS:
            generator = torch.Generator().manual_seed(state.step * 1000 + elastic.rank())
            x = torch.randn(16, 20, generator=generator)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            for parameter in trained:
                device.all_reduce(parameter.grad.div_(elastic.size()))
            optimizer.step()
            time.sleep(0.01)
            state.step += 1
            facts = {
                "t": time.time(),
                "step": state.step,
                "round": elastic.round_id(),
                "rank": elastic.rank(),
                "size": elastic.size(),
                "pid": os.getpid(),
                "worker": WORKER,
            }
            file.write(json.dumps(facts) + "\n")
            state.commit()


train(state)
print(f"done step={state.step} digest={digest()}", flush=True)
