"""Horovod's API against plain `torch.distributed`, in the same two workers and the same minutes.

Two comparisons, each in blocks that take turns:

- the 106 small tensors of a ResNet-50's batch norms: one coalesced call, our `allreduce_async_`
  of each, and one `all_reduce` after the other;
- a training step with the gradients of 161 parameters, 32 million floats: DDP and
  `DistributedOptimizer`. The forward pass is as short as can be, so nearly all is communication.

A ratio is taken within each block. Times are milliseconds of rank 0.

    python -m benchmarks.horovod [--blocks N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import elastic_driver.horovod.torch as hvd
from benchmarks.common import Figure, report
from benchmarks.systems import running

CLASSES = 4144  # makes 32 million parameters
BLOCKS_OF_RESNET = ((3, 64), (4, 128), (6, 256), (3, 512))
SMALL_TURNS, STEPS = 40, 4  # in a block
SMALL, STEP = "106 small tensors", "step, 161 gradients"
OURS, COALESCED, ONE_BY_ONE, DDP = "hvd", "one coalesced call", "one by one", "DDP"
Way = Callable[[], None]
Samples = dict[str, list[float]]


# ---- in the workers ----------------------------------------------------------------------


def shapes() -> list[tuple[int, ...]]:
    """Return the shapes of a ResNet-50's 161 parameters."""
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inside = 64
    for count, width in BLOCKS_OF_RESNET:
        for number in range(count):
            convolutions = [(width, inside, 1), (width, width, 3), (4 * width, width, 1)]
            if number == 0:
                convolutions.append((4 * width, inside, 1))
            for outputs, inputs, kernel in convolutions:
                found += [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]
            inside = 4 * width
    return [*found, (CLASSES, inside), (CLASSES,)]


class Weights(torch.nn.Module):  # type: ignore[misc]
    """Parameters alone; the loss is half the sum of their squares, the gradients are themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.each = torch.nn.ParameterList(torch.randn(shape) * 0.01 for shape in shapes())

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        return torch.stack([parameter.square().sum() for parameter in self.each]).sum() / 2


def small_ways() -> dict[str, Way]:
    """Return the ways to sum small tensors; each leaves the same results behind."""
    tensors = [torch.ones(shape) for shape in shapes() if len(shape) == 1][:106]
    names = [f"small.{number}" for number in range(len(tensors))]

    def ours() -> None:
        handles = [
            hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
            for tensor, name in zip(tensors, names, strict=True)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def one_by_one() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    return {
        OURS: ours,
        COALESCED: lambda: dist.all_reduce_coalesced(tensors),
        ONE_BY_ONE: one_by_one,
    }


def step_ways() -> dict[str, Way]:
    """Return the ways to train one step."""
    ours, theirs = Weights(), Weights()
    hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=1e-3), named_parameters=ours.named_parameters()
    )
    ddp = DistributedDataParallel(theirs)
    plain = torch.optim.SGD(theirs.parameters(), lr=1e-3)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return {OURS: lambda: step(ours, optimizer), DDP: lambda: step(ddp, plain)}


def timed(ways: dict[str, Way], blocks: int, turns: int) -> Samples:
    """Return the median time of each way in each block; the first block warms up."""
    found: Samples = {way: [] for way in ways}
    for block in range(blocks + 1):
        for name, way in ways.items():
            times = []
            for _ in range(turns):
                dist.barrier()
                began = time.perf_counter()
                way()
                times.append((time.perf_counter() - began) * 1e3)
            if block:
                found[name].append(statistics.median(times))
    return found


def work() -> None:
    """Measure as one worker; rank 0 writes the samples to a file."""
    torch.set_num_threads(1)
    hvd.init()
    blocks = int(os.environ["BLOCKS"])
    found = {
        SMALL: timed(small_ways(), blocks, SMALL_TURNS),
        STEP: timed(step_ways(), blocks, STEPS),
    }
    if hvd.rank() == 0:
        path = Path(os.environ["RECORDS"]) / "samples"
        path.with_suffix(".part").write_text(json.dumps(found))
        path.with_suffix(".part").replace(path)
    hvd.shutdown()


# ---- outside -----------------------------------------------------------------------------


def measured(blocks: int) -> dict[str, Samples]:
    """Return the samples of one job of two workers, by comparison."""
    argv = [sys.executable, "-m", "launcher.cli", "-np", "2", "--state-dir", "{records}", "--"]
    env = {"BLOCKS": str(blocks), "HOW": "horovod"}
    with running("horovod", [*argv, str(Path(__file__).resolve())], env) as system:
        path = system.records_dir / "samples"
        system.until(path.exists, "samples", within=120 + 20 * blocks)
        return dict(json.loads(path.read_text()))


def ratios(samples: Samples, other: str) -> Sequence[float]:
    """Return ours divided by another way, block by block."""
    return tuple(a / b for a, b in zip(samples[OURS], samples[other], strict=True))


def figures_of(found: dict[str, Samples]) -> list[Figure]:
    """Return the times of all ways, and ours as a multiple of the others."""
    figures: list[Figure] = []
    for what, samples in found.items():
        figures += [Figure(way, what, "ms", tuple(times)) for way, times in samples.items()]
    compared: list[tuple[str, Any]] = [(SMALL, COALESCED), (SMALL, ONE_BY_ONE), (STEP, DDP)]
    for what, other in compared:
        against = f"{what}, against {other}"
        figures.append(Figure(OURS, against, "x", tuple(ratios(found[what], other))))
    return figures


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12)
    report("horovod", figures_of(measured(parser.parse_args().blocks)))


if __name__ == "__main__":
    work() if "HOW" in os.environ else main()
