"""After a failed step, settings and buffers are again those of the last commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic_driver.worker.state_sync.parts import ModulePart, OptimizerPart

Group = dict[str, Any]


def adam() -> torch.optim.Adam:
    return torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=0.5, betas=(0.9, 0.99))


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.update(lr=0.4),
        lambda group: group.update(betas=(0.9, 0.98)),
        lambda group: group.update(initial_lr=0.5),
        lambda group: group.pop("weight_decay"),
        lambda group: group.update(lr=torch.tensor(0.5)),
        lambda group: group.update(schedule=[1, 2]),
    ],
    ids=["number", "pair", "one more", "one less", "tensor", "list"],
)
def test_settings_that_were_touched_are_put_back(change: Callable[[Group], object]) -> None:
    optimizer = adam()
    (group,) = optimizer.param_groups
    part = OptimizerPart("optimizer", optimizer)
    part.keep()
    change(group)
    part.keep()
    committed = {name: str(value) for name, value in group.items()}
    for wrong in ("lr", "betas", "schedule"):
        group[wrong] = None
    part.roll_back()
    schedule = {} if "schedule" in committed else {"schedule": "None"}
    assert {name: str(value) for name, value in group.items()} == {**committed, **schedule}


def test_what_changes_in_place_is_copied_at_every_commit() -> None:
    optimizer = adam()
    (group,) = optimizer.param_groups
    group["lr"], group["schedule"] = torch.tensor(0.5), [1]
    part = OptimizerPart("optimizer", optimizer)
    part.keep()
    group["lr"].fill_(0.25)
    group["schedule"].append(2)
    part.keep()
    group["lr"].fill_(7.0)
    group["schedule"].clear()
    part.roll_back()
    assert (group["lr"].item(), group["schedule"]) == (0.25, [1, 2])


def test_a_group_that_came_since_is_kept_from_the_next_commit_on() -> None:
    optimizer = adam()
    part = OptimizerPart("optimizer", optimizer)
    part.keep()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1})
    part.keep()
    optimizer.param_groups[1]["lr"] = 3.0
    part.roll_back()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]


def norms() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(3))


def test_buffers_of_all_kinds_are_those_of_the_last_commit_again() -> None:
    module = norms()
    part = ModulePart("model", module)
    for step in range(3):
        module[0].running_mean.fill_(step)
        module[1].num_batches_tracked.fill_(10 * step)
        part.keep()
    committed = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for buffer in module.buffers():
        buffer.fill_(99)
    part.roll_back()
    assert all(torch.equal(b, committed[name]) for name, b in module.named_buffers())
    assert module[1].num_batches_tracked.item() == 20


@pytest.mark.parametrize("how", ["exchanged", "resized", "removed"])
def test_buffers_that_are_others_since_the_last_commit_are_kept_anew(how: str) -> None:
    module = norms()
    part = ModulePart("model", module)
    part.keep()
    if how == "exchanged":
        module[0].running_mean = torch.tensor([3.0, 4.0])
    elif how == "resized":
        module[0].running_mean.resize_(1).fill_(3.0)
    else:
        module[0].running_mean = None
    part.keep()
    committed = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for buffer in module.buffers():
        buffer.fill_(99)
    part.roll_back()
    assert len(committed) == (5 if how == "removed" else 6)
    assert all(torch.equal(b, committed[name]) for name, b in module.named_buffers())
