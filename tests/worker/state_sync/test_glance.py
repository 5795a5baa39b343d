"""What changes in a state between two commits is seen, though most commits only glance at it.

After some commits of the usual kind a script changes something. The tree has to have the same
tensors then as one that is made anew of the same values.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elastic_driver.errors import UsageError
from elastic_driver.worker.state_sync.part import LOOKS
from elastic_driver.worker.state_sync.steps import Steps
from elastic_driver.worker.state_sync.tree import Tree

SETTLED = LOOKS + 2  # commits, after which a usual one takes no part


class Sam(torch.optim.Optimizer):
    """An optimizer that holds another one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base: torch.optim.Optimizer | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: no test steps it."""


def values() -> dict[str, Any]:
    """Return a model, two optimizers and some plain values, after a step."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    sam = Sam(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    adam.step()
    return {"model": model, "adam": adam, "sam": sam, "epoch": 1, "name": "a"}


def tensors(tree: Tree) -> dict[str, int]:
    """Return the identity of each tensor by its name."""
    found = zip(tree.leaves.names, map(id, tree.leaves.tensors), strict=True)
    return dict(found) | {f"known {name}": id(tensor) for name, tensor in tree.known.items()}


def replace_moment(v: dict[str, Any]) -> None:
    memory = v["adam"].state[v["model"][0].weight]
    memory["step"] = memory["step"].clone()  # of an equal value: another object all the same


def replace_memory(v: dict[str, Any]) -> None:
    state, weight = v["adam"].state, v["model"][0].weight
    state[weight] = {name: tensor.clone() for name, tensor in state[weight].items()}


def rebind_state(v: dict[str, Any]) -> None:
    state = v["adam"].state
    clones = {p: {n: t.clone() for n, t in memory.items()} for p, memory in state.items()}
    v["adam"].state = type(state)(dict, clones)


