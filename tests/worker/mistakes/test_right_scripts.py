"""Scripts that are right, of many kinds: nothing is said about them."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import elastic_driver as elastic
from tests.worker.mistakes.conftest import Told, a_step, net, state_of, use

COMMITS = 40
Adam = torch.optim.Adam


def trains(state: Any, step: Callable[[], Any]) -> None:
    """Train `state` in a function of its own, a step and a commit after the other."""

    @elastic.run
    def run(state: Any) -> None:
        for _ in range(COMMITS):
            step()
            state.commit()

    run(state)


def adversarial_networks() -> None:
    generator, discriminator = net(), nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    state = elastic.TorchState(
        generator=generator,
        discriminator=discriminator,
        g=Adam(generator.parameters()),
        d=Adam(discriminator.parameters()),
        losses=[],
    )
    loss = nn.BCEWithLogitsLoss()
    noise = torch.randn(16, 4)  # fixed, to look at
    one, zero = torch.ones(8, 1), torch.zeros(8, 1)

    def step() -> None:
        fake = generator(torch.randn(8, 4))
        state.d.zero_grad()
        (
            loss(discriminator(torch.randn(8, 1)), one) + loss(discriminator(fake.detach()), zero)
        ).backward()
        state.d.step()
        state.g.zero_grad()
        value = loss(discriminator(fake), one)
        value.backward()
        state.g.step()
        state.losses.append(value.item())
        with torch.no_grad():
            generator(noise)

    trains(state, step)


class Sam(torch.optim.Optimizer):
    """Two passes a step, with an optimizer inside, as it is written everywhere."""

    def __init__(self, parameters: Any, base: Any, **settings: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        self.second_step()


def sharpness_aware() -> None:
    model = net()
    sam = Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    x = torch.randn(8, 4)

    def step() -> None:
        model(x).square().mean().backward()
        sam.first_step()
        model(x).square().mean().backward()
        sam.second_step()

    trains(elastic.TorchState(model=model, sam=sam), step)


def quasi_newton() -> None:
    state = elastic.TorchState(model=net())
    state.optimizer = torch.optim.LBFGS(state.model.parameters(), max_iter=4)
    x = torch.randn(8, 4)

    def closure() -> torch.Tensor:
        state.optimizer.zero_grad()
        loss = state.model(x).square().mean()
        loss.backward()
        return loss

    trains(state, lambda: state.optimizer.step(closure))


def averaged_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = elastic.TorchState(
        model=model,
        optimizer=optimizer,
        swa=AveragedModel(model),
        schedule=LambdaLR(optimizer, lambda step: 0.99**step),
        swa_schedule=SWALR(optimizer, swa_lr=0.05),
        step=0,
    )
    data = [torch.randn(8, 4) for _ in range(3)]

    def step() -> None:
        a_step(state)
        if state.step > 5:
            state.swa.update_parameters(model)
            state.swa_schedule.step()
        else:
            state.schedule.step()
        if state.step % 10 == 0:
            update_bn(data, state.swa)

    trains(state, step)


def mixed_precision() -> None:
    state = state_of(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**16), best=None)

    def step() -> None:
        x = torch.randn(8, 4)
        with torch.autocast("cpu", torch.bfloat16):
            loss = state.model(x).float().square().mean()
        state.optimizer.zero_grad(set_to_none=True)
        state.scaler.scale(loss).backward()
        state.scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.scaler.step(state.optimizer)
        state.scaler.update()

    trains(state, step)


def compiled() -> None:
    state = state_of()
    model = torch.compile(state.model, backend="aot_eager")

    def step() -> None:
        state.optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        state.optimizer.step()

    trains(state, step)


def evaluations() -> None:
    data = TensorDataset(torch.randn(24, 4))
    sampler = elastic.ElasticSampler(data)
    state = state_of(sampler=sampler, epoch=0, best=float("inf"), history=[])
    state.plateau = ReduceLROnPlateau(state.optimizer)
    checks = DataLoader(data, 4)
    best: dict[str, torch.Tensor] = {}

    @elastic.run
    def run(state: Any) -> None:
        loader = DataLoader(data, 4, sampler=sampler)
        running = torch.zeros(3)
        while state.epoch < 6:
            sampler.set_epoch(state.epoch)
            state.model.train()
            for number, _ in enumerate(loader):
                a_step(state)
                running += number
                state.commit()
            state.model.eval()
            with torch.no_grad():
                found = sum(state.model(x).square().sum().item() for (x,) in checks)
            if found < state.best:
                state.best = found
                best.update(copy.deepcopy(state.model.state_dict()))
            state.history.append(found)
            state.plateau.step(found)
            state.epoch += 1
            state.commit()

    run(state)


def fixed_batches() -> None:
    data = TensorDataset(torch.randn(64, 4))
    model = net()
    batches = elastic.FixedBatch(data, 2, model=model, virtual_workers=2)
    state = elastic.TorchState(
        model=model, optimizer=Adam(model.parameters()), batches=batches, epoch=0
    )

    @elastic.run
    def run(state: Any) -> None:
        while state.epoch < 3:
            for step in batches:
                state.optimizer.zero_grad()
                for (x,) in step:
                    state.model(x).square().mean().backward()
                state.optimizer.step()
                state.commit()
            state.epoch += 1

    run(state)


def counters_alone() -> None:
    state = elastic.ObjectState(step=0, total=0.0, seen=[])
    model = {"w": torch.zeros(4)}

    def step() -> None:
        state.step += 1
        state.total += 0.5
        state.seen.append(state.step)
        model["w"] = model["w"] + 1

    trains(state, step)


def weights_by_hand() -> None:
    """Without any optimizer of torch's."""
    w = torch.zeros(4, requires_grad=True)
    state = elastic.TorchState(w=w, velocity=torch.zeros(4), step=0)

    def step() -> None:
        w.grad = None
        (w - 1).square().sum().backward()
        state.velocity.mul_(0.9).add_(w.grad)
        with torch.no_grad():
            w.sub_(0.1 * state.velocity)
        state.step += 1

    trains(state, step)


