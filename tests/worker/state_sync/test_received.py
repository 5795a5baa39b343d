"""Parts that are not as the sender's, in all ways in which ranks differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.sharing import LiveState
from tests.worker.state_sync.test_sharing import carry, live_state
from tests.worker.training import digest


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(number))
        model(x).pow(2).sum().backward()
        optimizer.step()


def of(state: LiveState, name: str) -> Any:
    return state.values[name]


# ---- modules ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["none", "deleted"])
def test_buffers_that_the_sender_has_no_more_go(how: str) -> None:
    ours, theirs = net(), net()
    if how == "none":
        theirs[1].running_mean = None
    else:
        del theirs[1].running_mean
    receiver = live_state(net=ours)
    carry(live_state(net=theirs), receiver)
    assert dict(ours[1].named_buffers()).keys() == dict(theirs[1].named_buffers()).keys()
    assert ("running_mean" in ours[1]._buffers) == (how == "none")
    carry(live_state(net=net()), receiver)
    assert ours[1].running_mean.shape == (2,), "and come again"


def test_buffers_of_another_size_become_those_of_the_sender() -> None:
    ours, theirs = net(), net()
    for each, size in ((ours, 2), (theirs, 5)):
        each.register_buffer("queue", torch.rand(size))
        each.register_buffer(
            "kind", torch.zeros(2, dtype=torch.int64 if size == 2 else torch.int32)
        )
    queue = ours.queue
    carry(live_state(net=theirs), live_state(net=ours))
    assert ours.queue is queue
    assert torch.equal(queue, theirs.queue)
    assert ours.kind.dtype == torch.int32


def test_a_late_buffer_takes_the_place_of_an_attribute() -> None:
    ours, theirs = net(), net()
    ours.cache = theirs.cache = None
    del theirs.cache
    theirs.register_buffer("cache", torch.ones(3), persistent=False)
    carry(live_state(net=theirs), live_state(net=ours))
    assert torch.equal(ours.cache, torch.ones(3))
    assert "cache" not in ours.state_dict()


def test_a_buffer_that_shares_its_memory_with_itself_is_received() -> None:
    ours, theirs = net(), net()
    for each, value in ((ours, 0.0), (theirs, 7.0)):
        each.register_buffer("wide", torch.tensor([value]).expand(4))
    carry(live_state(net=theirs), live_state(net=ours))
    assert ours.wide.tolist() == [7.0] * 4


@pytest.mark.parametrize("ours_shared", [True, False])
def test_a_buffer_that_is_registered_twice_arrives_in_both_places(ours_shared: bool) -> None:
    def make(shared: bool) -> nn.Sequential:
        model, table = net(), torch.rand(3)
        model[0].register_buffer("table", table)
        model[2].register_buffer("table", table if shared else torch.rand(3), persistent=False)
        return model

    ours, theirs = make(ours_shared), make(shared=True)
    carry(live_state(net=theirs), live_state(net=ours))
    assert torch.equal(ours[0].table, theirs[0].table)
    assert ours[2].table is ours[0].table
    carry(live_state(net=make(shared=False)), live_state(net=ours))
    assert not torch.equal(ours[2].table, ours[0].table)


def test_tied_weights_stay_tied() -> None:
    def make() -> nn.Module:
        found = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        found[1].weight = found[0].weight
        return found

    ours, theirs = make(), make()
    carry(live_state(net=theirs), live_state(net=ours))
    assert ours[1].weight is ours[0].weight
    assert digest(ours.state_dict()) == digest(theirs.state_dict())


def test_flags_of_the_sender_arrive() -> None:
    ours, theirs = net(), net()
    theirs[1].eval()
    theirs[0].requires_grad_(False)
    ours[2].requires_grad_(False)
    carry(live_state(net=theirs), live_state(net=ours))
    assert [m.training for m in ours.modules()] == [m.training for m in theirs.modules()]
    flags = [[p.requires_grad for p in each.parameters()] for each in (ours, theirs)]
    assert flags[0] == flags[1]


class Extra(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight, self.state = nn.Parameter(torch.ones(1)), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    "state", [None, 3, {"a": torch.ones(2), "b": [torch.zeros(1), "x"]}, torch.arange(3)], ids=repr
)
def test_extra_state_of_any_kind_arrives(state: Any) -> None:
    ours = nn.Sequential(Extra("old"), nn.Linear(1, 1))
    carry(live_state(net=nn.Sequential(Extra(state), nn.Linear(1, 1))), live_state(net=ours))
    assert repr(ours[0].state) == repr(state)


def test_a_submodule_that_only_the_sender_has_is_named() -> None:
    theirs = net()
    theirs.add_module("head", nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"net is built differently.*no 'head\.weight'"):
        carry(live_state(net=theirs), live_state(net=net()))
    theirs = net()
    theirs.add_module("drop", nn.Dropout())
    with pytest.raises(UsageError, match=r"net is built differently.*other submodules"):
        carry(live_state(net=theirs), live_state(net=net()))


def test_a_module_that_is_lazy_here_is_named() -> None:
    sender = live_state(net=nn.Sequential(nn.Linear(2, 3)))
    receiver = LiveState(type(sender.tree)({}, sender.tree.steps), sender.random)
    receiver.values["net"] = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"net\.0\.weight.*no shape yet"):
        carry(sender, receiver)


# ---- optimizers ---------------------------------------------------------------------------


def pair(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[LiveState, LiveState]:
    """A sender that has trained, and a receiver that has not."""
    states = []
    for steps in (3, 0):
        torch.manual_seed(steps)
        model = net()
        optimizer = make(model.parameters())
        train(model, optimizer, steps)
        optimizer.zero_grad()
        states.append(live_state(net=model, opt=optimizer))
    return states[0], states[1]


def snapshot(state: LiveState) -> None:
    """Commit, with copies of everything."""
    state.tree.leaves.copy_all, state.tree.leaves._choice = True, None
    state.tree.keep()


def go_on(state: LiveState) -> str:
    """Train on, and return a digest of all."""
    train(of(state, "net"), of(state, "opt"), 3)
    return digest(of(state, "net").state_dict(), of(state, "opt").state_dict())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_train_on_to_the_same_bits(name: str) -> None:
    sender, receiver = pair(OPTIMIZERS[name])
    carry(sender, receiver)
    assert go_on(sender) == go_on(receiver)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_snapshot_goes_back_to_the_same_bits(name: str) -> None:
    state, _ = pair(OPTIMIZERS[name])
    snapshot(state)
    before = digest(of(state, "net").state_dict(), of(state, "opt").state_dict())
    after = go_on(state)
    state.tree.roll_back()
    assert digest(of(state, "net").state_dict(), of(state, "opt").state_dict()) == before
    assert go_on(state) == after


def test_lbfgs_goes_on_with_all_that_it_remembers() -> None:
    def closure(state: LiveState) -> Callable[[], torch.Tensor]:
        def loss() -> torch.Tensor:
            of(state, "opt").zero_grad()
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
            found = of(state, "net")(x).pow(2).sum()
            found.backward()
            return found

        return loss

    states = []
    for _ in range(2):
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        states.append(live_state(net=model, opt=optimizer))
    sender, receiver = states
    of(sender, "opt").step(closure(sender))
    of(sender, "opt").zero_grad()
    sender.tree.keep()
    carry(sender, receiver)
    for state in states:
        of(state, "opt").step(closure(state))
    found = [digest(of(s, "net").state_dict(), of(s, "opt").state_dict()) for s in states]
    assert found[0] == found[1]


def test_what_an_optimizer_remembers_comes_in_the_senders_order() -> None:
    def make() -> LiveState:
        model = net()
        return live_state(net=model, opt=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def order(state: LiveState) -> list[int]:
        numbers = {p: n for n, p in enumerate(of(state, "net").parameters())}
        return [numbers[p] for p in of(state, "opt").state]

    sender, receiver = make(), make()
    model, optimizer = of(sender, "net"), of(sender, "opt")
    for parameter in reversed(list(model.parameters())):
        optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    sender.tree.keep()
    carry(sender, receiver)
    assert order(sender) == sorted(order(sender), reverse=True) != []
    assert order(receiver) == order(sender)


def test_groups_that_the_sender_has_no_more_go() -> None:
    def make() -> LiveState:
        model = net()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1.0}]
        return live_state(net=model, opt=torch.optim.SGD(groups, lr=0.1))

    sender, receiver = make(), make()
    del of(sender, "opt").param_groups[0]
    sender.tree.keep()
    carry(sender, receiver)
    ours = of(receiver, "opt").param_groups
    assert [group["lr"] for group in ours] == [1.0]
    assert ours[0]["params"][0] is of(receiver, "net")[2].weight


def test_a_learning_rate_that_is_a_tensor_stays_the_receivers_tensor() -> None:
    sender, receiver = pair(OPTIMIZERS["tensor"])
    rate = of(receiver, "opt").param_groups[0]["lr"]
    of(sender, "opt").param_groups[0]["lr"].fill_(0.03)
    carry(sender, receiver)
    assert of(receiver, "opt").param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.03)


def test_moments_that_the_receiver_has_are_filled_and_no_others_are_left() -> None:
    sender, _ = pair(OPTIMIZERS["adam"])
    receiver, _ = pair(OPTIMIZERS["adam"])
    weight = of(receiver, "net")[0].weight
    moment = of(receiver, "opt").state[weight]["exp_avg"]
    of(receiver, "opt").state[weight]["more"] = torch.ones(1)
    del of(sender, "opt").state[of(sender, "net")[2].bias]
    sender.tree.keep()
    carry(sender, receiver)
    found = of(receiver, "opt").state
    assert found[weight]["exp_avg"] is moment
    assert "more" not in found[weight]
    assert of(receiver, "net")[2].bias not in found


class Odd(torch.optim.Optimizer):
    """Remembers numbers, lists, and things that belong to no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            common = self.state["common"]
            common["steps"] = common.get("steps", 0) + 1
            common.setdefault("norm", torch.zeros(1)).add_(1)
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    own = self.state[p]
                    own["step"] = own.get("step", 0) + 1
                    own.setdefault("history", []).append(p.grad.norm().item())
                    own.setdefault("slots", [torch.zeros_like(p)])[0].add_(p.grad)
                    p.sub_(own["slots"][0], alpha=group["lr"] / own["step"])


