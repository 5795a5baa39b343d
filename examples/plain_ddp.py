"""An ordinary torchrun script, which does not import elastic-driver: env://, DDP, a checkpoint.

    elasticrun -np 2 examples/plain_ddp.py --checkpoint /tmp/plain.pt
    torchrun --nproc-per-node 2 examples/plain_ddp.py --checkpoint /tmp/plain.pt

Such a script is stopped and started again with new ranks whenever workers come or go, and goes on
from its checkpoint. One that uses `elastic.run` keeps its processes: see digits.py.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, whole or not at all: a reader never sees half a file."""
    draft = path.with_suffix(".new")
    torch.save({"step": step, "model": model.state_dict(), "opt": optimizer.state_dict()}, draft)
    draft.replace(path)


def train(steps: int, checkpoint: Path | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = 0
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["opt"])
    if rank == 0:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"{size} workers from step {first}, restart {restarts}", flush=True)

    ddp = DistributedDataParallel(model)
    loss = None  # where the checkpoint is of the last step, none is left
    for step in range(first + 1, steps + 1):
        inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(step * size + rank))
        loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and checkpoint is not None and step % 50 == 0:
            save(checkpoint, step, model, optimizer)
    if rank == 0:
        print(f"done after {steps} steps: loss {'known before' if loss is None else f'{loss:.6f}'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a line, the torchrun way.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()

    dist.init_process_group("gloo")  # RANK, WORLD_SIZE, MASTER_ADDR … come from the launcher
    # In a function of its own, so that the DistributedDataParallel object ends before its group:
    # in the other order torch 2.13 may lock up at exit, under any launcher.
    train(args.steps, args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
