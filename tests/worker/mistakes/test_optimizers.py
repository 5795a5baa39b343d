"""Optimizers that train what no state keeps, or never step, are named; what is right is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import elastic_driver as elastic
from tests.worker.mistakes.conftest import COMMITS, Told, net, state_of

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def loop(state: Any, step: Callable[[], None]) -> None:
    @elastic.run
    def run(state: Any) -> None:
        while state.step < COMMITS:
            step()
            state.step += 1
            state.commit()

    run(state)


def descend(loss: torch.Tensor, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def x() -> torch.Tensor:
    return torch.randn(8, 4)


# ---- made anew ---------------------------------------------------------------------------


def test_an_optimizer_made_anew_in_the_training_function_is_named(lines: Told) -> None:
    state = state_of()
    optimizer = Adam(state.model.parameters())
    loop(state, lambda: descend(state.model(x()).square().mean(), optimizer))
    (line,) = lines()
    assert line.startswith("the optimizer 'optimizer' (Adam) trains the state's model, but is not")
    assert "step the state's own, 'optimizer', which never steps" in line


def test_a_model_made_anew_in_the_training_function_is_named(lines: Told) -> None:
    state = state_of()

    @elastic.run
    def run(state: Any) -> None:
        model = net()
        ddp, adam = elastic.wrap(model), Adam(model.parameters())
        while state.step < COMMITS:
            descend(ddp(x()).square().mean(), adam)
            state.step += 1
            state.commit()

    run(state)
    wrapped, trained = lines()
    assert wrapped.startswith("elastic.wrap() has a model (Sequential) that is not in the state")
    assert trained.startswith("the optimizer 'adam' (Adam) trains a model that is not in the state")


def test_an_optimizer_that_remembers_nothing_may_be_made_in_each_world(lines: Told) -> None:
    state = elastic.TorchState(model=net(), step=0)
    sgd = SGD(state.model.parameters(), lr=0.1)
    loop(state, lambda: descend(state.model(x()).square().mean(), sgd))
    assert lines() == []


def test_an_optimizer_that_is_kept_by_hand_is_not_named(lines: Told) -> None:
    state = elastic.TorchState(model=net(), step=0, saved={})
    adam = Adam(state.model.parameters())

    def step() -> None:
        descend(state.model(x()).square().mean(), adam)
        state.saved = adam.state_dict()

    loop(state, step)
    assert lines() == []


def test_optimizers_inside_of_what_the_state_keeps_are_not_named(lines: Told) -> None:
    class Lars:
        """As wrappers of optimizers are: no torch optimizer themselves."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optim = inner

        def state_dict(self) -> dict[str, Any]:
            return self.optim.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.optim.load_state_dict(state)

    class Sam(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(list(parameters), {})
            self.inner = SGD(self.param_groups, lr=0.1, momentum=0.9)
            self.param_groups = self.inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    model, other = net(), net()
    lars, sam = Lars(Adam(model.parameters())), Sam(other.parameters())
    state = elastic.TorchState(model=model, other=other, lars=lars, sam=sam, step=0)

    def step() -> None:
        descend(model(x()).square().mean(), lars.optim)
        descend(other(x()).square().mean(), sam)

    loop(state, step)
    assert lines() == []


# ---- parts left out ----------------------------------------------------------------------


def test_a_discriminator_left_out_of_the_state_is_named(lines: Told) -> None:
    state = state_of()
    judge = nn.Linear(1, 1)
    adam = Adam(judge.parameters())

    def step() -> None:
        fake = state.model(x())
        adam.zero_grad()
        judge(fake.detach()).mean().backward()
        adam.step()
        descend(judge(fake).mean(), state.optimizer)

    loop(state, step)
    (line,) = lines()
    assert line.startswith("the optimizer 'adam' (Adam) is not in the state, and neither are")


def test_a_probe_on_detached_features_is_the_scripts_own_business(lines: Told) -> None:
    state = state_of()
    probe = nn.Linear(1, 1)
    adam = Adam(probe.parameters())

    def step() -> None:
        features = state.model(x())
        descend(features.square().mean(), state.optimizer)
        descend(probe(features.detach()).square().mean(), adam)

    loop(state, step)
    assert lines() == []


def test_an_attack_with_an_optimizer_of_each_step_is_not_named(lines: Told) -> None:
    state = state_of()

    def step() -> None:
        batch = x()
        delta = torch.zeros_like(batch, requires_grad=True)
        attack = Adam([delta])
        for _ in range(2):
            descend(-state.model(batch + delta).square().mean(), attack)
        descend(state.model(batch + delta.detach()).square().mean(), state.optimizer)

    loop(state, step)
    assert lines() == []


def test_a_state_of_counters_may_leave_the_model_out_on_purpose(lines: Told) -> None:
    model = net()
    adam = Adam(model.parameters())
    state = elastic.ObjectState(step=0)
    loop(state, lambda: descend(model(x()).square().mean(), adam))
    assert lines() == []


# ---- never stepped -----------------------------------------------------------------------


def two() -> tuple[Any, nn.Module, nn.Module]:
    one, other = net(), net()
    state = elastic.TorchState(
        one=one,
        other=other,
        first=Adam(one.parameters()),
        second=Adam(other.parameters()),
        step=0,
    )
    return state, one, other


def test_an_optimizer_that_never_steps_is_named(lines: Told) -> None:
    state, one, other = two()

    def step() -> None:
        loss = (one(x()) + other(x())).square().mean()
        state.first.zero_grad()
        loss.backward()
        state.first.step()
        state.first.step()  # the second's is meant

    loop(state, step)
    (line,) = lines()
    assert line.startswith("the optimizer 'second' of the state has taken no step in 20 commits")


def test_a_script_without_any_step_is_named(lines: Told) -> None:
    state = state_of()

    def step() -> None:
        state.optimizer.zero_grad()
        state.model(x()).square().mean().backward()
        for parameter in state.model.parameters():
            parameter.grad = None

    loop(state, step)
    (line,) = lines()
    assert line.startswith("the optimizer 'optimizer' of the state has taken no step")


def test_optimizers_of_another_phase_are_not_named(lines: Told) -> None:
    """One trains later; one is for the same parameters; one is unfrozen later."""
    state, one, _ = two()
    state.later = SGD(one.parameters(), lr=0.1)
    loop(state, lambda: descend(one(x()).square().mean(), state.first))
    assert lines() == []


def test_updates_by_hand_and_states_that_only_count_are_not_named(lines: Told) -> None:
    state = state_of()

    def step() -> None:
        state.model.zero_grad()
        state.model(x()).square().mean().backward()
        for parameter in state.model.parameters():
            parameter.data -= 0.1 * parameter.grad

    loop(state, step)
    loop(state_of(), lambda: None)
    assert lines() == []


def test_lbfgs_and_steps_that_a_scaler_skips_are_not_named(lines: Told) -> None:
    model = net()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
    state = elastic.TorchState(model=model, lbfgs=lbfgs, step=0)
    batch = x()

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    loop(state, lambda: lbfgs.step(closure))

    other = state_of(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8))

    def step() -> None:
        other.optimizer.zero_grad()
        loss = other.model(x()).square().mean()
        factor = float("inf") if other.step < 6 else 1.0
        other.scaler.scale(loss * factor).backward()
        other.scaler.step(other.optimizer)
        other.scaler.update()

    loop(other, step)
    assert lines() == []
