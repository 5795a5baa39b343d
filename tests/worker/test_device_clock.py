"""The clock for parameters on a GPU, with a device that is a double: its time is the processor's.

The passes, the groups and the waiting are real. `tests/gpu` has a real device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic_driver.worker.compute_clock import ComputeClock, DeviceClock, clock_for
from tests.support.gloo import run_ranks
from tests.worker.test_compute_clock import (
    SLOW_S,
    Slow,
    fixed_batch,
    wrapped_and_accumulated,
)


class Passed:
    """A moment that the device passes `late` seconds after it was asked to."""

    late = 0.0

    def __init__(self) -> None:
        self.at = time.perf_counter() + self.late

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def elapsed_time(self, later: Any) -> float:
        return float(later.at - self.at) * 1000


class Doubled(DeviceClock):
    """On the processor, whose moments always pass; `capturing` as in a CUDA graph."""

    times = staticmethod(lambda device: device.type == "cpu")
    capturing = False

    def _moment(self) -> Passed | None:
        return None if self.capturing else Passed()


def usual(laps: list[float | None]) -> float:
    assert laps[:2] == [None, None], "the first was not seen whole, the second comes with the third"
    return statistics.median(lap for lap in laps[2:] if lap is not None)


def test_waiting_for_a_slower_rank_is_left_out(tmp_path: Path) -> None:
    fast, slow = map(usual, run_ranks(2, wrapped_and_accumulated, tmp_path, Doubled))
    assert slow >= SLOW_S
    assert fast < SLOW_S / 2


def test_a_rank_with_more_micro_batches_is_not_slower(tmp_path: Path) -> None:
    double, *single = map(usual, run_ranks(3, fixed_batch, tmp_path, Doubled))
    assert double < SLOW_S / 2
    for time_of_one in single:
        assert SLOW_S <= time_of_one < 1.5 * SLOW_S


@pytest.fixture
def trainer() -> tuple[Doubled, Callable[[], None]]:
    model = Slow(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = Doubled()
    clock.watch([optimizer])
    clock.finish_step()()

    def train() -> None:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()

    return clock, train


def test_a_step_is_told_with_the_next_one_if_the_device_has_passed_it(
    trainer: tuple[Doubled, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, train = trainer
    train()
    time.sleep(0.03)
    assert clock.finish_step()() is None
    monkeypatch.setattr(Passed, "late", 60.0)
    train()
    lap = clock.finish_step()()
    assert lap is not None
    assert lap.compute - lap.one_pass >= 0.03, "what is done after the optimizer counts"
    train()
    assert clock.finish_step()() is None, "the device is not that far, and nobody waits for it"


def test_what_is_recorded_for_later_or_not_seen_whole_is_not_measured(
    trainer: tuple[Doubled, Callable[[], None]],
) -> None:
    clock, train = trainer
    clock.capturing = True
    train()
    clock.capturing = False
    assert clock.finish_step()() is None
    assert clock.finish_step()() is None, "the captured one"
    train()
    clock.restart()
    train()
    assert clock.finish_step()() is None
    train()
    assert clock.finish_step()() is None, "the world changed in it"
    assert clock.finish_step()() is not None


def test_a_clock_follows_the_parameters_of_its_own_kind_of_device() -> None:
    followed = []
    for device in ("meta", "cpu"):  # the first is not the processor either
        for clock in (DeviceClock(), ComputeClock()):
            layer = nn.Linear(2, 2, device=device)
            clock.watch([torch.optim.SGD(layer.parameters(), lr=0.1)])
            followed.append(len(layer.bias._post_accumulate_grad_hooks or {}))
    assert followed == [1, 0, 0, 1]


def test_the_clock_is_that_of_the_device_that_trains() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = DeviceClock()
    before.watch([])
    clock = clock_for([optimizer], before)
    assert type(clock) is ComputeClock
    assert clock_for([optimizer], clock) is clock
    assert len(layer.bias._post_accumulate_grad_hooks or {}) == 1, "it is followed once"
