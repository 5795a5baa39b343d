"""What `torch_seams.tensors` and `torch_seams.modules` expect of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic_driver.worker import torch_seams as modules
from elastic_driver.worker import torch_seams as tensors


def test_each_change_in_place_raises_the_version() -> None:
    tensor = torch.zeros(3)
    before = tensors.version_of(tensor)
    tensor.add_(1)
    assert tensors.version_of(tensor) == before + 1
    tensor.data = torch.ones(3)  # not a change in place
    assert tensors.version_of(tensor) >= before + 1


def test_a_tensor_of_inference_mode_has_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
    with pytest.raises(RuntimeError):
        tensors.version_of(tensor)


def test_lists_are_changed_in_one_call() -> None:
    found = [torch.ones(2), torch.ones(3)]
    others = [torch.full((2,), 3.0), torch.full((3,), 4.0)]
    tensors.add_all(found, others)
    tensors.multiply_all(found, 2.0)
    tensors.divide_all(found, 4.0)
    assert [each.tolist() for each in found] == [[2.0] * 2, [2.5] * 3]
    tensors.copy_all(found, others)
    assert [each.tolist() for each in found] == [[3.0] * 2, [4.0] * 3]


def test_a_vector_has_the_values_of_tensors_and_gives_them_back() -> None:
    parts = [torch.arange(6.0).reshape(2, 3), torch.arange(2.0)]
    flat = tensors.flatten(parts)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    views = tensors.unflatten(flat, parts)
    assert all(torch.equal(view, part) for view, part in zip(views, parts, strict=True))
    assert tensors.viewed_by(views[0]) is flat
    assert tensors.viewed_by(flat) is None


def test_buckets_are_those_of_ddp() -> None:
    parts = [torch.zeros(4) for _ in range(5)]  # of 16 bytes
    found = tensors.buckets(parts, 32)
    assert sorted(index for bucket in found for index in bucket) == list(range(5))
    assert max(map(len, found)) == 2


def test_a_sparse_tensor_that_is_not_coalesced_shows_its_entries_as_they_are() -> None:
    at, values = torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0])
    sparse = torch.sparse_coo_tensor(at, values, (4,), check_invariants=True)
    assert tensors.coordinates(sparse).tolist() == [[1, 1]]
    assert tensors.entries(sparse).tolist() == [2.0, 3.0]


def test_a_module_holds_parameters_buffers_and_modules_by_name() -> None:
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert list(modules.parameters_of(norm)) == ["weight", "bias"]
    assert set(modules.buffers_of(norm)) >= {"running_mean", "running_var", "scratch"}
    assert modules.unsaved_buffers_of(norm) == {"scratch"}
    inner = nn.Sequential(norm)
    assert list(modules.children_of(inner).values()) == [norm]
    assert isinstance(norm, modules.BatchNorm)
    assert isinstance(nn.InstanceNorm1d(2), modules.WithStatistics)
    assert not isinstance(nn.LayerNorm(2), modules.WithStatistics)
