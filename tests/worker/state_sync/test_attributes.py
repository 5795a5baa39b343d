"""Plain attributes of modules and optimizers: those that change are put back and sent."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_driver.worker.state import TorchState
from elastic_driver.worker.state_sync import part as attributes_module
from elastic_driver.worker.state_sync.part import LOOKS, Attributes
from tests.worker.state_sync.test_sharing import carry, live_state


class Net(nn.Module):
    """A model with attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.tau, self.rank, self.name = 2.0, 0, "net"
        self.mean = torch.zeros(2)
        self.queue: deque[Tensor] = deque(maxlen=2)
        self.seen: dict[str, list[int]] = {"calls": []}
        self.drawn = random.Random(1)
        self.latest: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.tau *= 0.9
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.queue.append(x.detach()[0])
        self.seen["calls"].append(len(self.seen["calls"]))
        self.drawn.random()
        self.latest = self.layer(x - self.mean)
        return self.latest * self.tau

    def told(self) -> Any:
        """All that changes."""
        tensors = [self.mean.tolist(), [t.tolist() for t in self.queue]]
        return [
            self.tau,
            *tensors,
            dict(self.seen),
            list(self.seen["calls"]),
            self.drawn.getstate(),
        ]


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps and keeps slow weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.count = 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            p.sub_(p.grad, alpha=0.1 / self.count)
            slow.lerp_(p, 0.5)
        return closure

    def told(self) -> Any:
        """What no `state_dict()` has."""
        return self.count, [t.tolist() for t in self.slow]


def make(**more: Any) -> tuple[TorchState, Net, Counting]:
    net = Net()
    optimizer = Counting(net.parameters())
    return TorchState(model=net, optimizer=optimizer, **more), net, optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("commits", [1, 2, LOOKS, LOOKS + 3])
def test_what_a_half_done_step_has_changed_is_put_back(commits: int) -> None:
    state, net, optimizer = make()
    state.commit()
    for _ in range(commits - 1):
        step(net, optimizer)
        state.commit()
    before, objects = net.told(), (net.queue, net.seen, net.seen["calls"], optimizer.slow)
    net(torch.randn(4, 2))
    assert net.told() != before
    state.restore()
    assert net.told() == before
    mine = (net.queue, net.seen, net.seen["calls"], optimizer.slow)
    assert all(a is b for a, b in zip(mine, objects, strict=True)), "in the script's own objects"


@pytest.mark.parametrize("commits", [1, 2, LOOKS + 3])
def test_what_an_optimizer_counts_is_put_back_with_its_step(commits: int) -> None:
    state, net, optimizer = make(snapshot=True)
    state.commit()
    for _ in range(commits - 1):
        step(net, optimizer)
        state.commit()
    before = optimizer.told()
    step(net, optimizer)
    state.restore()
    assert optimizer.told() == before


def test_a_newcomer_gets_what_has_changed_and_keeps_what_is_its_own() -> None:
    theirs, mine = Net(), Net()
    sender = live_state(net=theirs, optimizer=Counting(theirs.parameters()))
    for _ in range(6):
        step(theirs, sender.values["optimizer"])
        sender.tree.keep()
    receiver = live_state(net=mine, optimizer=Counting(mine.parameters()))
    mine.rank, mine.name, queue = 3, "mine", mine.queue
    carry(sender, receiver)
    assert mine.told() == theirs.told()
    assert receiver.values["optimizer"].told() == sender.values["optimizer"].told()
    assert (mine.rank, mine.name) == (3, "mine")
    assert mine.queue is queue
    before = mine.told()
    mine(torch.randn(4, 2))
    receiver.tree.roll_back()
    assert mine.told() == before, "and puts it back from then on"


def test_copies_of_first_weights_are_those_of_the_sender() -> None:
    theirs, mine = Net(), Net()
    sender = live_state(optimizer=Counting(theirs.parameters()), net=theirs)
    receiver = live_state(optimizer=Counting(mine.parameters()), net=mine)
    assert receiver.values["optimizer"].told() != sender.values["optimizer"].told()
    carry(sender, receiver)
    assert receiver.values["optimizer"].told() == sender.values["optimizer"].told()


def test_an_attribute_that_begins_to_change_later_is_found() -> None:
    now = [0.0]
    module = nn.Linear(1, 1)
    module.tau = 1.0
    attributes = Attributes("model", [("", module)], lambda: now[0])
    for _ in range(LOOKS + 1):
        attributes.take()
    assert attributes.take() == []
    module.tau = 0.5
    now[0] += 1000.0
    kept = attributes.take()
    module.tau = 0.25
    attributes.put_back(kept)
    assert module.tau == 0.5


def test_attributes_that_come_and_go_are_as_at_the_commit() -> None:
    state, net, _ = make()
    for number in range(LOOKS + 2):
        if number % 2:
            net.extra = [number]
        elif number:
            del net.extra
        state.commit()
    net.extra, net.tau = [7], 9.0
    state.restore()
    assert hasattr(net, "extra")
    assert net.extra == [LOOKS + 1]
    del net.extra
    state.commit()
    net.extra = 1
    state.restore()
    assert not hasattr(net, "extra")


def test_what_is_on_a_graph_is_left_alone() -> None:
    state, net, optimizer = make()
    for _ in range(LOOKS + 2):
        step(net, optimizer)
        state.commit()
    net.latest = latest = net.layer(torch.ones(1, 2))
    state.restore()
    assert net.latest is latest


def test_what_is_too_large_to_be_copied_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attributes_module, "LARGEST", 100)
    state, net, _ = make()
    net.layer.cache = torch.zeros(100)
    for _ in range(3):
        net.layer.cache = net.layer.cache + 1
        state.commit()
    said = capfd.readouterr().err
    assert said.count("model.layer.cache changes, and its 0 MB are too much to be copied") == 1
    net.layer.cache = cache = net.layer.cache + 1
    state.restore()
    assert net.layer.cache is cache


def test_a_module_that_changes_nothing_costs_no_copy() -> None:
    state, _, _ = make()
    for _ in range(LOOKS + 1):
        state.commit()
    assert state._tree.parts["model"].kept.own == []
    assert state._tree.parts["optimizer"].kept.own == []


def test_an_older_document_has_no_attributes() -> None:
    sender, receiver = live_state(net=Net()), live_state(net=Net())
    part, mine = sender.tree.parts["net"], receiver.tree.parts["net"]
    document, tensors = part.outgoing()
    count = len(dict(sender.values["net"].state_dict()))
    mine.accept(document[:5], [tensor for _, tensor in tensors][:count])
    assert receiver.values["net"].told() == Net().told()


class Memo(nn.Module):
    """A model that computes something once, in its third pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(2, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == 3:
            self.first = x.detach().clone()
        return self.layer(x)


def test_an_attribute_that_comes_in_a_lost_step_goes_again() -> None:
    model = Memo()
    state = TorchState(model=model, step=0)
    for _ in range(2):
        model(torch.ones(1, 2))
        state.commit()
    model(torch.full((1, 2), 5.0))
    assert hasattr(model, "first")
    state.restore()
    assert not hasattr(model, "first")
    model(torch.full((1, 2), 7.0))
    state.commit()
    model(torch.ones(1, 2))
    state.restore()
    assert model.first.tolist() == [[7.0, 7.0]]