def rebind_groups(v: dict[str, Any]) -> None:
    extra = nn.Parameter(torch.ones(2))
    old = v["adam"].param_groups
    v["adam"].param_groups = [old[0] | {"params": [*old[0]["params"], extra]}]


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a parameter is replaced": lambda v: setattr(
        v["model"][0], "bias", nn.Parameter(v["model"][0].bias.detach().clone())
    ),
    "a buffer is replaced": lambda v: setattr(v["model"][1], "running_mean", torch.zeros(3)),
    "a buffer is added": lambda v: v["model"][2].register_buffer("scale", torch.ones(1)),
    "a parameter is removed": lambda v: v["model"][2].register_parameter("bias", None),
    "a module is added": lambda v: v["model"].add_module("more", nn.Linear(3, 1)),
    "a module is removed": lambda v: v["model"].pop(2),
    "a module is replaced": lambda v: v["model"].__setitem__(0, nn.Linear(3, 3)),
    "a group is added": lambda v: v["adam"].add_param_group(
        {"params": [nn.Parameter(torch.ones(2))]}
    ),
    "the list of a group's parameters is replaced": lambda v: (
        v["adam"].param_groups[0].update(params=v["adam"].param_groups[0]["params"][:2])
    ),
    "a group is replaced": lambda v: v["adam"].param_groups.__setitem__(
        0, v["adam"].param_groups[0] | {"params": [nn.Parameter(torch.ones(2))]}
    ),
    "a group is removed": lambda v: v["adam"].param_groups.clear(),
    "the list of a group is replaced": lambda v: (
        v["adam"]
        .param_groups[0]
        .__setitem__("params", [nn.Parameter(torch.ones(2)), *v["adam"].param_groups[0]["params"]])
    ),
    "a parameter is appended": lambda v: (
        v["adam"].param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
    ),
    "the groups are rebound": rebind_groups,
    "a moment is replaced": replace_moment,
    "all moments of a parameter are replaced": replace_memory,
    "the memory is rebound": rebind_state,
    "the memory is emptied": lambda v: v["adam"].state.clear(),
    "a moment is added": lambda v: (
        v["adam"].state[v["model"][0].weight].__setitem__("more", torch.ones(3, 3))
    ),
    "an optimizer gets one inside": lambda v: setattr(
        v["sam"], "base", torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    ),
    "another model": lambda v: v.update(model=nn.Linear(2, 2)),
    "a model in place of a number": lambda v: v.update(epoch=nn.Linear(2, 2)),
    "a list of models in place of a number": lambda v: v.update(epoch=[nn.Linear(2, 2)]),
    "a trained tensor in place of a number": lambda v: v.update(
        epoch=torch.ones(3, requires_grad=True)
    ),
    "a new attribute": lambda v: v.update(ema=nn.Linear(2, 2)),
    "an attribute goes": lambda v: v.pop("adam"),
    "an attribute in two places": lambda v: v.update(epoch=v["model"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_seen_at_the_next_commit(change: str) -> None:
    given = values()
    tree = Tree(given, Steps())
    for _ in range(SETTLED):
        given["epoch"] += 1
        tree.keep()
    before = tensors(tree)
    CHANGES[change](given)
    tree.keep()
    fresh = Tree(dict(given), Steps())
    fresh.keep()
    assert tensors(tree) == tensors(fresh)
    if change != "an attribute in two places":
        assert tensors(tree) != before, "the change is one"


def test_settings_that_change_are_copied_at_the_next_commit() -> None:
    given = values()
    tree = Tree(given, Steps())
    group = given["adam"].param_groups[0]
    for _ in range(SETTLED):
        tree.keep()
    for change in ({"lr": 0.5}, {"betas": (0.5, 0.6)}, {"more": [1]}):
        group.update(change)
        tree.keep()
        group.update(lr=9.0, betas=(0, 0))
        group.setdefault("more", []).append(2)
        tree.roll_back()
        assert group | change == group
    group["renamed"] = group.pop("more")
    tree.keep()
    group["more"] = group.pop("renamed")
    tree.roll_back()
    assert group["renamed"] == [1]
    assert "more" not in group


def test_flags_that_change_are_kept_at_the_next_commit() -> None:
    given = values()
    tree = Tree(given, Steps())
    for _ in range(SETTLED):
        tree.keep()
    given["model"][1].eval()
    given["model"][2].weight.requires_grad_(False)
    tree.keep()
    given["model"].train().requires_grad_(True)
    tree.roll_back()
    assert not given["model"][1].training
    assert not given["model"][2].weight.requires_grad
    assert given["model"].training


def test_a_usual_commit_does_not_look_at_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    given = values()
    tree = Tree(given, Steps())
    tree.keep()
    looked = []
    for part in tree.parts.values():
        monkeypatch.setattr(part, "look", lambda name=part.name: looked.append(name))
    given["epoch"] += 1
    tree.keep()
    assert looked == []
    given["model"].register_buffer("more", torch.ones(1))
    tree.keep()
    assert looked == ["model", "adam", "sam"]


def noted(names: list[str], name: str, take: Callable[[], Any]) -> Any:
    names.append(name)
    return take()


def test_a_usual_commit_takes_no_part_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = values()
    tree = Tree(given, Steps(), clock=lambda: 0.0)
    for _ in range(SETTLED):
        tree.keep()
    taken: list[str] = []
    for part in tree.parts.values():
        monkeypatch.setattr(part, "take", partial(noted, taken, part.name, part.take))
    given["epoch"] += 1
    tree.keep()
    assert taken == []
    given["adam"].param_groups[0]["lr"] = 0.5
    tree.keep()
    assert taken == ["adam"], "the groups of this one have changed"
    given["model"].eval()
    tree.keep()
    assert taken == ["adam", "model", "adam", "sam"]


def test_after_a_commit_that_was_refused_all_parts_are_taken_again() -> None:
    given = values()
    tree = Tree(given, Steps())
    for _ in range(SETTLED):
        tree.keep()
    group, first = given["adam"].param_groups[0], given["model"][0]
    group["lr"] = 0.5
    first.eval()
    given["sam"].param_groups[0]["what"] = lambda: None
    with pytest.raises(UsageError, match="what"):
        tree.keep()
    del given["sam"].param_groups[0]["what"]
    tree.keep()
    group["lr"] = 9.0
    first.train()
    tree.roll_back()
    assert group["lr"] == 0.5
    assert not first.training


def test_a_plain_attribute_that_begins_to_change_late_is_found() -> None:
    given = values()
    tree = Tree(given, Steps())
    layer = given["model"][2]
    layer.temperature = 1.0
    for _ in range(SETTLED):
        tree.keep()
    layer.temperature = 0.5
    until = time.monotonic() + 30
    while not tree.parts["model"].kept.own and time.monotonic() < until:
        tree.keep()
    layer.temperature = 0.1
    tree.roll_back()
    assert layer.temperature == 0.5
