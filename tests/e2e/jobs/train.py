"""A small elastic job that writes down every finished step; knobs come from the environment.

STEPS steps of about STEP_MS milliseconds, of a model of about 80 WIDTH bytes; FAIL_STEP,
FAIL_RANK and FAIL_HOW make a worker fail. END_AFTER: a file without which no worker's process ends
(within a minute). CURVE: steps of STEP_MS that the job does at once with 1, 2, … workers, for
example `1 1.8 2.4`. NICE: the priority of the steps, as for nice(1), where that is allowed. With
TALK, every step is a line of output. Each step keeps GROW_MIB more memory. With UNWRAPPED, ranks
train on the same samples and only wait for each other, so that nothing is known of their gradients.
"""

import atexit
import contextlib
import json
import os
import time
from pathlib import Path

import quick_end
import torch

import elastic_driver as elastic

quick_end.prepare()

STEPS = int(os.environ.get("STEPS", "200"))
WIDTH = int(os.environ.get("WIDTH", "50"))
STEP_S = float(os.environ.get("STEP_MS", "10")) / 1000
FAIL_STEP = int(os.environ.get("FAIL_STEP", "-1"))
FAIL_RANK = int(os.environ.get("FAIL_RANK", "-1"))
FAIL_HOW = os.environ.get("FAIL_HOW", "raise")
CURVE = [float(word) for word in os.environ.get("CURVE", "").split()]
GROW = int(os.environ.get("GROW_MIB", "0")) * 2**20
RECORDS = Path(os.environ["STEP_RECORDS"])


def hold_end(path: Path) -> None:
    """Wait for the file; this runs when the script is over."""
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


if "END_AFTER" in os.environ:
    atexit.register(hold_end, Path(os.environ["END_AFTER"]))
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(20, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = elastic.TorchState(model=model, optimizer=optimizer, step=0, trail=[])


def note(file, began) -> None:
    context = {
        "began": began,
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


def maybe_fail() -> None:
    if state.step + 1 == FAIL_STEP and FAIL_RANK in (-1, elastic.rank()):
        if FAIL_HOW == "raise":
            raise ValueError(f"boom at step {FAIL_STEP}")
        os._exit(int(FAIL_HOW))


@elastic.run
def train(state):
    unwrapped = "UNWRAPPED" in os.environ
    ddp = state.model if unwrapped else elastic.wrap(state.model)
    step_s = STEP_S * elastic.size() / CURVE[elastic.size() - 1] if CURVE else STEP_S
    path, kept = RECORDS / f"{os.environ['ELASTIC_WORKER_ID']}.jsonl", []
    with path.open("a") as file:
        while state.step < STEPS:
            began, started = time.time(), time.perf_counter()
            maybe_fail()
            share = 0 if unwrapped else elastic.rank()
            generator = torch.Generator().manual_seed(state.step * 1000 + share)
            x = torch.randn(16, 20, generator=generator)
            loss = (ddp(x) - x.sum(1, keepdim=True)).pow(2).mean()
            state.optimizer.zero_grad()
            loss.backward()
            if unwrapped and elastic.size() > 1:
                torch.distributed.all_reduce(torch.zeros(1))
            time.sleep(max(0.0, step_s - (time.perf_counter() - started)))
            kept.append(b"x" * GROW)
            state.optimizer.step()
            state.step += 1
            note(file, began)
            if "TALK" in os.environ:
                print(f"step {state.step} of rank {elastic.rank()} {'-' * 40}", flush=True)
            elastic.report_progress(samples=len(x), total=STEPS, loss=loss.item())
            state.commit()


with contextlib.suppress(PermissionError):
    os.nice(int(os.environ.get("NICE", "0")))
train(state)
digest = sum(float(p.detach().double().sum()) for p in model.parameters())
print(f"done step={state.step} digest={digest:.12f} size={elastic.size()}", flush=True)
