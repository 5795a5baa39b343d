"""Trains what one process can train, too, and compares the losses.

All ranks have the same batch, so the average of their gradients is that of one process, but for
rounding. WITH has words: `stream` (a stream of its own), `compile` (torch.compile), `scaler` (a
GradScaler, with a loss that is infinite at each tenth step), `hang` (the training thread of rank 1
hangs once, and the others read their loss while they wait for it). After each step a worker writes
down the model's bits, Adam's count of its steps and the scaler's scale. In the end each trains all
steps again, alone and without those words but `scaler`, and tells the largest relative difference
of a loss.
"""

import contextlib
import json
import os
import threading
import time
from pathlib import Path

os.environ["NCCL_HOSTID"] = os.environ["ELASTIC_WORKER_ID"]  # several ranks share one device

import torch
import torch.distributed as dist

import elastic_driver as elastic

DEVICE, BACKEND = os.environ["DEVICE"], os.environ["BACKEND"]
WITH = set(os.environ.get("WITH", "").split())
STEPS, WIDTH = int(os.environ["STEPS"]), int(os.environ.get("WIDTH", "512"))
STEP_S = float(os.environ.get("STEP_MS", "20")) / 1000
WORKER = os.environ["ELASTIC_WORKER_ID"]
RECORDS = Path(os.environ["STEP_RECORDS"])
HANG_STEP = 30
VALUES = RECORDS.parent / "values"
VALUES.mkdir(exist_ok=True)
elastic.init(backend=BACKEND)


class Training:
    """A model, its optimizer and its scaler; equal from the beginning on all ranks."""

    def __init__(self):
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, 1),
        ).to(DEVICE)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-4, eps=1e-3)
        self.scaler = torch.amp.GradScaler(
            DEVICE, init_scale=2.0**12, growth_interval=6, enabled="scaler" in WITH
        )

    def step(self, net, number):
        """Take a step; return its loss."""
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(64, 32, generator=generator).to(DEVICE)
        self.optimizer.zero_grad()
        kind = torch.float16 if DEVICE == "cuda" else torch.bfloat16
        with torch.autocast(DEVICE, kind, enabled=self.scaler.is_enabled()):
            loss = (net(inputs) - inputs.sin().sum(1, keepdim=True)).pow(2).mean()
        if "hang" in WITH and number == HANG_STEP and net is not self.model:
            hang_once()
        whole = loss * torch.inf if "scaler" in WITH and number % 10 == 7 else loss
        self.scaler.scale(whole).backward()
        if "hang" in WITH:
            loss.item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def bits(self):
        """Sums of the parameters' bits."""
        parameters = (parameter.detach() for parameter in self.model.parameters())
        return [int(p.view(torch.int32).sum(dtype=torch.int64)) for p in parameters]

    def updates(self):
        """How often the optimizer has changed the model."""
        states = self.optimizer.state.values()
        return int(max((float(each["step"]) for each in states), default=0))


def hang_once():
    mark = RECORDS.parent / "hung"
    if elastic.rank() == 1 and not mark.exists():
        mark.write_text(f"{os.getpid()} {time.time()}")
        threading.Event().wait()


def write(path, facts):
    with path.open("a") as file:
        file.write(json.dumps(facts) + "\n")


def own_stream():
    if "stream" not in WITH or DEVICE != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


training = Training()
net = torch.compile(training.model) if "compile" in WITH else training.model
parts = {"model": training.model, "optimizer": training.optimizer}
if "scaler" in WITH:
    parts["scaler"] = training.scaler
state = elastic.TorchState(**parts, step=0, losses=[])
state.local("losses")  # each rank's own: a device rounds the same batch in more than one way


@elastic.run
def train(state):
    ddp = elastic.wrap(net)
    with own_stream():
        while state.step < STEPS:
            loss = training.step(ddp, state.step)
            state.step += 1
            state.losses.append(loss.item())
            here = {"step": state.step, "updates": training.updates(), "bits": training.bits()}
            write(VALUES / WORKER, {**here, "scale": training.scaler.get_scale()})
            place = {"rank": elastic.rank(), "size": elastic.size(), "worker": WORKER}
            about = {"t": time.time(), "step": state.step, "round": elastic.round_id(), **place}
            write(RECORDS / f"{WORKER}.jsonl", {**about, "pid": os.getpid()})
            time.sleep(STEP_S)
            state.commit()


train(state)
backend = dist.get_backend()
alone = Training()
difference = 0.0
for number, loss in enumerate(state.losses):
    expected = alone.step(alone.model, number).item()
    difference = max(difference, abs(loss - expected) / abs(expected))
print(
    f"done step={state.step} losses={len(state.losses)} first={state.losses[0]:.4f} "
    f"last={state.losses[-1]:.4f} difference={difference:.2e} backend={backend}",
    flush=True,
)
