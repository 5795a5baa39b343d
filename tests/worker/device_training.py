"""What workers run whose gradients travel over the second half of the group."""

from __future__ import annotations

import os
import time
from typing import Any

import elastic_driver as elastic
from elastic_driver.words.orders import Notice
from elastic_driver.worker.world import device as device_half
from elastic_driver.worker.world import member as membership
from elastic_driver.worker.world import session
from elastic_driver.worker.world.groups import BackendChoice
from elastic_driver.worker.world.member import RoundNotices
from tests.support.coordinator import Recorder
from tests.support.second_gloo import SecondGloo
from tests.worker.training import Everything


def pretend(path: str) -> SecondGloo:
    """Have this process join with a pretended device; what happens to it is written down."""
    record = Recorder(f"{path}.device")
    device = SecondGloo(lambda what: record.note(device=what))
    session.choose_backend = lambda *_: BackendChoice(device)
    return device


def train_a_step(job: Everything, device: SecondGloo) -> None:
    """As with DDP on CUDA: sums are queued in the backward pass, the optimizer takes them."""
    import torch

    state = job.state
    generator = torch.Generator().manual_seed(state.step)
    x = torch.randn(4, 8, generator=generator)
    loss = (job.model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    job.optimizer.zero_grad()
    loss.backward()
    for parameter in job.model.parameters():
        device.all_reduce(parameter.grad.div_(elastic.size()))
    job.optimizer.step()
    job.schedule.step()
    state.step += 1
    state.trail.append(state.step)


def steps(path: str, count: int, pause: float = 0.01) -> None:
    """Train `count` steps over the device and write each down."""
    job, device, record = Everything(), pretend(path), Recorder(path)

    @elastic.run
    def train(state: Any) -> None:
        while state.step < count:
            train_a_step(job, device)
            try:
                state.commit()
            finally:
                job.note(record)
            time.sleep(pause)

    train(job.state)


def steps_past_boundaries(path: str, count: int) -> None:
    """The same, in a worker that a notice to leave at a boundary never reaches in time."""
    obey = RoundNotices._apply

    def obeys_what_comes_at_once(notices: RoundNotices, notice: Notice | None) -> None:
        if notice is None or notice.after_step is None:
            obey(notices, notice)

    RoundNotices._apply = obeys_what_comes_at_once
    steps(path, count)


def dies_while_connecting(path: str) -> None:
    """A member that is there when torch makes its group, and dies before the devices meet."""
    device = pretend(path)
    device.connect = lambda *_: os._exit(9)
    elastic.init()


def cannot_be_ended(path: str, what: str) -> None:
    """A device of which this never returns: `abort`, or `forget`."""
    device_half.CUT_OFF_S = membership.TAKE_DOWN_S = 0.5
    device = pretend(path)
    setattr(device, what, lambda: time.sleep(600))
    job, record = Everything(), Recorder(path)

    @elastic.run
    def train(state: Any) -> None:
        while True:
            train_a_step(job, device)
            state.commit()
            job.note(record)
            time.sleep(0.01)

    train(job.state)
