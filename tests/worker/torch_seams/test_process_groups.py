"""What `torch_seams.process_groups` expects of torch."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from elastic_driver.worker import torch_seams

CPU = torch.device("cpu")


@pytest.fixture
def world() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_the_groups_are_known_with_their_backends() -> None:
    group = torch_seams.default_group()
    assert list(torch_seams.groups) == [group]
    assert "gloo" in torch_seams.backend_names(group)
    assert CPU in torch_seams.device_types(group)
    assert isinstance(torch_seams.backend_for(group, CPU), ProcessGroupGloo)
    part = dist.new_group([0])
    assert list(torch_seams.groups) == [group, part]


def test_without_a_group_there_is_no_default() -> None:
    with pytest.raises(ValueError, match="not been initialized"):
        torch_seams.default_group()


@pytest.mark.usefixtures("world")
def test_collectives_are_counted() -> None:
    count = torch_seams.collective_counter(torch_seams.default_group(), CPU)
    before = count()
    dist.all_reduce(torch.ones(1))
    assert count() == before + 1


@pytest.mark.usefixtures("world")
def test_a_collective_is_not_point_to_point() -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    assert not torch_seams.is_point_to_point(work)
    work.wait()


def test_dropped_groups_are_gone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch_seams.forget_groups()
    assert not dist.is_initialized()
    assert not torch_seams.groups


def test_a_gloo_group_of_our_own_works_at_once() -> None:
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    limit = timedelta(seconds=30)
    made = torch_seams.make_gloo(dist.HashStore(), 0, 1, device, connect=limit, collective=limit)
    tensor = torch.full((2,), 3.0)
    made.allreduce([tensor]).wait()
    assert tensor.tolist() == [3.0, 3.0]
    torch_seams.set_timeout(made, timedelta(seconds=5))
    assert made.options._timeout == timedelta(seconds=5)
