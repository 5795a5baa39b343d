"""The cost of exactness: FixedBatch and its deterministic mode against DistributedDataParallel.

All four ways train the same model on the same number of samples a step, in the same processes, in
turn (block by block), so that a busy machine slows them alike. Ratios are taken within a block, and
their median is the figure.

    python -m benchmarks.exact [--ranks 2] [--blocks 15] [--steps 20] [--models digits wide]

On a machine that others use too, read the processor's time as well: it does not contain waiting
for the processor. `accumulation` is the loop written by hand: DDP, with `no_sync()` for all
micro-batches but the last. `one batch` is DDP with the rank's whole share as a single batch.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.common import Figure, report
from elastic_driver.worker.batches import FixedBatch

VIRTUAL, MICRO = 8, 16
WAYS = ("one batch", "accumulation", "FixedBatch", "deterministic")
PAIRS = (
    ("FixedBatch", "accumulation"),
    ("deterministic", "accumulation"),
    ("deterministic", "one batch"),
)
Epochs = Iterator[None]
Times = dict[str, list[tuple[float, float]]]  # seconds a step, by the clock and of the processor


def digits() -> tuple[nn.Module, TensorDataset]:
    """The model of examples/digits_exact.py; random images, since only time counts."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    return model, TensorDataset(torch.randn(1792, 1, 8, 8), torch.randint(0, 10, (1792,)))


def wide() -> tuple[nn.Module, TensorDataset]:
    """4.2 million parameters: gradients that take time to add."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(nn.Linear(64, 1024), *layers, nn.Linear(1024, 10))
    return model, TensorDataset(torch.randn(1792, 64), torch.randint(0, 10, (1792,)))


def by_hand(model: nn.Module, data: TensorDataset, micro: int, ranks: int) -> Epochs:
    """Make the optimizer steps of a loop written by hand."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parts = VIRTUAL * MICRO // ranks // micro
    sampler: DistributedSampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=micro, sampler=sampler)
    while True:
        optimizer.zero_grad()
        part = 0
        for inputs, labels in loader:
            last = part == parts - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                (nn.functional.cross_entropy(ddp(inputs), labels) / parts).backward()
            part += 1
            if last:
                optimizer.step()
                optimizer.zero_grad()
                part = 0
                yield


def fixed(model: nn.Module, data: TensorDataset, deterministic: bool) -> Epochs:
    """Make the optimizer steps of a FixedBatch."""
    batches = FixedBatch(
        data, MICRO, model=model, virtual_workers=VIRTUAL, deterministic=deterministic
    )
    torch.use_deterministic_algorithms(False)  # for the other ways
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    while True:
        for step in batches:
            for inputs, labels in step:
                nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            yield


def measure(rank: int, ranks: int, store: str, args: argparse.Namespace, results: mp.Queue) -> None:
    """Run every way in turn, block by block, as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for name in args.models:
        make = MODELS[name]
        torch.manual_seed(0)
        runs = {
            "one batch": by_hand(*make(), VIRTUAL * MICRO // ranks, ranks),
            "accumulation": by_hand(*make(), MICRO, ranks),
            "FixedBatch": fixed(*make(), deterministic=False),
            "deterministic": fixed(*make(), deterministic=True),
        }
        times: Times = {way: [] for way in runs}
        for block in range(args.blocks + 1):
            for way, steps in runs.items():
                torch.use_deterministic_algorithms(way == "deterministic")
                dist.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(args.steps):
                    next(steps)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                if block:  # the first one warms up
                    times[way].append((wall / args.steps, cpu / args.steps))
        if rank == 0:
            results.put((name, times))
        dist.barrier()
    dist.destroy_process_group()


MODELS: dict[str, Callable[[], tuple[nn.Module, TensorDataset]]] = {"digits": digits, "wide": wide}


def main() -> None:
    """Measure and print the tables: seconds a step, and ratios within a block."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    figures, ratios = [], []
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        results = context.Queue()
        shared = (args.ranks, f"{folder}/store", args, results)
        mp.spawn(measure, shared, nprocs=args.ranks)
        for _ in args.models:
            name, times = results.get()
            for kind, index in (("wall", 0), ("cpu", 1)):
                taken = {way: [pair[index] for pair in times[way]] for way in WAYS}
                for way in WAYS:
                    figures.append(Figure(way, f"{name}: {kind}", "s", tuple(taken[way])))
                for way, against in PAIRS:
                    pairs = zip(taken[way], taken[against], strict=True)
                    samples = tuple(a / b for a, b in pairs)
                    ratios.append(Figure(way, f"{name}: {kind} against {against}", "x", samples))
    report("exact", [*figures, *ratios])
    for ratio in ratios:
        low, *_, high = statistics.quantiles(ratio.samples, n=4)
        spread = f"half of the blocks {low:.2f} … {high:.2f}"
        print(
            f"  {ratio.figure}: {ratio.system} {statistics.median(ratio.samples):.2f} x ({spread})"
        )


if __name__ == "__main__":
    main()
