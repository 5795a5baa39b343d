"""Numbers for contents: equal for equal contents, whatever memory they lie in."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_driver.worker.state_sync.contents import beginnings, contents
from elastic_driver.worker.world import wrapping

KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_contents_have_equal_numbers_and_others_do_not(kind: torch.dtype) -> None:
    one = torch.arange(24).reshape(4, 6).to(kind)
    other = torch.empty(6, 4, dtype=kind).t().copy_(one)
    assert contents([one]) == contents([other]) == contents([one.clone()])
    changed = one.clone()
    changed[0, 0] = 1
    assert contents([one]) != contents([changed])


@given(st.lists(st.floats(width=32), max_size=6), st.lists(st.floats(width=32), max_size=6))
def test_numbers_differ_where_contents_do(a: list[float], b: list[float]) -> None:
    one, other = torch.tensor(a), torch.tensor(b)
    same = one.numpy().tobytes() == other.numpy().tobytes()
    assert (contents([one]) == contents([other])) == same


def test_tensors_without_memory_are_no_trouble() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    odd = [torch.empty(0), torch.empty(3, device="meta").to("meta"), freed, torch.ones(1).expand(3)]
    cpu = [each for each in odd if each.device.type == "cpu"]
    assert contents(cpu)[0] == 0
    assert len(beginnings(cpu)) == 3


def test_a_view_that_is_conjugated_counts_as_what_it_shows() -> None:
    value = torch.tensor([1 + 2j])
    assert contents([value.conj()]) == contents([torch.tensor([1 - 2j])])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: nn.init.normal_(m[0].weight.data, 0.0, 0.02),
        lambda m: m[1].weight.data.uniform_(),
        lambda m: setattr(m[0].bias, "data", torch.ones(3)),
        lambda m: m[0].weight.requires_grad_(False).add_(1),
        lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
        lambda m: m.add_module("2", nn.Linear(3, 3)),
        lambda m: m[1].running_mean.fill_(3),
    ],
)
def test_a_model_that_a_script_has_initialised_anew_is_broadcast(change: object) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    wrapping.mark_in_sync(model)
    assert not wrapping._changed_anywhere(model, 1)
    assert wrapping._changed_anywhere(copy.deepcopy(model), 1), "another object"
    change(model)  # type: ignore[operator]
    assert wrapping._changed_anywhere(model, 1)