def accumulation() -> None:
    state = state_of(micro=0)
    schedule = OneCycleLR(state.optimizer, 0.1, total_steps=COMMITS)
    state.schedule = schedule
    gradients = [torch.zeros_like(p) for p in state.model.parameters()]

    def step() -> None:
        for buffer in gradients:
            buffer.zero_()
        for _ in range(4):
            state.optimizer.zero_grad()
            state.model(torch.randn(8, 4)).square().mean().backward()
            for buffer, p in zip(gradients, state.model.parameters(), strict=True):
                buffer.add_(p.grad)
        for buffer, p in zip(gradients, state.model.parameters(), strict=True):
            p.grad.copy_(buffer)
        state.optimizer.step()
        schedule.step()

    trains(state, step)


class Trainer:
    """Everything as attributes of one object, with callbacks, a log, and a loader."""

    def __init__(self) -> None:
        self.args = Namespace(lr=0.1, hidden=8)
        self.model = net()
        self.teacher = net().requires_grad_(False)
        self.optimizer = Adam(self.model.parameters())
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.criterion = nn.MSELoss()
        self.log: list[dict[str, Any]] = []
        self.inputs, self.cache = torch.randn(8, 4), {"targets": torch.zeros(8, 1)}
        self.state = elastic.TorchState(
            model=self.model, optimizer=self.optimizer, schedule=self.schedule, step=0
        )
        self.last_weights = [torch.zeros_like(p) for p in self.model.parameters()]

    def fit(self) -> None:
        elastic.run(self.loop)(self.state)

    def loop(self, state: Any) -> None:
        config = locals()
        while state.step < COMMITS:
            self.one_step()
            self.finish(state)
        use(config)

    def one_step(self) -> None:
        for mine, p in zip(self.last_weights, self.model.parameters(), strict=True):
            mine.copy_(p.detach())  # to log the length of each update
        with torch.no_grad():
            self.cache["targets"] = self.teacher(self.inputs)
        loss = self.criterion(self.model(self.inputs), self.cache["targets"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.log.append({"loss": loss.item()})

    def finish(self, state: Any) -> None:
        state.step += 1
        with nullcontext():
            state.commit()


SCRIPTS = [
    adversarial_networks,
    sharpness_aware,
    quasi_newton,
    averaged_weights,
    mixed_precision,
    compiled,
    evaluations,
    fixed_batches,
    counters_alone,
    weights_by_hand,
    accumulation,
    lambda: Trainer().fit(),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: each.__name__)
def test_nothing_is_said_about_a_script_that_is_right(
    lines: Told, script: Callable[[], None]
) -> None:
    script()
    assert lines() == []
