"""Gradient scalers: a step that is done again is the step of a run without failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_driver.errors import WorldBrokenError
from elastic_driver.worker.state import TorchState
from tests.worker.training import digest

STEPS = 6
SCALE = 2.0**12


class Training:
    """Steps with a scaler; SGD, whose steps show a scale that is left in the gradients."""

    def __init__(self, *, enabled: bool = True) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=SCALE, growth_interval=2, enabled=enabled
        )
        self.state = TorchState(
            model=self.model, optimizer=self.optimizer, scaler=self.scaler, step=0
        )

    def begin(self, step: int) -> None:
        self.optimizer.zero_grad()
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = self.model(inputs).pow(2).mean()
        self.scaler.scale(loss * torch.inf if step == 3 else loss).backward()

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.state.step += 1
        self.state.commit()

    def values(self) -> list[Any]:
        return [digest(part) for part in (self.model, self.optimizer, self.scaler)]


def lose(training: Training) -> None:
    """A loss that the script learns of right before the optimizer's step."""

    def settle() -> None:
        raise WorldBrokenError("a peer is lost")

    counter = training.state._counter
    before, counter.settle = counter.settle, settle
    with pytest.raises(WorldBrokenError):
        training.scaler.step(training.optimizer)
    counter.settle = before


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("place", ["unscaled", "stepped", "updated", "infinite"])
def test_a_step_that_is_done_again_is_the_step(place: str, *, enabled: bool) -> None:
    alone, training = Training(enabled=enabled), Training(enabled=enabled)
    for step in range(STEPS):
        alone.begin(step)
        alone.finish()
        training.begin(step)
        if step in (2, 4):  # is lost
            if place == "infinite":
                for parameter in training.model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.fill_(torch.nan)  # what a collective leaves that was cut off
            if place == "unscaled":
                training.scaler.unscale_(training.optimizer)
            elif enabled and place == "infinite":
                training.scaler.step(training.optimizer)  # skips the optimizer's
            else:
                lose(training)
            if place == "updated":
                training.scaler.update()
            training.state.restore()
            assert training.state.clean
            training.begin(step)
        training.finish()
        assert training.values() == alone.values(), f"step {step}"


def test_a_rank_that_takes_over_a_scaler_is_between_two_steps() -> None:
    sender, receiver = Training(), Training()
    for each in (sender, receiver):
        each.begin(0)
        each.finish()
        each.begin(1)
    sender.finish()
    receiver.scaler.unscale_(receiver.optimizer)
    document, tensors = sender.state._tree.parts["scaler"].outgoing()
    part = receiver.state._tree.parts["scaler"]
    part.accept(document, [tensor for _, tensor in tensors])
    assert receiver.scaler.state_dict() == sender.scaler.state_dict()
    receiver.scaler.unscale_(receiver.optimizer)


def test_a_commit_does_not_ask_the_device_for_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.begin(0)
    training.finish()

    def refuse(_: object) -> float:
        raise AssertionError("it waits for the device")

    monkeypatch.setattr(torch.Tensor, "item", refuse)
    training.state.commit()
    monkeypatch.undo()
    names = [name for name, _ in training.state._tree.parts["scaler"].values()]
    assert names == [f"scaler.{key}" for key in training.scaler.state_dict()]
