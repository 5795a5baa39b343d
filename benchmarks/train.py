"""The training script of all benchmarks: the same model, step and records for each system.

    HOW=elastic   under elasticrun, with the elastic API
    HOW=fixed     the same, with a fixed batch whose micro-batches take WORK_MS of a processor
    HOW=plain     under torchrun or elasticrun, env:// initialisation

Each finished step becomes a JSON line {t, step, round, rank, size, pid} in $RECORDS/<pid>.jsonl. A
plain script saves a snapshot each step, as scripts for torchrun have to. STATE_MB adds parameters
that no step uses, so that the state to transfer has the wanted size.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elastic_driver as elastic
from benchmarks.peers.floor import make_model

RECORDS = Path(os.environ.get("RECORDS", "."))
STEP_S = float(os.environ.get("STEP_MS", "15")) / 1000
STEPS = int(os.environ.get("STEPS", "1000000"))
WORK_S = float(os.environ.get("WORK_MS", "1")) / 1000
STATE_MB = float(os.environ.get("STATE_MB", "0"))


def one_step(ddp: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make one step (forward, backward, update) that takes STEP_S seconds."""
    started = time.perf_counter()
    optimizer.zero_grad()
    ddp(torch.randn(8, 64)).pow(2).mean().backward()
    time.sleep(max(0.0, STEP_S - (time.perf_counter() - started)))
    optimizer.step()


def record(file: TextIO, step: int, number: int, rank: int, size: int) -> None:
    """Record that this process has finished `step`."""
    place = {"round": number, "rank": rank, "size": size}
    line = {"t": time.time(), "step": step, **place, "pid": os.getpid()}
    file.write(json.dumps(line) + "\n")
    file.flush()


def ballast() -> torch.nn.Module:
    """Return frozen parameters of STATE_MB megabytes: newcomers receive them, no step uses them."""
    module = torch.nn.Module()
    for index in range(max(0, round(STATE_MB / 4))):
        block = torch.nn.Parameter(torch.zeros(1024, 1024), requires_grad=False)
        module.register_parameter(f"block{index}", block)
    return module


def plain() -> None:
    """Train as for torchrun: resume from the snapshot, save a snapshot each step."""
    dist.init_process_group("gloo")
    model, optimizer = make_model()
    snapshot = RECORDS / "snapshot.pt"
    step = 0
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=True)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    ddp = DistributedDataParallel(model)
    # Each agent of torchrun counts its own restarts, and none that follow a change of the nodes.
    world = torch.tensor(time.time_ns() // 1_000_000)
    dist.all_reduce(world, dist.ReduceOp.MAX)
    with (RECORDS / f"{os.getpid()}.jsonl").open("a") as file:
        while step < STEPS:
            one_step(ddp, optimizer)
            step += 1
            if dist.get_rank() == 0:
                fresh = snapshot.with_suffix(f".{os.getpid()}")
                torch.save({"model": model.state_dict(), "step": step}, fresh)
                fresh.replace(snapshot)
            record(file, step, int(world), dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def elastic_main() -> None:
    """Train with the elastic API: state in memory, a commit each step."""
    model, optimizer = make_model()
    more = {"ballast": ballast()} if STATE_MB else {}
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0, **more)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        ddp = elastic.wrap(state.model)
        with (RECORDS / f"{os.getpid()}.jsonl").open("a") as file:
            while state.step < STEPS:
                one_step(ddp, state.optimizer)
                state.step += 1
                record(file, state.step, elastic.round_id(), elastic.rank(), elastic.size())
                state.commit()

    train(state)


def fixed() -> None:
    """Train with a fixed batch, of micro-batches that each take WORK_S seconds."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = elastic.FixedBatch(torch.randn(4096, 64), 1, model=model)
    state = elastic.TorchState(model=model, optimizer=optimizer, batches=batches, step=0)

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        with (RECORDS / f"{os.getpid()}.jsonl").open("a") as file:
            while state.step < STEPS:
                for step in batches:
                    for inputs in step:
                        began = time.thread_time()
                        model(inputs).pow(2).mean().backward()
                        while time.thread_time() - began < WORK_S:
                            pass
                    state.optimizer.step()
                    state.step += 1
                    record(file, state.step, elastic.round_id(), elastic.rank(), elastic.size())
                    state.commit()

    train(state)


if __name__ == "__main__":
    {"elastic": elastic_main, "fixed": fixed, "plain": plain}[os.environ["HOW"]]()
