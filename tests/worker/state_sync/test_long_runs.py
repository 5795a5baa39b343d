"""After many commits that are alike: still clean exactly when nothing uncopied has changed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_driver.worker.state import TorchState
from elastic_driver.worker.state_sync import leaves
from tests.worker.training import digest

MANY = 3 * leaves.EVERY + 5


class Heads(nn.Module):
    """A body and two heads, of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def forward(self, x: torch.Tensor, head: int = 0) -> torch.Tensor:
        return self.heads[head](self.body(x))


class Loop:
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        torch.manual_seed(0)
        self.model = Heads()
        self.optimizer = (make or torch.optim.Adam)(self.model.parameters())
        self.state = TorchState(model=self.model, optimizer=self.optimizer, step=0)
        self.state.commit()

    def step(self, head: int = 0) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(self.state.step))
        self.model(x, head).pow(2).sum().backward()
        self.optimizer.step()

    def commit(self) -> None:
        self.state.step += 1
        self.state.commit()

    def all(self) -> str:
        return digest(self.model.state_dict(), self.optimizer.state_dict())

    @property
    def moving(self) -> set[str]:
        return set(self.state._tree.leaves.moving)

    def check(self) -> None:
        """After a commit: clean, unclean after a step, and after a write to each kind of tensor."""
        assert self.state.clean
        with torch.no_grad():
            self.model.body.weight.neg_()
            assert not self.state.clean
            self.model.body.weight.neg_()  # exactly what it was
        self.state._tree.leaves.note()
        assert self.state.clean
        for memory in self.optimizer.state.values():
            for value in memory.values():
                if isinstance(value, torch.Tensor):
                    value.mul_(1)
                    assert not self.state.clean, "it was written to"
                    self.state._tree.leaves.note()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "fused": lambda p: torch.optim.Adam(p, fused=True),
    "loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.01),
}
PATTERNS: dict[str, Callable[[int], int]] = {
    "one head": lambda _: 0,
    "heads in turn": lambda step: step % 2,
    "seldom the other": lambda step: int(step % 20 == 19),
    "the other from 30 on": lambda step: int(step >= 30),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_each_commit_is_clean_and_copies_nothing(make: str, pattern: str) -> None:
    loop = Loop(OPTIMIZERS[make])
    for number in range(MANY):
        loop.step(PATTERNS[pattern](number))
        assert not loop.state.clean
        loop.commit()
        assert loop.state.clean, number
    assert loop.moving == set()
    loop.check()


def test_layers_that_are_frozen_and_thawed_in_the_middle_of_a_run_stay_clean() -> None:
    loop = Loop()
    for number in range(MANY):
        if number in (20, 41):
            loop.model.body.requires_grad_(number == 41)
        loop.step()
        loop.commit()
        assert loop.state.clean, number
    assert loop.moving == set()
    loop.check()


def test_an_optimizer_that_steps_at_some_commits_only_is_clean_at_all() -> None:
    loop = Loop()
    for number in range(MANY):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        loop.model(x).pow(2).sum().backward()
        if number % 4 == 3:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.commit()
        assert loop.state.clean, number
    assert loop.moving == set()


def test_steps_that_a_scaler_skips_are_clean() -> None:
    loop = Loop()
    for number in range(MANY):
        if number % 7 == 6:
            loop.optimizer.zero_grad()
        else:
            loop.step()
        loop.commit()
        assert loop.state.clean
    assert loop.moving == set()


def test_a_moment_that_a_script_resets_in_the_middle_of_a_run_is_dirty_until_the_commit() -> None:
    loop = Loop()
    for _ in range(40):
        loop.step()
        loop.commit()
    for memory in loop.optimizer.state.values():
        memory["exp_avg"].zero_()
    assert not loop.state.clean
    loop.step()
    loop.commit()
    assert loop.state.clean
    loop.step()
    loop.commit()
    loop.check()


def test_moments_that_a_script_replaces_in_the_middle_of_a_run_are_those_of_the_commit() -> None:
    loop = Loop()
    for number in range(MANY):
        if number == 37:
            for memory in loop.optimizer.state.values():
                memory["exp_avg"] = torch.zeros_like(memory["exp_avg"])
        loop.step()
        loop.commit()
        assert loop.state.clean
        found = [memory["exp_avg"] for memory in loop.optimizer.state.values()]
        loop.state.restore()
        now = [memory["exp_avg"] for memory in loop.optimizer.state.values()]
        assert all(a is b for a, b in zip(found, now, strict=True))


def test_an_average_that_begins_late_is_copied_from_its_first_commit_on() -> None:
    loop = Loop()
    average = copy.deepcopy(loop.model).requires_grad_(False)
    average.register_buffer("large", torch.zeros(300_000))  # more than is always copied
    loop.state.average = average
    for number in range(60):
        if number >= 30:
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), loop.model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
        loop.step()
        loop.commit()
    committed = digest(average.state_dict())
    with torch.no_grad():
        average.body.weight.add_(1)
    assert loop.state.clean
    loop.state.restore()
    assert digest(average.state_dict()) == committed


def test_a_clamp_that_begins_late_at_the_top_of_the_loop_is_put_back() -> None:
    loop = Loop()
    for number in range(50):
        if number >= 30:
            with torch.no_grad():
                loop.model.body.weight.clamp_(-0.2, 0.2)
        loop.step()
        loop.commit()
    committed = loop.all()
    with torch.no_grad():
        loop.model.body.weight.clamp_(-0.1, 0.1)
    assert loop.state.clean
    loop.state.restore()
    assert loop.all() == committed
    assert "model.body.weight" in loop.moving


def test_memory_that_is_exchanged_is_seen() -> None:
    loop = Loop()
    for _ in range(20):
        loop.step()
        loop.commit()
    loop.model.body.weight.data = loop.model.body.weight.data.clone()
    assert not loop.state.clean


def test_optimizers_outside_of_the_state_that_step_its_parameters_are_seen() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    state = TorchState(model=model, step=0)
    for _ in range(8):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.commit()
    committed = digest(model.state_dict())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if state.clean:
        state.restore()
        assert digest(model.state_dict()) == committed


def test_optimizers_of_inner_loops_are_not_held() -> None:
    loop = Loop()
    seen = []
    for _ in range(3):
        inner = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        inner(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        seen.append(weakref.ref(inner.weight))
        del inner, optimizer
    gc.collect()
    assert [each() for each in seen] == [None] * 3
    assert loop.state.clean


def test_a_state_that_is_only_looked_at_stays_clean() -> None:
    loop = Loop()
    for _ in range(MANY):
        loop.commit()
        assert loop.state.clean
    assert loop.moving == set()