def test_whatever_an_optimizer_remembers_is_sent_and_put_back() -> None:
    sender, receiver = pair(Odd)
    carry(sender, receiver)
    mine, theirs = (of(state, "opt").state for state in (receiver, sender))
    assert sorted(map(repr, mine.values())) == sorted(map(repr, theirs.values()))
    assert go_on(sender) == go_on(receiver)
    snapshot(sender)
    before = repr(list(theirs.values()))
    after = go_on(sender)
    sender.tree.roll_back()
    assert repr(list(theirs.values())) == before
    assert go_on(sender) == after


class Sharp(torch.optim.Optimizer):
    """An optimizer around another one, as published implementations of SAM are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
        self.base.step()


def test_an_optimizer_inside_of_an_optimizer_arrives() -> None:
    sender, receiver = pair(Sharp)
    carry(sender, receiver)
    ours = of(receiver, "opt")
    assert ours.param_groups is ours.base.param_groups
    assert go_on(sender) == go_on(receiver)
    moments = [
        [s["momentum_buffer"] for s in of(x, "opt").base.state.values()] for x in (sender, receiver)
    ]
    assert all(map(torch.equal, *moments))


class Own(torch.optim.SGD):
    """Has a state_dict of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "inner": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        super().load_state_dict(state["inner"])


