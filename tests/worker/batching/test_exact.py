"""Chance is seeded from what is computed, and cheaply."""

from __future__ import annotations

import random

import pytest
import torch

from elastic_driver.batch.permutation import mix
from elastic_driver.worker.batching.exact import fix_kernels, seed_everything


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
    settings = torch.utils.deterministic
    threads, filled = torch.get_num_threads(), settings.fill_uninitialized_memory
    try:
        fix_kernels(threads)
        assert torch.are_deterministic_algorithms_enabled()
        assert not settings.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        settings.fill_uninitialized_memory = filled
