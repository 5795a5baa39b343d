"""What a commit copies is learned, and a rank is clean only if nothing else has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_driver.worker.state import TorchState
from elastic_driver.worker.state_sync import leaves as leaves_module
from elastic_driver.worker.state_sync import steps as steps_module

LR = 0.05


def data(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


class Loop:
    """A training loop in one process whose commits and failures the test decides."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(6, 6)
        new = make or (lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=0.9))
        self.optimizer = new(self.model)
        self.state = TorchState(model=self.model, optimizer=self.optimizer, step=0)

    def forward(self) -> torch.Tensor:
        return (self.model(data(self.state.step)) - data(self.state.step)).pow(2).mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def train(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.state.step += 1
            self.state.commit()

    def copied(self) -> set[str]:
        leaves = self.state._tree.leaves
        return set(leaves.moving) | leaves._unproven

    def contents(self) -> Any:
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: torch.optim.SGD(m.parameters(), lr=LR),
        lambda m: torch.optim.AdamW(m.parameters(), lr=LR),
        lambda m: torch.optim.Adam(m.parameters(), lr=LR, fused=True),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=LR, foreach=False),
    ],
    ids=["sgd", "adamw", "fused", "rmsprop"],
)
def test_what_only_an_optimizer_moves_is_never_copied_and_dirty_after_its_step(make: Any) -> None:
    loop = Loop(make)
    loop.train(6)
    assert loop.copied() == set()
    assert loop.state.clean
    loop.step()
    assert not loop.state.clean, "also where the step counts no version (fused)"
    loop.state.step += 1
    loop.state.commit()
    assert loop.state.clean


def averaged(loop: Loop, how: str) -> Callable[[], None]:
    """A second model in the state that follows the first one after each step."""
    average = copy.deepcopy(loop.model).requires_grad_(False)
    loop.state.average = average

    def in_place() -> None:
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), loop.model.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)

    def unseen() -> None:
        for mine, theirs in zip(average.parameters(), loop.model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)

    def rebound() -> None:
        for mine, theirs in zip(average.parameters(), loop.model.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * theirs.data

    return {"in place": in_place, "unseen": unseen, "rebound": rebound}[how]


@pytest.mark.parametrize("how", ["in place", "unseen", "rebound"])
def test_an_average_that_moves_in_the_forward_pass_is_put_back(how: str) -> None:
    loop = Loop()
    follow = averaged(loop, how)
    for _ in range(6):
        follow()
        loop.train(1)
    committed = copy.deepcopy(loop.state.average.state_dict())
    follow()  # a forward pass that a lost peer breaks off
    assert loop.state.clean
    loop.state.restore()
    assert same(loop.state.average.state_dict(), committed)
    assert {"average.weight", "average.bias"} <= loop.copied()


def test_a_weight_that_is_clamped_after_the_step_needs_no_copy() -> None:
    loop = Loop()
    for _ in range(6):
        loop.step()
        for parameter in loop.model.parameters():
            parameter.data.clamp_(-0.3, 0.3)
        loop.state.step += 1
        loop.state.commit()
    assert loop.copied() == set()
    assert loop.state.clean


def test_a_weight_that_is_changed_before_the_step_is_put_back() -> None:
    loop = Loop()

    def squeeze() -> None:
        loop.model.weight.data.mul_(0.99)  # as normalising layers do in their forward pass

    for _ in range(6):
        squeeze()
        loop.train(1)
    committed = loop.contents()
    squeeze()
    loop.state.restore()
    assert same(loop.contents(), committed)


def test_steps_that_no_hook_shows_are_copied_and_put_back() -> None:
    loop = Loop()

    def step_by_hand() -> None:
        loop.model.zero_grad()
        loop.forward().backward()
        for parameter in loop.model.parameters():
            assert parameter.grad is not None
            parameter.data -= LR * parameter.grad

    for _ in range(6):
        step_by_hand()
        loop.state.step += 1
        loop.state.commit()
    committed = loop.contents()
    step_by_hand()
    assert loop.state.clean
    loop.state.restore()
    assert same(loop.contents(), committed)


def test_a_step_that_a_collective_follows_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]
    monkeypatch.setattr(steps_module, "collectives", lambda: count[0])
    loop = Loop()
    for _ in range(5):
        loop.step()
        count[0] += 1  # the loss is summed for the log
        loop.state.step += 1
        loop.state.commit()
    committed = loop.contents()
    loop.step()
    assert loop.state.clean
    loop.state.restore()
    assert same(loop.contents(), committed)