def test_an_optimizer_with_a_state_dict_of_its_own_is_kept_by_that() -> None:
    sender, receiver = pair(Own)
    carry(sender, receiver)
    assert of(receiver, "opt").calls == 3
    assert go_on(sender) == go_on(receiver)
    state = sender
    snapshot(state)
    after = go_on(state)
    state.tree.roll_back()
    assert of(state, "opt").calls == 6
    assert go_on(state) == after


def test_an_optimizer_of_its_own_with_parameters_in_no_module_is_refused() -> None:
    alone = nn.Parameter(torch.ones(1))
    with pytest.raises(UsageError, match=r"'opt'.*a parameter that is in no module of the state"):
        live_state(opt=Own([alone]))


def test_a_parameter_in_two_optimizers_is_kept_once() -> None:
    def make() -> LiveState:
        model = net()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
        for optimizer in optimizers:
            train(model, optimizer, 2)
            optimizer.zero_grad()
        return live_state(net=model, a=optimizers[0], b=optimizers[1])

    torch.manual_seed(1)
    sender = make()
    torch.manual_seed(2)
    receiver = make()
    carry(sender, receiver)
    for name in "ab":
        states = [of(state, name).state_dict() for state in (sender, receiver)]
        assert digest(states[0]) == digest(states[1])


def test_the_same_object_under_two_names_is_sent_once() -> None:
    states = []
    for _ in range(2):
        model = net()
        states.append(live_state(model=model, again=model, inside=[model]))
    assert list(states[0].parts) == ["model"]
    carry(*states)
    ours = states[1].values
    assert ours["again"] is ours["model"] is ours["inside"][0]
    assert digest(ours["model"].state_dict()) == digest(of(states[0], "model").state_dict())


