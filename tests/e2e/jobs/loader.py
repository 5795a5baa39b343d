"""An elastic job that reads its data with a DataLoader; knobs come from the environment.

Trains to STEPS in steps of about STEP_MS milliseconds, with a checkpoint in the folder CHECKPOINTS
only when all have to leave. LOADERS is the loader's `num_workers`. With HELPER each worker needs a
program that it has started. Its last line tells a fingerprint of the weights; TRAIL is a file that
gets the one after each step, from rank 0.
"""

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import elastic_driver as elastic

STEPS = int(os.environ["STEPS"])
STEP_S = float(os.environ.get("STEP_MS", "20")) / 1000
NEVER = 1_000_000  # steps from one checkpoint to the next

torch.set_num_threads(1)
torch.manual_seed(0)


class Numbers(Dataset):
    """Vectors that follow from their index."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.randn(20, generator=torch.Generator().manual_seed(index))


model = torch.nn.Linear(20, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = elastic.ElasticSampler(Numbers(), shuffle=True, seed=0)
loader = DataLoader(
    Numbers(),
    batch_size=4,
    sampler=sampler,
    num_workers=int(os.environ.get("LOADERS", "0")),
    multiprocessing_context=os.environ.get("CONTEXT"),
)
state = elastic.TorchState(
    model=model,
    optimizer=optimizer,
    sampler=sampler,
    epoch=0,
    step=0,
    checkpoint_dir=os.environ["CHECKPOINTS"],
    every=NEVER,
)


def note(file):
    context = {
        "t": time.time(),
        "step": state.step,
        "round": elastic.round_id(),
        "rank": elastic.rank(),
        "size": elastic.size(),
        "pid": os.getpid(),
        "worker": os.environ["ELASTIC_WORKER_ID"],
    }
    file.write(json.dumps(context) + "\n")
    file.flush()


def fingerprint():
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in model.state_dict().values()))
    return digest.hexdigest()[:16]


def mark():
    if (trail := os.environ.get("TRAIL")) is not None and elastic.rank() == 0:
        with Path(trail).open("a") as file:
            file.write(f"{state.step} {fingerprint()}\n")


@elastic.run
def train(state):
    ddp = elastic.wrap(state.model)
    print(f"enters step={state.step} size={elastic.size()}", flush=True)
    name = os.environ["ELASTIC_WORKER_ID"]
    with Path(os.environ["STEP_RECORDS"], f"{name}.jsonl").open("a") as file:
        helper = subprocess.Popen(["sleep", "600"]) if "HELPER" in os.environ else None
        while state.step < STEPS:
            sampler.set_epoch(state.epoch)
            for x in loader:
                optimizer.zero_grad()
                (ddp(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
                time.sleep(STEP_S)
                if helper is not None and helper.poll() is not None:
                    raise RuntimeError("the helper has gone")
                optimizer.step()
                state.step += 1
                note(file)
                mark()
                state.commit()
                if state.step == STEPS:
                    return
            state.epoch += 1


if __name__ == "__main__":
    train(state)
    print(f"done step={state.step} weights={fingerprint()}", flush=True)
