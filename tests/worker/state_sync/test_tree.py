"""Everything that a script gives is walked at each commit, and put back in the script's objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.state import ObjectState, TorchState
from elastic_driver.worker.state_sync.contents import UnkeptError


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for m in models for p in m.parameters()], lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def make(**more: Any) -> tuple[TorchState, nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = adam(model)
    return TorchState(model=model, optimizer=optimizer, **more), model, optimizer


def test_flags_go_back() -> None:
    state, model, _ = make()
    model[0].requires_grad_(False)
    state.commit()
    model.eval()
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    state.restore()
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in model[0].parameters()] == [False, False]
    assert all(p.requires_grad for p in model[2].parameters())


def test_buffers_that_are_added_rebound_removed_or_resized_go_back() -> None:
    state, model, _ = make()
    norm = model[1]
    norm.register_buffer("kept", torch.arange(4.0), persistent=False)
    mean, kept = norm.running_mean, norm.kept
    state.commit()
    norm.running_mean = torch.full((3,), 7.0)
    norm.register_buffer("late", torch.ones(1))
    del norm.running_var
    kept.resize_(1).fill_(9)
    state.restore()
    assert norm.running_mean is mean
    assert norm.kept is kept
    assert torch.equal(kept, torch.arange(4.0))
    assert not hasattr(norm, "late")
    assert norm.running_var.shape == (3,)


def test_a_module_that_was_put_in_since_the_commit_goes_and_the_old_one_comes_back() -> None:
    state, model, _ = make()
    state.commit()
    old = model[2]
    model[2] = nn.Linear(3, 5)
    model.extra = nn.Linear(1, 1)
    state.restore()
    assert model[2] is old
    assert not hasattr(model, "extra")


def test_groups_that_were_added_since_the_commit_go_and_removed_ones_come_back() -> None:
    state, model, optimizer = make()
    extra = nn.Linear(3, 1)
    state.extra = extra
    state.commit()
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.5})
    optimizer.param_groups[0]["lr"] = 9.0
    optimizer.param_groups[0]["mark"] = "new"
    state.restore()
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert "mark" not in optimizer.param_groups[0]
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.5})
    state.commit()
    groups = list(optimizer.param_groups)
    optimizer.param_groups.pop()
    state.restore()
    assert optimizer.param_groups == groups
    del model


def test_a_replaced_optimizer_goes_and_the_old_one_comes_back_with_its_moments() -> None:
    state, model, old = make()
    step(model, old)
    state.commit()
    state.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state.restore()
    assert state.optimizer is old
    assert len(old.state) == len(list(model.parameters()))


def test_an_optimizer_inside_of_an_optimizer_is_kept() -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
            self.param_groups = self.base.param_groups

        def step(self, closure: Any = None) -> None:
            self.base.step(closure)

    model = nn.Linear(3, 1)
    optimizer = Outer(model.parameters())
    state = TorchState(model=model, optimizer=optimizer, snapshot=True)
    step(model, optimizer)
    state.commit()
    moments = [s["momentum_buffer"].clone() for s in optimizer.base.state.values()]
    step(model, optimizer)
    state.restore()
    found = [s["momentum_buffer"] for s in optimizer.base.state.values()]
    assert len(found) == len(moments) > 0
    assert all(map(torch.equal, moments, found))


def test_extra_state_goes_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.calls = nn.Linear(3, 1), 0

        def get_extra_state(self) -> dict[str, int]:
            return {"calls": self.calls}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.calls = state["calls"]

    model = Counting()
    state = TorchState(model=model, optimizer=adam(model))
    model.calls = 3
    state.commit()
    model.calls = 8
    state.restore()
    assert model.calls == 3


def test_parts_inside_of_lists_and_dictionaries_are_kept() -> None:
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    table = {"schedule": torch.optim.lr_scheduler.StepLR(adam(models[0]), 1)}
    state = TorchState(models=models, table=table)
    state.commit()
    before = [p.clone() for m in models for p in m.parameters()]
    with torch.no_grad():
        models[1].weight.add_(1)
    table["schedule"].last_epoch = 40
    models.append(nn.Linear(1, 1))
    state.restore()
    assert len(models) == 2
    assert all(map(torch.equal, before, [p for m in models for p in m.parameters()]))
    assert table["schedule"].last_epoch == 0


def test_a_parameter_as_an_attribute_stays_the_object_that_the_optimizer_trains() -> None:
    alpha = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([alpha], lr=0.1)
    state = TorchState(alpha=alpha, optimizer=optimizer)
    state.commit()
    (alpha * 3).sum().backward()
    optimizer.step()
    state.restore()
    assert state.alpha is alpha
    assert alpha.item() == 0.0
    assert optimizer.param_groups[0]["params"][0] is alpha


def test_a_parameter_that_is_nowhere_in_the_state_is_kept_with_its_optimizer() -> None:
    alpha = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([alpha], lr=0.1)
    state = TorchState(optimizer=optimizer, snapshot=True)
    state.commit()
    (alpha * 3).sum().backward()
    optimizer.step()
    state.restore()
    assert alpha.item() == 0.0
    assert state._tree.leaves.names == ["optimizer.params.0"]


class Metric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0


def test_a_module_that_keeps_nothing_is_refused_once_its_attributes_change() -> None:
    state = TorchState(model=nn.Linear(1, 1), loss=nn.MSELoss(), metric=Metric())
    for _ in range(3):
        state.commit()
    state.metric.total += 1.5
    with pytest.raises(UnkeptError, match=r"'metric'.*keeps none of them.*register them as"):
        state.commit()


@pytest.mark.parametrize(
    "bad", [iter([1]), lambda: 0, object(), torch.ones(1, requires_grad=True) * 2]
)
def test_what_cannot_be_kept_is_refused_by_name_and_the_last_commit_stays(bad: object) -> None:
    state = ObjectState(table={"fine": 1})
    state.commit()
    state.table["bad"] = bad
    with pytest.raises(UnkeptError, match=r"'table\.bad' cannot be sent"):
        state.commit()
    state.restore()
    assert state.table == {"fine": 1}


def test_a_lazy_module_is_refused_by_name() -> None:
    state = TorchState(model=nn.LazyLinear(3))
    with pytest.raises(UnkeptError, match=r"'model\.weight'.*no shape yet"):
        state.commit()


def test_gradients_of_an_accumulation_belong_to_the_commit() -> None:
    state, model, optimizer = make()
    state.commit()
    model(torch.ones(2, 3)).sum().backward()
    state.commit()
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model(torch.ones(2, 3)).sum().backward()
    state.restore()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(kept) > 0
    assert all(map(torch.equal, kept, found))
    optimizer.step()
    state.commit()
    state.restore()
    assert all(p.grad is None for p in model.parameters()), "used up by the step"


def test_gradients_of_this_rank_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state, model, _ = make()
    state.commit()
    gradients = state._tree.gradients
    monkeypatch.setattr(gradients, "is_local_now", lambda _: True)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(UsageError, match=r"each rank holds a part.*commit after optimizer\.step"):
        state.commit()


def test_an_attribute_that_came_after_the_commit_goes() -> None:
    state = ObjectState(step=0)
    state.commit()
    state.later = 5
    state.restore()
    assert not hasattr(state, "later")


def test_gradients_that_are_never_dropped_belong_to_each_commit() -> None:
    state, model, optimizer = make()
    state.commit()

    def accumulate() -> None:
        model(torch.ones(2, 3)).sum().backward()

    for _ in range(4):
        accumulate()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 0.5  # a momentum of the script's own
        state.commit()
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    accumulate()
    state.restore()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(kept)
    assert all(map(torch.equal, kept, found))


def test_gradients_of_a_step_by_hand_that_came_to_nothing_are_dropped() -> None:
    model = nn.Linear(3, 1)
    state = TorchState(model=model)
    for _ in range(5):
        model(torch.ones(2, 3)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
        state.commit()
    model(torch.ones(2, 3)).sum().backward()
    state.restore()
    assert all(p.grad is None for p in model.parameters())


def test_names_that_scripts_use_are_free() -> None:
    state = ObjectState(number=1, synced_round=2, is_over=3, expect=4)
    assert (state.number, state.synced_round, state.is_over, state.expect) == (1, 2, 3, 4)
