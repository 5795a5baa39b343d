"""An elastic job with durable checkpoints; knobs come from the environment.

Trains to STEPS in steps of about STEP_MS milliseconds, with a checkpoint every EVERY steps in the
folder CHECKPOINTS. Each step and its last line tell a fingerprint of model and optimizer.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import quick_end
import torch

import elastic_driver as elastic

quick_end.prepare()

STEPS = int(os.environ["STEPS"])
STEP_S = float(os.environ.get("STEP_MS", "10")) / 1000
WIDTH = int(os.environ.get("WIDTH", "64"))

model = torch.nn.Sequential(torch.nn.Linear(20, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = elastic.TorchState(
    model=model,
    optimizer=optimizer,
    step=0,
    trail=[],
    checkpoint_dir=os.environ["CHECKPOINTS"],
    every=int(os.environ.get("EVERY", "20")),
)


def fingerprint():
    digest = hashlib.sha256()
    moments = [t for s in optimizer.state_dict()["state"].values() for t in s.values()]
    for tensor in [*model.state_dict().values(), *moments]:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def note(file, **more):
    context = {
        "t": time.time(),
        "step": state.step,
        "round": elastic.round_id(),
        "rank": elastic.rank(),
        "size": elastic.size(),
        "pid": os.getpid(),
        "worker": os.environ["ELASTIC_WORKER_ID"],
    }
    file.write(json.dumps({**context, **more}) + "\n")
    file.flush()


@elastic.run
def train(state):
    ddp = elastic.wrap(state.model)
    assert state.trail == list(range(1, state.step + 1))
    print(f"enters step={state.step} version={state.version} weights={fingerprint()}", flush=True)
    name = os.environ["ELASTIC_WORKER_ID"]
    folder = Path(os.environ["STEP_RECORDS"])
    with (folder / f"{name}.jsonl").open("a") as file, (folder / f"{name}.weights").open("a") as w:
        while state.step < STEPS:
            generator = torch.Generator().manual_seed(state.step)
            x = torch.randn(16, 20, generator=generator)
            optimizer.zero_grad()
            (ddp(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
            time.sleep(STEP_S)
            optimizer.step()
            state.step += 1
            state.trail.append(state.step)
            w.write(f"{state.step} {fingerprint()}\n")
            w.flush()
            note(file)
            state.commit()


train(state)
print(f"done step={state.step} size={elastic.size()} weights={fingerprint()}", flush=True)
