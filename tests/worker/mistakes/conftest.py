"""Trainings in a world of one, in this process, and the lines that are said about them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import elastic_driver as elastic
from elastic_driver.worker.mistakes.script_objects import PAGE, forget_told
from elastic_driver.worker.world import session

COMMITS = 24
Told = Callable[[], list[str]]


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str]) -> Iterator[Told]:
    """A world of one; returns the lines about mistakes since the last call."""
    gc.collect()  # states of earlier tests, in a world of the same number
    torch.manual_seed(0)
    forget_told()
    session.init()
    yield lambda: [
        line.removeprefix("elastic: ")
        for line in capfd.readouterr().err.splitlines()
        if PAGE in line
    ]
    session.shutdown()


def net(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def state_of(**more: Any) -> elastic.TorchState:
    """A state of a model and Adam, and of what else is given."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return elastic.TorchState(model=model, optimizer=optimizer, step=0, **more)


def a_step(state: Any) -> None:
    """A step of the state's model, without the commit."""
    x = torch.randn(8, 4)
    state.optimizer.zero_grad()
    (state.model(x) - x.sum(1, keepdim=True)).pow(2).mean().backward()
    state.optimizer.step()
    state.step += 1


def use(*things: Any) -> None:
    """Keep variables in use; an `assert` in a training function calls `locals()` there."""
