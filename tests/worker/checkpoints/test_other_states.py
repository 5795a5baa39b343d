"""A checkpoint that another script has written: what differs is named, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elastic_driver as elastic
from elastic_driver.errors import UsageError

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Each test is a process of its own, as far as the membership goes."""
    elastic.shutdown()
    yield
    elastic.shutdown()


def attributes() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0, "seen": [0]}


def train(folder: Path, values: dict[str, Any], steps: int, counter: str = "step") -> Any:
    """Train up to so many steps in all, with a checkpoint of each second one."""
    state: Any = elastic.TorchState(checkpoint_dir=folder, every=2, **values)
    names = [name for name in values if isinstance(values[name], nn.Module)]

    @elastic.run
    def run(state: Any) -> None:
        while getattr(state, counter) < steps:
            optimizer = next(v for v in values.values() if isinstance(v, torch.optim.Optimizer))
            optimizer.zero_grad()
            getattr(state, names[0])(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            setattr(state, counter, getattr(state, counter) + 1)
            state.commit()

    run(state)
    assert state._checkpoints.drain()
    elastic.shutdown()
    return state


def refusal(folder: Path, values: dict[str, Any]) -> str:
    """Return why a script with these values is refused."""
    with pytest.raises(UsageError) as refused:
        train(folder, values, 6)
    said = str(refused.value)
    del refused  # it holds this frame, and the state with it
    return said


def renamed(old: str, new: str) -> Change:
    def rename(values: dict[str, Any]) -> None:
        values[new] = values.pop(old)

    return rename


def replaced(name: str, make: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda values: values.update({name: make(values)})


def lacking(name: str) -> Change:
    return lambda values: values.pop(name)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (
            replaced("optimizer", lambda values: torch.optim.Adam(values["model"].parameters())),
            ("optimizer", "Adam", "SGD"),
        ),
        (
            replaced(
                "schedule",
                lambda values: torch.optim.lr_scheduler.ExponentialLR(values["optimizer"], 0.9),
            ),
            ("schedule", "ExponentialLR", "StepLR"),
        ),
        (
            replaced("model", lambda values: nn.Sequential(*values["model"], nn.Linear(1, 1))),
            ("model",),
        ),
        (renamed("model", "net"), ("model", "net")),
        (lacking("schedule"), ("schedule",)),
        (replaced("scaler", lambda _: torch.amp.GradScaler("cpu")), ("scaler",)),
        (renamed("seen", "sent"), ("seen", "sent")),
        (lacking("seen"), ("seen",)),
        (replaced("model", lambda _: 3), ("model",)),
        (replaced("seen", lambda _: nn.Linear(1, 1)), ("seen",)),
    ],
)
def test_what_differs_is_refused_by_name(
    tmp_path: Path, change: Change, names: tuple[str, ...]
) -> None:
    train(tmp_path, attributes(), 4)
    values = attributes()
    change(values)
    said = refusal(tmp_path, values)
    assert "does not fit this script's state" in said
    assert "step-000000000004" in said
    assert [name for name in names if name not in said] == [], said
    assert "\n" not in said
    assert train(tmp_path, attributes(), 6).step == 6, "the checkpoint is as it was"


def test_the_order_of_the_names_does_not_matter(tmp_path: Path) -> None:
    before = train(tmp_path, attributes(), 4)
    values = dict(reversed(attributes().items()))
    after = train(tmp_path, values, 4)
    assert after.step == 4
    for mine, theirs in zip(
        after.model.state_dict().values(), before.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert after.schedule.state_dict() == before.schedule.state_dict()


def test_a_value_that_is_new_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, attributes(), 4)
    state = train(tmp_path, {**attributes(), "patience": 3}, 6)
    assert (state.step, state.patience) == (6, 3)
    assert "'patience'" in capsys.readouterr().err
