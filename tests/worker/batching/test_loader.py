"""Chance is seeded from what is computed, and cheaply; the quick shuffle is the pure one."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_driver.arithmetic import Permutation, mix
from elastic_driver.worker.batches import fix_kernels, seed_everything, shuffled


def test_the_same_identity_draws_the_same_numbers() -> None:
    def draws(*identity: int) -> tuple[list[float], float]:
        seed_everything(*identity)
        return torch.rand(3).tolist(), random.random()

    assert draws(1, 2, 3) == draws(1, 2, 3)
    assert draws(1, 2, 3)[0] != draws(1, 2, 4)[0]
    assert draws(1, 2, 3)[1] != draws(1, 2, 4)[1]


def test_the_numbers_are_those_of_torchs_own_seeding() -> None:
    seed_everything(7)
    drawn = torch.rand(3)
    torch.manual_seed(mix(7))
    assert torch.equal(drawn, torch.rand(3))


def test_seeding_leaves_nothing_behind_for_devices_that_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a traceback is formatted for every micro-batch")

    if torch.cuda.is_initialized():
        pytest.skip("CUDA is in use in this process")
    monkeypatch.setattr("traceback.format_stack", fail)
    seed_everything(1)


def test_deterministic_kernels_do_not_pay_for_filling_memory_that_is_written_anyway() -> None:
    kernels = torch.utils.deterministic
    threads, filled = torch.get_num_threads(), kernels.fill_uninitialized_memory
    try:
        fix_kernels(threads)
        assert torch.are_deterministic_algorithms_enabled()
        assert not kernels.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        kernels.fill_uninitialized_memory = filled


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.data())
def test_many_positions_at_once_give_what_each_gives_alone(
    size: int, key: int, data: st.DataObject
) -> None:
    order = Permutation(size, key)
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    assert shuffled(order, positions) == [order[position] for position in positions]


def test_a_whole_order_has_everything_once() -> None:
    assert sorted(shuffled(Permutation(1000, 3), range(1000))) == list(range(1000))


def test_no_position_gives_nothing() -> None:
    assert shuffled(Permutation(10, 1), []) == []
