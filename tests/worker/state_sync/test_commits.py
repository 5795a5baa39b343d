"""A commit counts as a whole or not at all, and a state is honest about what it holds."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_driver.errors import UsageError
from elastic_driver.worker import run
from elastic_driver.worker.state import ObjectState, TorchState
from elastic_driver.worker.state_sync import leaves as leaves_module
from elastic_driver.worker.state_sync.contents import UnkeptError
from tests.worker.training import digest


class Fails(RuntimeError):
    """What a script's own object raises."""


class Fragile:
    """A part whose methods fail when they are told to."""

    def __init__(self) -> None:
        self.value = 0
        self.fails_to: str = ""

    def state_dict(self) -> dict[str, int]:
        if self.fails_to == "save":
            raise Fails("no state")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails_to == "load":
            raise Fails("no loading")
        self.value = state["value"]


def job(**more: Any) -> TorchState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return TorchState(model=model, optimizer=optimizer, step=0, seen=[], **more)


def step(state: TorchState) -> None:
    state.optimizer.zero_grad()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(state.step))
    state.model(x).pow(2).sum().backward()
    state.optimizer.step()
    state.step += 1
    state.seen.append(state.step)


def all_of(state: TorchState) -> str:
    rates = [group["lr"] for group in state.optimizer.param_groups]
    flags = [p.requires_grad for p in state.model.parameters()]
    tensors = state.model.state_dict(), state.optimizer.state_dict()
    return digest(*tensors, state.step, state.seen, rates, flags, state.model.training)


def bad_value(state: TorchState) -> None:
    state.bad = iter([1])


def bad_inside(state: TorchState) -> None:
    state.seen.append(iter([1]))


def bad_state_dict(state: TorchState) -> None:
    state.fragile.fails_to = "save"


def bad_setting(state: TorchState) -> None:
    state.optimizer.param_groups[0]["extra"] = object()


def bad_memory(state: TorchState) -> None:
    state.optimizer.state[state.model[0].weight]["extra"] = object()


def bad_buffer(state: TorchState) -> None:
    state.model.register_buffer("sparse", torch.eye(2).to_sparse())


def bad_meta(state: TorchState) -> None:
    state.model.register_buffer("meta", torch.empty(2, device="meta"))


def bad_inference(state: TorchState) -> None:
    with torch.inference_mode():
        best = torch.ones(2)
    state.model.register_buffer("best", best)


def bad_extra_state(state: TorchState) -> None:
    class Odd(nn.Module):
        def get_extra_state(self) -> Any:
            return {"it": iter([1])}

        def set_extra_state(self, state: Any) -> None:
            pass

    state.model.odd = Odd()


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize(
    "spoil",
    [
        bad_value,
        bad_inside,
        bad_state_dict,
        bad_setting,
        bad_memory,
        bad_buffer,
        bad_meta,
        bad_inference,
        bad_extra_state,
    ],
)
def test_a_commit_that_is_refused_changes_nothing_about_the_last_one(
    spoil: Callable[[TorchState], None], snapshot: bool
) -> None:
    state = job(snapshot=snapshot, fragile=Fragile())
    for _ in range(5):
        step(state)
        state.commit()
    committed, version = all_of(state), state.version
    if snapshot:
        step(state)
    state.model.eval()
    state.model[0].requires_grad_(False)
    state.optimizer.param_groups[0]["lr"] = 0.7
    state.step = 77
    with torch.no_grad():
        state.model[1].running_mean.add_(1)
    spoil(state)
    for _ in range(2):  # and the second try is refused as the first one
        with pytest.raises(UnkeptError):
            state.commit()
    assert state.version == version
    assert state.clean
    state.fragile.fails_to = ""
    state.restore()
    assert all_of(state) == committed
    step(state)
    state.commit()
    assert (state.version, state.clean) == (version + 1, True)