def test_the_first_of_two_optimizers_is_exposed_and_the_second_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = [0]
    monkeypatch.setattr(steps_module, "collectives", lambda: count[0])
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR) for m in (first, second)]
    state = TorchState(a=first, b=second, optimizer_a=optimizers[0], optimizer_b=optimizers[1])
    for _ in range(6):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            count[0] += 1  # the gradients are summed
            optimizer.step()
        state.commit()
    assert set(state._tree.leaves.moving) == {"a.weight", "a.bias"}


def test_two_steps_in_a_commit_expose_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]
    monkeypatch.setattr(steps_module, "collectives", lambda: count[0])
    loop = Loop()
    for _ in range(5):
        for _ in range(2):
            count[0] += 1
            loop.step()
        loop.state.step += 1
        loop.state.commit()
    committed = loop.contents()
    loop.step()
    loop.state.restore()
    assert same(loop.contents(), committed)


def test_a_tensor_that_begins_to_move_later_makes_the_rank_dirty_until_the_next_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaves_module, "ALWAYS_BYTES", 0)
    loop = Loop()
    frozen = nn.Linear(3, 3).requires_grad_(False)
    loop.state.frozen = frozen
    loop.train(8)
    with torch.no_grad():
        frozen.weight.add_(1)
    assert not loop.state.clean
    loop.train(1)
    with torch.no_grad():
        frozen.weight.add_(1)
    assert loop.state.clean, "found at the commit between, and copied since"
    loop.state.restore()
    assert float(frozen.weight.detach().sub(0).abs().sum()) > 0
    assert "frozen.weight" in loop.state._tree.leaves.moving


def test_little_that_no_optimizer_trains_is_copied_at_each_commit() -> None:
    loop = Loop()
    loop.state.frozen = nn.Linear(3, 3).requires_grad_(False)
    loop.train(8)
    committed = copy.deepcopy(loop.state.frozen.state_dict())
    loop.state.frozen.weight.data.add_(1)  # no version shows it
    loop.state.restore()
    assert same(loop.state.frozen.state_dict(), committed)


def test_a_write_before_the_step_that_changes_nothing_is_learned_by_its_version() -> None:
    loop = Loop()

    def clamp() -> None:
        with torch.no_grad():
            loop.model.weight.clamp_(-9, 9)

    for _ in range(6):
        clamp()
        loop.train(1)
    committed = loop.contents()
    clamp()
    assert loop.state.clean
    loop.state.restore()
    assert same(loop.contents(), committed)


def test_running_statistics_are_put_back_though_no_version_shows_that_they_move() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    state = TorchState(model=model, optimizer=optimizer)
    model.eval()
    for _ in range(8):
        state.commit()
    model.train()
    state.commit()
    committed = copy.deepcopy(model.state_dict())
    model(data(1))
    state.restore()
    assert same(model.state_dict(), committed)


def test_lbfgs_is_put_back_with_all_that_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]
    monkeypatch.setattr(steps_module, "collectives", lambda: count[0])
    loop = Loop(lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3))

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.forward()
        loss.backward()
        count[0] += 1
        return loss

    for _ in range(5):
        loop.optimizer.step(closure)
        loop.state.step += 1
        loop.state.commit()
    committed = loop.contents()
    loop.optimizer.step(closure)
    assert loop.state.clean
    loop.state.restore()
    assert same(loop.contents(), committed)


def test_a_state_ends_with_its_last_reference() -> None:
    import weakref

    loop = Loop()
    loop.train(2)
    seen = weakref.ref(loop.state)
    del loop.state
    assert seen() is None
