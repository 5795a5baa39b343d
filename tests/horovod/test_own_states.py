"""Classes that scripts derive from Horovod's states, in a world of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import elastic_driver.horovod.torch as hvd
from elastic_driver.errors import HostsUpdatedInterrupt, UsageError
from elastic_driver.horovod.common.elastic import ObjectState, State, kept_of
from elastic_driver.worker.heartbeat.training_progress import AT_ONCE

pytestmark = pytest.mark.usefixtures("world")


class Counting(State):
    """Keeps its attributes by itself; they come before, or after, Horovod's own."""

    def __init__(self, *, first: bool) -> None:
        if first:
            super().__init__(hvd.broadcast_object, hvd.rank)
        self.step, self.seen, self.lock = 0, list[int](), threading.Lock()
        self._round, self._values, self._version = 1, 2, 3  # names that ours have, too
        self.save()
        if not first:
            super().__init__(hvd.broadcast_object, hvd.rank)

    def save(self) -> None:
        self._saved = {"step": self.step, "seen": list(self.seen)}

    def restore(self) -> None:
        self.step, self.seen = self._saved["step"], list(self._saved["seen"])

    def sync(self) -> None:
        self._saved = self._bcast_object(self._saved)
        self.restore()


@pytest.mark.parametrize("first", [True, False])
def test_a_state_may_keep_everything_by_itself(first: bool) -> None:
    state = Counting(first=first)
    state.step, state.seen = 3, [1]
    state.commit()
    state.step = 9
    state.seen.append(2)
    state.restore()
    assert (state.step, state.seen) == (3, [1])
    assert (state._round, state._values, state._version) == (1, 2, 3)
    state.sync()
    assert state.step == 3


class More(hvd.elastic.TorchState):
    """Keeps one thing more than it was given."""

    def __init__(self, **given: Any) -> None:
        self.rate = 0.1
        super().__init__(**given)
        self.extra = 5
        self.calls = list[str]()

    def save(self) -> None:
        self.calls.append("save")
        self._saved_extra = self.extra
        super().save()

    def restore(self) -> None:
        self.calls.append("restore")
        super().restore()
        self.extra = self._saved_extra

    def sync(self) -> None:
        self.calls.append("sync")
        super().sync()


def test_a_method_of_the_script_is_called_once_and_so_is_ours() -> None:
    model = torch.nn.Linear(1, 1)
    state = More(model=model, epoch=1)
    state.extra, state.epoch = 7, 2
    state.commit()
    before = model.weight.detach().clone()
    state.extra, state.epoch = 8, 3
    with torch.no_grad():
        model.weight.add_(1)
    kept_of(state)._restore_all()
    assert (state.rate, state.extra, state.epoch) == (0.1, 7, 2)
    assert torch.equal(model.weight, before)
    kept_of(state).sync()
    assert state.calls == ["save", "restore", "sync"]


def test_attributes_have_any_name() -> None:
    names = ("version", "clean", "local", "_hidden", "state_version", "values", "_tree", "round")
    state = ObjectState(**dict.fromkeys(names, 1))
    for name in names:
        setattr(state, name, 2)
    state.save()
    for name in names:
        setattr(state, name, 3)
    state.restore()
    assert [getattr(state, name) for name in names] == [2] * len(names)
    with pytest.raises(UsageError, match="a method 'commit'"):
        ObjectState(commit=1)


def test_a_property_with_a_setter_and_a_value_of_the_class_are_used() -> None:
    class Own(ObjectState):
        done = 0
        epoch = 7

        @property
        def progress(self) -> float:
            return self.done / 10

        @progress.setter
        def progress(self, value: float) -> None:
            self.done = int(value * 10)

    state = Own(progress=0.5, epoch=1)
    assert (state.done, state.progress, state.epoch) == (5, 0.5, 1)
    state.progress, state.epoch = 0.7, 2
    state.commit()
    state.progress, state.epoch = 0.9, 3
    state.restore()
    assert (state.done, state.epoch) == (7, 2)


def test_an_attribute_that_comes_later_is_the_scripts_own() -> None:
    state = ObjectState(epoch=0)
    state.later, state.lock = 3, threading.Lock()
    state.commit()
    state.later = 4
    state.restore()
    assert state.later == 4
    state._saved_state["later"] = 4  # as scripts for Horovod add one
    state.commit()
    state.later = 5
    state.restore()
    assert (state.later, state._saved_state["epoch"]) == (4, 0)
    del state.epoch
    assert not hasattr(state, "epoch")


@pytest.mark.parametrize("method", ["commit", "check_host_updates"])
@pytest.mark.parametrize("make", [lambda: Counting(first=True), lambda: More(epoch=0)])
def test_changes_of_the_hosts_are_followed_by_all_of_them(
    make: Callable[[], State], method: str
) -> None:
    state = make()
    kept_of(state).leave_at_next(AT_ONCE)
    with pytest.raises(HostsUpdatedInterrupt):
        getattr(state, method)()


def test_a_script_may_announce_a_change_itself() -> None:
    state = ObjectState(epoch=0)
    state.commit()
    state.on_hosts_updated(1.0, 1)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    assert raised.value.skip_sync
    state.on_hosts_updated(1.0, 2)  # not newer
    state.commit()
    assert HostsUpdatedInterrupt(True).skip_sync
    assert not HostsUpdatedInterrupt().skip_sync
