"""What comes into a state while training, which a worker that joins cannot make."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.worker.mistakes.conftest import Told, a_step, state_of


def train(state: Any, commits: int = 3) -> None:
    for _ in range(commits):
        a_step(state)
        state.commit()


def begun(**more: Any) -> Any:
    """A state that is trained."""
    state = state_of(**more)
    state.sync()
    train(state)
    return state


def test_a_model_that_comes_into_a_list_is_named(lines: Told) -> None:
    state = begun(snapshots=[])
    for _ in range(2):
        state.snapshots.append(copy.deepcopy(state.model))
        train(state)
    first, second = lines()
    assert first.startswith("'snapshots.0' (Sequential) has come into the state since the training")
    assert "make it before the training function" in first
    assert second.startswith("'snapshots.1' (Sequential)")


def test_an_optimizer_of_another_class_is_named(lines: Told) -> None:
    state = begun()
    state.optimizer = torch.optim.SGD(state.model.parameters(), 0.1)
    train(state)
    (line,) = lines()
    assert line.startswith("'optimizer' is a SGD, no Adam any more, since the training began")


def test_a_model_that_grows_is_named(lines: Told) -> None:
    state = begun()
    state.model.append(nn.Linear(1, 1))
    state.optimizer.add_param_group({"params": state.model[-1].parameters()})
    train(state)
    (line,) = lines()
    assert line.startswith("'model' has 6 parameters instead of 4 since the training began")


def test_what_each_worker_has_made_may_be_replaced(lines: Told) -> None:
    state = begun(head=nn.Linear(2, 2), average=copy.deepcopy(nn.Linear(2, 2)))
    state.head = nn.Linear(2, 2)
    state.optimizer = torch.optim.Adam(state.model.parameters())
    state.model[0].weight = nn.Parameter(state.model[0].weight.detach().clone())
    state.losses = [1.0]
    state.weights = {"kept": state.model.state_dict()["0.weight"].clone()}
    train(state)
    assert lines() == []
