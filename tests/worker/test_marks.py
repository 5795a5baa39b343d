"""Marks: digests of a state, equal on ranks that hold the same, made at the same commits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from elastic_driver import contract
from elastic_driver.worker.heartbeat.progress import TrainingProgress
from elastic_driver.worker.marks import FIRST, Marks
from elastic_driver.worker.state import TorchState


class Rank:
    """One rank's state and its marks, in this process."""

    def __init__(self, **more: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 1))
        self.model.norm = nn.BatchNorm1d(3)
        self.model.norm.requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        values = {"step": 0, "history": [1, {"a": 2}], "best": torch.ones(2), **more}
        self.state = TorchState(model=self.model, optimizer=self.optimizer, **values)
        self.progress = TrainingProgress()
        self.marks = Marks()
        self.marks.entered(self.progress, 2)

    def train(self, commits: int, seed: int = 0) -> None:
        for _ in range(commits):
            step = self.state.step
            self.optimizer.zero_grad()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            self.model.norm(noise)  # each rank sees other data: its statistics are its own
            self.model[2](self.model[0](x)).sum().backward()
            self.optimizer.step()
            self.state.step += 1
            self.state.save()
            self.marks.committed(self.state.step, self.state._compared)

    def leaves(self, step: int) -> dict[str, tuple[str, str]]:
        found = self.marks.leaves(step)
        assert found is not None
        return {name: (digest, text) for name, digest, text in found}


@pytest.fixture(autouse=True)
def only_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of other tests that live on are not compared with ours."""
    monkeypatch.setattr("elastic_driver.worker.state.all_states", list)


def test_ranks_that_hold_the_same_have_equal_marks_at_the_same_commits() -> None:
    one, other = Rank(), Rank()
    one.train(16, seed=1)
    other.train(16, seed=2)
    assert list(one.progress.marks) == list(other.progress.marks)
    assert [step for step, _ in one.progress.marks][:4] == sorted(FIRST)


CHANGES: dict[str, tuple[Any, str, str]] = {
    "a weight": (lambda r: r.model[0].weight.data.add_(1), "model.0.weight", "float32[3, 3]"),
    "a moment": (
        lambda r: r.optimizer.state[r.model[0].weight]["exp_avg"].mul_(2),
        "optimizer.state.0.exp_avg",
        "float32[3, 3]",
    ),
    "a learning rate": (
        lambda r: r.optimizer.param_groups[0].update(lr=0.2),
        "learning rate of group 0 of 'optimizer'",
        "0.2",
    ),
    "a value": (lambda r: r.state.history.append(3), "state.history", "[1, {'a': 2}, 3]"),
    "a tensor": (lambda r: r.state.best.add_(1), "state.best", "a tensor"),
    "a flag": (
        lambda r: r.model[2].requires_grad_(False),
        "requires_grad of 'model'",
        "[True, True, False, False, False, False]",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_difference_is_in_the_leaf_that_differs_and_in_no_other(what: str) -> None:
    change, leaf, text = CHANGES[what]
    one, other = Rank(), Rank()
    one.train(3)
    other.train(3)
    change(other)
    for rank in (one, other):
        rank.state.save()
        rank.marks.committed(4, rank.state._compared)
    mine, theirs = one.leaves(4), other.leaves(4)
    assert [name for name in mine if mine[name][0] != theirs[name][0]] == [leaf]
    assert theirs[leaf][1] == text


def test_what_is_local_and_running_statistics_are_left_out() -> None:
    rank = Rank(losses=[0.5])
    rank.state.local("losses", "model.0")
    rank.train(2)
    names = set(rank.leaves(2))
    assert not {n for n in names if n.startswith(("state.losses", "model.0", "model.norm.running"))}
    assert {"model.2.weight", "state.history"} <= names


def test_leaves_of_old_marks_are_gone_and_those_of_the_last_rounds_too() -> None:
    rank = Rank()
    rank.train(16)
    rank.marks._commits = 1
    rank.train(1)
    steps = [step for step, _ in rank.progress.marks]
    assert rank.marks.leaves(steps[0]) is None
    assert rank.marks.leaves(steps[-1]) is not None
    rank.marks.entered(rank.progress, 2)
    assert rank.marks.leaves(steps[-1]) is None


@pytest.mark.parametrize(("size", "verify"), [(1, "1"), (2, "0")])
def test_nothing_is_marked_alone_or_where_it_is_switched_off(
    size: int, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(contract.VERIFY_STATE, verify)
    rank = Rank()
    rank.marks.entered(rank.progress, size)
    rank.train(4)
    assert not rank.progress.marks


def test_marks_are_so_far_apart_that_they_take_a_thousandth_of_the_time() -> None:
    rank = Rank()
    rank.train(2)
    rank.progress.step_times.clear()
    rank.progress.step_times.extend([0.010] * 20)
    rank.marks._cost = 0.0
    rank.marks._choose(0.004, rank.progress)
    assert rank.marks._every == 512, "4 ms each 5.12 s"
    rank.marks._choose(0.000_01, rank.progress)
    assert rank.marks._every * 0.010 * 8 >= 0.25, "a heartbeat carries the newest marks only"


def test_a_copy_of_a_state_is_the_same_whatever_the_memory_it_lies_in() -> None:
    one = Rank()
    one.train(1)
    other = Rank()
    other.model.load_state_dict(copy.deepcopy(one.model.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    other.state.step = 1
    for rank in (one, other):
        rank.state.save()
        rank.marks._commits = 1
        rank.marks.committed(2, rank.state._compared)
    assert one.progress.marks == other.progress.marks
