"""What a script trains with and no state keeps is named; what is right is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import elastic_driver as elastic
from tests.worker.mistakes.conftest import COMMITS, Told, a_step, net, state_of, use


def train(state: Any, after_step: Callable[[], None] = lambda: None) -> None:
    @elastic.run
    def run(state: Any) -> None:
        while state.step < COMMITS:
            a_step(state)
            after_step()
            state.commit()

    run(state)


class Average:
    """An average of weights as scripts write it: a dictionary of tensors."""

    def __init__(self, model: nn.Module, *, in_place: bool = True) -> None:
        self.model, self.in_place = model, in_place
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            if self.in_place:
                self.shadow[name].data.mul_(0.9).add_(parameter.data, alpha=0.1)
            else:
                self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * parameter.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state["shadow"].items():
            self.shadow[name].copy_(tensor)


# ---- averages ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [True, False])
def test_an_average_that_is_not_in_the_state_is_named(lines: Told, in_place: bool) -> None:
    state = state_of()
    ema = Average(state.model, in_place=in_place)

    def update() -> None:
        ema.update()

    train(state, update)
    (line,) = lines()
    assert line.startswith("'ema.shadow' (dict) changes from commit to commit, but is not in")
    assert line.endswith("TorchState(…, shadow=ema.shadow) (docs/common-mistakes.md#left-out)")


@pytest.mark.parametrize("every", [1, 5, 9])
def test_an_averaged_module_is_named_however_often_it_changes(lines: Told, every: int) -> None:
    state = state_of()
    swa = AveragedModel(state.model)

    def update() -> None:
        if state.step % every == 0:
            swa.update_parameters(state.model)

    train(state, update)
    (line,) = lines()
    assert line.startswith("'swa' (AveragedModel) changes from commit to commit")


@pytest.mark.parametrize("every", [2, 3, 6])
def test_a_target_that_is_copied_from_the_weights_now_and_then_is_named(
    lines: Told, every: int
) -> None:
    state = state_of()
    target = copy.deepcopy(state.model)

    def update() -> None:
        if state.step % every == 0:
            target.load_state_dict(state.model.state_dict())

    train(state, update)
    (line,) = lines()
    assert line.startswith("'target' (Sequential) changes from commit to commit")


def test_a_module_that_no_version_counter_shows_to_change_is_named(lines: Told) -> None:
    state = state_of()
    teacher = copy.deepcopy(state.model)

    def update() -> None:
        for mine, theirs in zip(teacher.parameters(), state.model.parameters(), strict=True):
            mine.data = mine.data * 0.9 + theirs.data * 0.1

    train(state, update)
    assert "'teacher' (Sequential)" in lines()[0]


def test_an_average_in_a_list_inside_of_an_object_of_the_script_is_named(lines: Told) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.state = state_of()
            self.copies = [p.detach().clone() for p in self.state.model.parameters()]

        def train(self) -> None:
            elastic.run(self.loop)(self.state)

        def loop(self, state: Any) -> None:
            while state.step < COMMITS:
                a_step(state)
                self.average()
                state.commit()

        @torch.no_grad()
        def average(self) -> None:
            for mine, theirs in zip(self.copies, self.state.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    Trainer().train()
    assert [line.partition(" changes")[0] for line in lines()] == ["'self.copies' (list)"]


@pytest.mark.parametrize("how", ["part", "module", "values", "by hand"])
def test_an_average_in_the_state_is_not_named(lines: Told, how: str) -> None:
    state = state_of()
    ema, swa = Average(state.model), AveragedModel(state.model)
    update = ema.update
    if how == "part":
        state.ema = ema
    elif how == "values":
        state.shadow = ema.shadow
    elif how == "module":
        state.swa, update = swa, lambda: swa.update_parameters(state.model)
    else:

        def update() -> None:
            ema.update()
            state.saved = copy.deepcopy(ema.shadow)

    train(state, update)
    assert lines() == []


def test_copies_that_are_made_anew_from_the_state_are_not_named(lines: Told) -> None:
    state = state_of()
    actor, frozen = copy.deepcopy(state.model), net()
    gradients = [torch.zeros_like(p) for p in state.model.parameters()]
    snapshot: dict[str, torch.Tensor] = copy.deepcopy(state.model.state_dict())

    def update() -> None:
        for own, parameter in zip(gradients, state.model.parameters(), strict=True):
            own.copy_(parameter.grad)
        for name, tensor in state.model.state_dict().items():
            snapshot[name].copy_(tensor)
        actor.load_state_dict(state.model.state_dict())
        frozen(torch.ones(2, 4))

    train(state, update)
    assert lines() == []


def test_weights_of_an_inner_loop_are_not_named(lines: Told) -> None:
    """As in meta learning: a few steps away from the weights, and dropped."""
    state = state_of()

    @elastic.run
    def run(state: Any) -> None:
        while state.step < COMMITS:
            fast = {name: p - 0.01 for name, p in state.model.named_parameters()}
            before = [p.detach().clone() for p in state.model.parameters()]
            torch.func.functional_call(state.model, fast, (torch.ones(2, 4),))
            a_step(state)
            learner = copy.deepcopy(state.model)
            state.commit()
            use(learner, before, fast)

    run(state)
    assert lines() == []


def test_running_statistics_and_metrics_outside_of_the_state_are_not_named(lines: Told) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(8))

    state, metric = state_of(), Mean()
    perceptual = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    center, losses = torch.zeros(8), []

    def update() -> None:
        metric.total += 1.0
        with torch.no_grad():
            perceptual(torch.randn(8, 4))
        center.add_(0.1)
        losses.append(torch.randn(()))

    train(state, update)
    assert lines() == []


# ---- schedulers and scalers --------------------------------------------------------------


def test_a_scheduler_that_is_not_in_the_state_is_named(lines: Told) -> None:
    state = state_of()
    schedule = StepLR(state.optimizer, 5)

    def update() -> None:
        schedule.step()

    train(state, update)
    (line,) = lines()
    assert line.startswith("the scheduler 'schedule' (StepLR) is not in the state")
    assert "TorchState(…, schedule=schedule)" in line


def test_schedulers_that_are_kept_in_some_way_are_not_named(lines: Told) -> None:
    state = state_of()
    first, second = StepLR(state.optimizer, 5), CosineAnnealingLR(state.optimizer, 20)
    state.schedule = SequentialLR(state.optimizer, [first, second], milestones=[10])
    train(state, state.schedule.step)
    assert lines() == []


def test_a_scheduler_that_is_kept_by_hand_or_made_in_each_world_is_not_named(lines: Told) -> None:
    state = state_of(saved={})
    schedule = StepLR(state.optimizer, 5)

    def update() -> None:
        schedule.step()
        state.saved = schedule.state_dict()

    train(state, update)

    other = state_of()

    @elastic.run
    def run(state: Any) -> None:
        mine = StepLR(state.optimizer, 5, last_epoch=state.step - 1)
        while state.step < COMMITS:
            a_step(state)
            mine.step()
            state.commit()

    run(other)
    assert lines() == []


def test_a_gradient_scaler_that_is_not_in_the_state_is_named(lines: Told) -> None:
    state = state_of()
    scaler = torch.amp.GradScaler("cpu")
    off = torch.amp.GradScaler("cpu", enabled=False)

    def update() -> None:
        use(scaler)
        off.update()

    train(state, update)
    (line,) = lines()
    assert line.startswith("the gradient scaler 'scaler' is not in the state")


# ---- samplers ----------------------------------------------------------------------------


def loop_over(state: Any, loader: Any) -> None:
    @elastic.run
    def run(state: Any) -> None:
        while state.step < COMMITS:
            for _ in loader:
                a_step(state)
                state.commit()

    run(state)


def test_a_sampler_that_is_read_from_commit_to_commit_is_named(lines: Told) -> None:
    data = TensorDataset(torch.zeros(64, 4))
    loader = DataLoader(data, 2, sampler=elastic.ElasticSampler(data))
    loop_over(state_of(), loader)
    (line,) = lines()
    assert line.startswith("'loader.sampler' (ElasticSampler) is read between commits, but is not")


def test_samplers_in_the_state_and_those_of_evaluations_are_not_named(lines: Told) -> None:
    data = TensorDataset(torch.zeros(64, 4))
    sampler, evaluation = elastic.ElasticSampler(data), elastic.ElasticSampler(data)
    loader = DataLoader(data, 2, sampler=sampler)
    checks = DataLoader(data, 2, sampler=evaluation)
    state = state_of(sampler=sampler)

    @elastic.run
    def run(state: Any) -> None:
        for _ in loader:
            a_step(state)
            with torch.no_grad():
                for (batch,) in checks:
                    state.model(batch)
            state.commit()

    run(state)
    assert lines() == []