def test_attributes_may_be_called_values_or_gradients() -> None:
    states = [
        live_state(values=net(), gradients=net(), random=[1], parts={"a": net()}) for _ in "ab"
    ]
    carry(*states)
    for name in ("values", "gradients"):
        found = [digest(of(state, name).state_dict()) for state in states]
        assert found[0] == found[1]


# ---- schedules and scalers ------------------------------------------------------------------


class Ramp:
    def __init__(self) -> None:
        self.slope = 0.5

    def __call__(self, epoch: int) -> float:
        return 1 / (1 + self.slope * epoch)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: schedules.StepLR(o, 2),
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "callable": lambda o: schedules.LambdaLR(o, Ramp()),
    "multiplicative": lambda o: schedules.MultiplicativeLR(o, lambda _: 0.9),
    "constant": schedules.ConstantLR,
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 10),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "cyclic exponential": lambda o: schedules.CyclicLR(
        o, 0.01, 0.1, mode="exp_range", gamma=0.9, cycle_momentum=False
    ),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)]
    ),
    "swa": lambda o: SWALR(o, 0.01),
}


def scheduled(name: str, steps: int) -> LiveState:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    state = live_state(net=model, opt=optimizer, schedule=schedule)
    rates(state, steps)
    state.tree.keep()
    return state


def rates(state: LiveState, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        train(of(state, "net"), of(state, "opt"), 1)
        of(state, "opt").zero_grad()
        of(state, "schedule").step()
        found.append(of(state, "opt").param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on_on_the_receiver_and_after_a_roll_back(name: str) -> None:
    sender, receiver = scheduled(name, 3), scheduled(name, 0)
    carry(sender, receiver)
    assert (
        of(sender, "schedule").state_dict().keys() == of(receiver, "schedule").state_dict().keys()
    )
    expected = rates(copy_of(sender, name), 4)
    assert rates(receiver, 4) == expected
    for _ in range(2):
        assert rates(sender, 4) == expected
        sender.tree.roll_back()


def copy_of(state: LiveState, name: str) -> LiveState:
    found = scheduled(name, 0)
    carry(state, found)
    return found


def test_a_schedule_that_waits_for_a_plateau_goes_on() -> None:
    def make(losses: list[float]) -> LiveState:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = schedules.ReduceLROnPlateau(optimizer, patience=1)
        for loss in losses:
            schedule.step(loss)
        return live_state(net=model, opt=optimizer, schedule=schedule)

    sender, receiver = make([1.0, 1.1]), make([])
    carry(sender, receiver)
    of(receiver, "schedule").step(1.2)
    assert of(receiver, "opt").param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_scaler_arrives_and_goes_back() -> None:
    states = [live_state(scaler=torch.amp.GradScaler("cpu", init_scale=2.0**n)) for n in (5, 9)]
    carry(*states)
    assert of(states[1], "scaler").get_scale() == 32.0
    of(states[1], "scaler").load_state_dict(torch.amp.GradScaler("cpu", 2.0).state_dict())
    assert of(states[1], "scaler").get_scale() == 2.0
    states[1].tree.roll_back()
    assert of(states[1], "scaler").get_scale() == 32.0


def test_an_average_of_weights_by_torch_arrives() -> None:
    def make(seed: int) -> LiveState:
        torch.manual_seed(seed)
        model = net()
        average = AveragedModel(model)
        for _ in range(seed):
            average.update_parameters(model)
        return live_state(net=model, average=average)

    sender, receiver = make(2), make(1)
    carry(sender, receiver)
    found = [digest(of(state, "average").state_dict()) for state in (sender, receiver)]
    assert found[0] == found[1]


# ---- what a receiver has and cannot keep -----------------------------------------------------


def test_a_receiver_in_the_middle_of_a_step_may_hold_what_cannot_be_kept() -> None:
    sender = live_state(net=net(), loss=0.5, log=[1])
    receiver = live_state(net=net(), loss=0.0, log=[])
    x = torch.ones(2, 2)
    receiver.values["loss"] = of(receiver, "net")(x).sum()
    receiver.values["log"].append(iter([1]))
    carry(sender, receiver)
    assert (receiver.values["loss"], receiver.values["log"]) == (0.5, [1])


def test_copies_of_states_are_their_own() -> None:
    sender, receiver = pair(OPTIMIZERS["adam"])
    carry(sender, receiver)
    before = copy.deepcopy(of(receiver, "opt").state_dict())
    train(of(sender, "net"), of(sender, "opt"), 2)
    assert digest(of(receiver, "opt").state_dict()) == digest(before)
