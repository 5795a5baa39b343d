"""A step's own time, read on a real GPU, whose processor runs ahead."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch import nn

from elastic_driver.worker.compute_clock import DeviceClock

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible"),
]

CYCLES = 20_000_000


def seconds_of(cycles: int) -> float:
    """How long this GPU is busy for so many cycles."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    torch.cuda._sleep(cycles)
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / 1000


def test_what_the_gpu_computes_counts_and_what_it_waits_for_does_not() -> None:
    seconds_of(CYCLES)
    busy = seconds_of(CYCLES)
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = DeviceClock()
    clock.watch([optimizer])
    laps = []
    for _ in range(8):
        torch.cuda._sleep(CYCLES)
        model(torch.ones(4, 64, device="cuda")).sum().backward()
        torch.cuda._sleep(3 * CYCLES)  # as a stream does that waits for a slower rank
        torch.cuda.synchronize()
        optimizer.step()
        laps.append(clock.finish_step()())
    known = [lap.compute for lap in laps if lap is not None]
    assert len(known) >= 5
    assert 0.9 * busy < statistics.median(known) < 2 * busy


def test_nobody_waits_for_the_gpu() -> None:
    model = nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = DeviceClock()
    clock.watch([optimizer])
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    clock.finish_step()()
    busy = seconds_of(10 * CYCLES)
    torch.cuda._sleep(10 * CYCLES)
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    begun = time.perf_counter()
    clock.finish_step()()
    assert time.perf_counter() - begun < busy / 2
