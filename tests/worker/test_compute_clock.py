"""What a step costs a rank by itself: on real groups, with one rank slower than the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastic_driver as elastic
from elastic_driver.worker.compute_clock import ComputeClock
from tests.support.gloo import run_ranks

SLOW_S = 0.06  # what rank 1 needs more for a pass; the others wait for it


class Slow(nn.Module):
    """A model whose forward pass takes rank 1 longer."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.pause = SLOW_S if rank == 1 else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        result: torch.Tensor = self.layers(x)
        return result


def measured(
    model: nn.Module, step: Callable[[Any], None], kind: type[ComputeClock] = ComputeClock
) -> list[float | None]:
    """The laps of eight steps."""
    optimizer = torch.optim.Adam(model.parameters())
    clock = kind()
    clock.watch([optimizer])
    laps = []
    for _ in range(8):
        step(optimizer)
        lap = clock.finish_step()()
        laps.append(None if lap is None else lap.compute)
    return laps


def wrapped(rank: int, _size: int) -> list[float | None]:
    model = DistributedDataParallel(Slow(rank))

    def step(optimizer: Any) -> None:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()

    return measured(model, step)


def wrapped_and_accumulated(
    rank: int, _size: int, kind: type[ComputeClock] = ComputeClock
) -> list[float | None]:
    """Two passes a step, and both wait for the others."""
    model = DistributedDataParallel(Slow(rank))

    def step(optimizer: Any) -> None:
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
        optimizer.step()

    return measured(model, step, kind)


def averaged_by_hand(rank: int, size: int) -> list[float | None]:
    model = Slow(rank)

    def step(optimizer: Any) -> None:
        model(torch.randn(2, 4)).sum().backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()

    return measured(model, step)


def fixed_batch(
    rank: int, _size: int, kind: type[ComputeClock] = ComputeClock
) -> list[float | None]:
    """Four micro-batches on three ranks: rank 0 has two, and yet is not slow."""
    model = Slow(0 if rank == 0 else 1)
    batches = elastic.FixedBatch(torch.randn(64, 4), 2, model=model, virtual_workers=4)
    steps = iter(batches)

    def step(optimizer: Any) -> None:
        for inputs in next(steps):
            model(inputs).sum().backward()
        optimizer.step()

    return measured(model, step, kind)


def usual(laps: list[float | None]) -> float:
    assert laps[0] is None, "the first step was not seen whole"
    known = [lap for lap in laps if lap is not None]
    assert len(known) == len(laps) - 1
    return statistics.median(known)


@pytest.mark.parametrize("job", [wrapped, wrapped_and_accumulated, averaged_by_hand])
def test_waiting_for_a_slower_rank_is_left_out(job: Any, tmp_path: Path) -> None:
    fast, slow = map(usual, run_ranks(2, job, tmp_path))
    assert slow >= SLOW_S
    assert fast < SLOW_S / 2, "rank 0 waits for rank 1, and computes next to nothing"


def test_a_rank_with_more_micro_batches_is_not_slower(tmp_path: Path) -> None:
    double, *single = map(usual, run_ranks(3, fixed_batch, tmp_path))
    assert double < SLOW_S / 2
    for time_of_one in single:
        assert SLOW_S <= time_of_one < 1.5 * SLOW_S


# ---- what is no measured step ------------------------------------------------------------


def one_rank() -> tuple[nn.Module, torch.optim.Optimizer, ComputeClock]:
    model = Slow(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = ComputeClock()
    clock.watch([optimizer])
    clock.finish_step()()
    return model, optimizer, clock


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


def test_a_step_without_a_backward_pass_or_without_the_optimizer_is_not_measured() -> None:
    model, optimizer, clock = one_rank()
    assert clock.finish_step()() is None
    model(torch.randn(2, 4)).sum().backward()
    assert clock.finish_step()() is None
    optimizer.step()
    assert clock.finish_step()() is None
    train(model, optimizer)
    assert clock.finish_step()() is not None


def test_the_first_step_after_a_change_of_the_world_is_not_measured() -> None:
    model, optimizer, clock = one_rank()
    train(model, optimizer)
    clock.restart()
    train(model, optimizer)
    assert clock.finish_step()() is None
    train(model, optimizer)
    assert clock.finish_step()() is not None


def test_what_is_done_after_the_optimizer_counts() -> None:
    model, optimizer, clock = one_rank()
    train(model, optimizer)
    time.sleep(0.03)
    lap = clock.finish_step()()
    assert lap is not None
    assert lap.compute - lap.one_pass >= 0.03, "no part of the pass: others cannot take it over"


def test_a_frozen_last_layer_does_not_blind_the_clock() -> None:
    model = Slow(0)
    for parameter in model.layers[2].parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = ComputeClock()
    clock.watch([optimizer])
    clock.finish_step()()
    train(model, optimizer)
    assert clock.finish_step()() is not None


def test_other_optimizers_take_the_place_of_the_first_and_leave_nothing_behind() -> None:
    model, optimizer, clock = one_rank()
    clock.watch([])
    train(model, optimizer)
    assert clock.finish_step()() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one, as people write them: without torch's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, groups: Any) -> None:
        self.optimizer, self.param_groups = optimizer, groups

    def step(self, closure: Any = None) -> Any:
        return None if self.optimizer is None else self.optimizer.step(closure)


def test_an_optimizer_that_wraps_another_one_is_followed_by_that_ones_steps() -> None:
    model, optimizer, clock = one_rank()
    outer = Wrapping(optimizer, optimizer.param_groups)
    clock.watch([outer])
    train(model, outer)
    clock.finish_step()()
    train(model, outer)
    assert clock.finish_step()() is not None


def test_an_optimizer_without_hooks_is_not_measured() -> None:
    model, optimizer, clock = one_rank()
    outer = Wrapping(None, optimizer.param_groups)
    clock.watch([outer])
    for _ in range(3):
        train(model, outer)
        assert clock.finish_step()() is None


def test_what_is_computed_behind_the_passes_is_told_apart_from_waiting() -> None:
    model, optimizer, clock = one_rank()
    train(model, optimizer)
    clock.finish_step()()
    model(torch.randn(2, 4)).sum().backward()
    until = time.process_time() + 0.03
    while time.process_time() < until:  # as whoever sums gradients
        pass
    time.sleep(0.05)  # and then waits for its peers
    optimizer.step()
    lap = clock.finish_step()()
    assert lap is not None
    assert lap.exchange >= 0.03
    assert lap.exchange < 0.08 - 0.01, "waiting is not in it"
    assert lap.compute < 0.03, "nor is it taken for the rank's own part of a step"