def test_a_copy_that_fails_leaves_the_state_unclean(monkeypatch: pytest.MonkeyPatch) -> None:
    state = job(snapshot=True)
    for _ in range(2):
        step(state)
        state.commit()
    step(state)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(leaves_module, "copy_all", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            state.commit()
    assert not state.clean, "half of the copies may be new"
    state.commit()
    assert state.clean


def test_memory_that_lacks_for_copies_leaves_the_last_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = job()
    step(state)
    state.commit()
    committed = all_of(state)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    state.average = copy.deepcopy(state.model)
    with monkeypatch.context() as patched:
        patched.setattr(leaves_module.torch, "empty_like", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            state.commit()
    assert state.clean
    state.restore()
    assert all_of(state) == committed
    assert not hasattr(state, "average")


def test_a_roll_back_that_fails_half_way_leaves_the_state_unclean() -> None:
    state = job(fragile=Fragile())
    state.commit()
    state.fragile.fails_to = "load"
    with pytest.raises(Fails):
        state.restore()
    assert not state.clean
    state.fragile.fails_to = ""
    step(state)
    state.commit()
    assert state.clean


def test_an_attribute_can_be_deleted_and_comes_back_with_the_commit() -> None:
    state = job(note="first", extra=nn.Linear(1, 1))
    state.commit()
    extra = state.extra
    del state.note, state.extra
    with pytest.raises(AttributeError):
        _ = state.note
    state.restore()
    assert state.note == "first"
    assert state.extra is extra
    del state.extra
    state.commit()
    assert "extra" not in state._tree.parts
    state.restore()
    assert not hasattr(state, "extra")
    with pytest.raises(AttributeError, match="no 'nothing'"):
        del state.nothing


def test_structures_that_change_twice_go_back_to_the_commit() -> None:
    state = job()
    step(state)
    state.commit()
    committed = all_of(state)
    names = list(state.model.state_dict())
    for number in range(2):
        state.model.add_module(f"more{number}", nn.Linear(3, 3))
        state.optimizer.add_param_group({"params": getattr(state.model, f"more{number}").weight})
        state.bad = iter([1])
        with pytest.raises(UnkeptError):
            state.commit()
    state.restore()
    assert list(state.model.state_dict()) == names
    assert all_of(state) == committed
    assert state.clean
    step(state)
    state.commit()


def test_a_tensor_that_left_the_state_and_came_back_is_what_it_was() -> None:
    state = job()
    for _ in range(5):
        step(state)
        state.commit()
    old = state.model[0]
    state.model[0] = nn.Linear(3, 3)
    state.commit()
    state.model[0] = old
    state.commit()
    committed = copy.deepcopy(state.model.state_dict())
    assert state.clean
    state.restore()
    assert digest(state.model.state_dict()) == digest(committed)


def test_two_states_that_share_a_model_are_both_clean_after_a_roll_back() -> None:
    one = job()
    two = TorchState(model=one.model, best=[1])
    for _ in range(5):
        step(one)
        one.commit()
        two.commit()
    committed = all_of(one)
    one.model(torch.ones(2, 3))
    two.best.append(2)
    one._restore_all()
    assert one.clean
    assert two.clean
    assert all_of(one) == committed
    assert two.best == [1]


def test_an_older_commit_puts_back_nothing_inside_of_its_values_that_a_newer_one_has() -> None:
    log, seen = [1], {"a": {1}}
    older = ObjectState(table={"log": log, "own": [0]}, pair=(seen["a"], torch.zeros(2)), count=0)
    newer = ObjectState(notes=[[log]], seen=seen)
    older.commit()
    newer.commit()
    for step in range(2):
        log.append(step)
        seen["a"].add(step + 5)
        older.table["own"].append(step)
        older.pair[1].add_(1)
        newer.commit()
    log.append("half of a step")
    seen["a"].clear()
    newer._restore_all()
    assert (log, seen) == ([1, 0, 1], {"a": {1, 5, 6}})
    assert older.table == {"log": log, "own": [0]}
    assert older.table["log"] is newer.notes[0][0] is log
    assert older.pair[0] is seen["a"]
    assert older.pair[1].tolist() == [0.0, 0.0]


def test_a_state_with_an_older_commit_puts_back_nothing_that_a_newer_one_has() -> None:
    log = [0]
    older = ObjectState(model=None, log=log, mine=[1])
    newer = job(log=log, snapshot=True)
    older.model = newer.model
    older.commit()
    for _ in range(3):
        step(newer)
        log.append(1)
        older.mine.append(2)
        newer.commit()
    committed = all_of(newer)
    newer.model(torch.ones(2, 3))
    log.clear()
    newer._restore_all()
    assert all_of(newer) == committed
    assert log == [0, 1, 1, 1]
    assert older.mine == [1]
    assert newer.clean


def test_a_restore_of_the_scripts_own_is_called() -> None:
    class Own(ObjectState):
        calls = 0

        def restore(self) -> None:
            Own.calls += 1
            super().restore()

    state = Own(step=1)
    state.commit()
    state.step = 2
    state._restore_all()
    assert (Own.calls, state.step) == (1, 1)


def test_the_random_numbers_are_those_of_the_state_that_is_trained() -> None:
    trained = ObjectState(step=0)
    other = ObjectState(best=0)
    other.commit()
    random.random()
    trained.commit()
    drawn = random.random()
    trained._restore_all()
    assert random.random() == drawn


def test_a_rank_that_is_not_clean_draws_again_what_it_drew() -> None:
    state = job()
    state.commit()
    drawn = torch.rand(2)
    step(state)
    assert not state.clean
    state.restore()
    assert torch.equal(torch.rand(2), drawn)


@pytest.mark.usefixtures("no_other_states")
def test_what_reset_callbacks_change_belongs_to_the_commit() -> None:
    state = job()
    for _ in range(5):
        step(state)
        state.commit()

    def adapt() -> None:
        with torch.no_grad():
            for memory in state.optimizer.state.values():
                memory["momentum_buffer"].mul_(0.5)
        state.optimizer.param_groups[0]["lr"] = 0.05

    state.register_reset_callbacks([adapt])
    run.reset_all()
    assert state.clean
    changed = all_of(state)
    state.model(torch.ones(2, 3))
    state.restore()
    assert all_of(state) == changed


@pytest.mark.usefixtures("no_other_states")
def test_reset_callbacks_make_no_unclean_state_clean() -> None:
    state = job()
    state.commit()
    step(state)
    state.register_reset_callbacks([lambda: None])
    run.reset_all()
    assert not state.clean


@pytest.fixture
def no_other_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of other tests that live on are none of ours."""
    gc.collect()


def test_a_state_and_all_that_it_holds_end_with_its_last_reference() -> None:
    state = job(average=nn.Linear(2, 2), fragile=Fragile())
    for _ in range(3):
        step(state)
        state.commit()
    seen = [weakref.ref(each) for each in (state, state._tree, state._tree.leaves, state._counter)]
    gc.collect()
    gc.disable()
    try:
        del state
        assert [each() for each in seen] == [None] * 4
    finally:
        gc.enable()


def test_copies_are_held_once_and_reused() -> None:
    state = job(snapshot=True)
    step(state)
    state.commit()
    first = [each.data_ptr() for each in state._tree.leaves._commit.copies]
    for _ in range(3):
        step(state)
        state.commit()
        assert [each.data_ptr() for each in state._tree.leaves._commit.copies] == first


def test_the_same_error_names_the_value_wherever_it_stands() -> None:
    state = ObjectState(table={"a": [1, {"b": 2}]})
    state.table["a"][1]["b"] = object()
    with pytest.raises(UsageError, match=r"'table\.a\.1\.b' cannot be sent"):
        state.commit()
