"""Marks: digests of a state, equal on ranks that hold the same, made at the same commits."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_driver import contract
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress, in_short
from elastic_driver.worker.marks import EARLY, EARLY_S, FIRST, Marks
from elastic_driver.worker.state import TorchState
from tests.worker.state_sync.values import Fixed, Pair, Point


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
        self.marks.enter(self.progress, 2)

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
            self.marks.mark_if_due(self.state.step, self.state._compared)

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
        rank.marks.mark_if_due(4, rank.state._compared)
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
    rank.marks._due = 0
    rank.train(1)
    steps = [step for step, _ in rank.progress.marks]
    assert rank.marks.leaves(steps[0]) is None
    assert rank.marks.leaves(steps[-1]) is not None
    rank.marks.enter(rank.progress, 2)
    assert rank.marks.leaves(steps[-1]) is None


@pytest.mark.parametrize(("size", "verify"), [(1, "1"), (2, "0")])
def test_nothing_is_marked_alone_or_where_it_is_switched_off(
    size: int, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(contract.VERIFY_STATE, verify)
    rank = Rank()
    rank.marks.enter(rank.progress, size)
    rank.train(4)
    assert not rank.progress.marks


def test_marks_are_so_far_apart_that_they_take_a_thousandth_of_the_time() -> None:
    rank = Rank()
    rank.train(2)
    rank.progress.step_times.clear()
    rank.progress.step_times.extend([0.010] * 20)
    rank.marks._cost, rank.marks._commits = 0.0, max(FIRST) + 1
    early = int(EARLY_S / 0.004)  # of 4 ms each
    for _ in range(early):
        rank.marks._choose(0.004, rank.progress)
        assert rank.marks._every == EARLY, "the first ones of a round may take more"
    rank.marks._choose(0.004, rank.progress)
    assert rank.marks._every == 1024, "4 ms each 10.24 s"
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
        rank.marks._due = 0
        rank.marks.mark_if_due(2, rank.state._compared)
    assert one.progress.marks == other.progress.marks


KINDS = {
    "table": {"a": [1, (2, {3})], "b": Counter("abca")},
    "queue": deque([1, 2], 5),
    "default": defaultdict(list, {"x": [1.5]}),
    "array": np.arange(6.0).reshape(2, 3).T,
    "trained": nn.Parameter(torch.ones(3)),
    "point": Point(1, [2], ["z"]),
    "fixed": Fixed([1], Pair(1, torch.ones(2))),
    "raw": bytearray(b"ab"),
    "free": SimpleNamespace(a=[1]),
}


def knotted() -> dict[str, Any]:
    found = copy.deepcopy(KINDS)
    found["table"]["a"].append(found["table"])  # it holds itself
    found["twice"] = [found["queue"], found["queue"]]
    return found


def test_the_last_commit_is_marked_as_it_was_whatever_has_changed_since() -> None:
    """Marks of one commit are equal: made right behind it on one rank, and later on another."""
    one, other = Rank(**knotted()), Rank(**knotted())
    one.train(5)
    other.train(5)
    one.marks._due = 0
    one.marks.mark_if_due(5, one.state._compared)
    values = other.state._values
    values["table"]["a"].clear()
    values["queue"].append(9)
    values["default"]["y"].append(3)
    values["array"] += 1
    values["point"].x = 7
    values["raw"] += b"c"
    values["free"].b = 2
    values["late"] = object()
    other.model.eval()
    other.optimizer.param_groups[0]["lr"] = 7.0
    other.marks.end(5, other.state._compared)
    mine, theirs = one.leaves(5), other.leaves(5)
    assert mine == theirs
    assert one.progress.marks[-1] == other.progress.marks[-1]
    assert values["queue"] == deque([1, 2, 9], 5), "the script's objects stay as they are"
    assert values["array"][0, 0] == 1


def test_a_rank_that_has_trained_on_since_its_last_commit_makes_no_last_mark() -> None:
    rank = Rank()
    rank.train(5)
    rank.model[0](torch.ones(1, 3)).sum().backward()
    rank.optimizer.step()
    rank.marks.end(5, rank.state._compared)
    assert [step for step, _ in rank.progress.marks] == [2, 4]


def test_a_last_mark_that_takes_long_beside_the_training_is_not_made() -> None:
    rank = Rank()
    rank.train(5)
    rank.marks._cost = 0.2
    rank.marks.end(5, rank.state._compared)
    assert [step for step, _ in rank.progress.marks] == [2, 4]
    rank.marks._began -= 1000.0
    rank.marks.end(5, rank.state._compared)
    assert [step for step, _ in rank.progress.marks] == [2, 4, 5]


def test_a_step_that_is_marked_already_is_not_marked_again() -> None:
    rank = Rank()
    rank.train(4)
    before = list(rank.progress.marks)
    rank.model[0].weight.data.add_(1)
    rank.marks.end(4, rank.state._compared)
    assert list(rank.progress.marks) == before


def test_a_large_state_is_described_by_its_objects_in_short() -> None:
    rank = Rank()
    rank.train(4)
    found = rank.marks.leaves(4)
    assert found is not None
    assert in_short(found, len(found)) == found
    short = {name: text for name, _, text in in_short(found, len(found) - 1)}
    assert short["model"] == "6 tensors and values"
    assert short["learning rate of group 0 of 'optimizer'"] == "0.1"
    assert short["state.step"] == "4"
    rank.model[2].bias.data.add_(1)
    rank.train(1)
    rank.marks.end(5, rank.state._compared)
    again = rank.marks.leaves(5)
    assert again is not None
    before, after = ({leaf[0]: leaf[1] for leaf in in_short(each, 20)} for each in (found, again))
    changed = {name for name in after if before[name] != after[name]}
    assert changed == {"model", "optimizer", "state.step"}


def test_numbers_of_numpy_are_told_as_numbers() -> None:
    rank = Rank()
    rank.state.best = {"loss": np.float32(1.5), "count": np.int64(3)}
    rank.train(4)
    told = {name: text for name, _, text in rank.marks.leaves(4) or ()}
    assert (told["state.best.loss"], told["state.best.count"]) == ("1.5", "3")


class Shadow(nn.Module):
    """Averages of weights, kept as buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        for number, parameter in enumerate(model.parameters()):
            self.register_buffer(f"p{number}", parameter.detach().clone())


def test_groups_of_buffers_are_marked_beside_the_rest() -> None:
    rank, other = Rank(), Rank()
    for each in (rank, other):
        each.state.shadow = Shadow(each.model)
        each.train(2)
    other.state.shadow.p0.add_(1)
    for each in (rank, other):
        each.train(2)
    assert rank.progress.marks == other.progress.marks, "nobody knows whether it is a statistic"
    mine, theirs = rank.progress.buffers, other.progress.buffers
    assert list(mine) == [2, 4]
    assert mine[2] == theirs[2]
    assert len(mine[4]) == 8, "one group: BatchNorm's are statistics"
    assert mine[4] != theirs[4]
    assert rank.leaves(4)["buffers of 'shadow'"] == (mine[4], "6 tensors")
    rank.state.local("shadow")
    rank.train(4)
    assert rank.progress.buffers[8] == ""


def test_digests_of_buffers_are_kept_as_long_as_their_marks() -> None:
    progress = TrainingProgress()
    for step in range(100):
        progress.record_mark(step, "a", f"{step:08x}")
    assert set(progress.buffers) >= {step for step, _ in progress.marks}
    assert len(progress.buffers) <= len(progress.marks) + 1
