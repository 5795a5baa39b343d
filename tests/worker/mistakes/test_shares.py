"""A `DistributedSampler` that goes on in another world than its own is told; others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from elastic_driver.words.world import SlotInfo
from elastic_driver.worker import current
from elastic_driver.worker.mistakes.script_objects import forget_told
from elastic_driver.worker.mistakes.watch import watch_samplers

DATA = list(range(12))
Told = Callable[[], str]


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Iterator[Told]:
    forget_told()
    watch_samplers()
    yield lambda: "".join(x for x in capfd.readouterr().err.splitlines() if "old-shares" in x)
    current.forget()


def enter(rank: int, size: int, round_id: int) -> None:
    current.enter(SlotInfo("here", rank, rank, rank, 0, size, size, 1, 0, 1), round_id)


def sampler(rank: int, size: int) -> DistributedSampler[int]:
    return DistributedSampler(DATA, num_replicas=size, rank=rank, shuffle=False)  # type: ignore[arg-type]


def test_rank_0_tells_of_a_sampler_of_a_smaller_world(said: Told) -> None:
    enter(0, 1, 1)
    loader = DataLoader(DATA, sampler=sampler(0, 1))  # type: ignore[arg-type]
    assert len(list(loader)) == 12
    assert said() == ""
    enter(0, 2, 2)
    assert len(list(loader)) == 12  # it should be 6
    line = said()
    assert "was made for rank 0 of 1 is iterated by rank 0 of 2" in line
    assert "ElasticSampler" in line
    list(loader)
    assert said() == ""


def test_another_rank_says_nothing_of_the_size_but_of_its_own_share(said: Told) -> None:
    enter(2, 3, 1)
    old = sampler(2, 3)
    list(old)
    enter(1, 2, 2)
    list(old)
    assert said() == ""
    enter(1, 3, 3)
    list(old)
    assert "was made for rank 2 of 3 is iterated by rank 1 of 3" in said()


def test_a_sampler_of_a_group_of_ranks_is_left_alone(said: Told) -> None:
    enter(0, 4, 1)
    of_group = sampler(0, 2)
    list(of_group)
    enter(0, 8, 2)
    list(of_group)
    assert said() == ""


def test_a_sampler_that_the_script_corrects_is_right(said: Told) -> None:
    enter(0, 1, 1)
    own = sampler(0, 1)
    list(own)
    enter(0, 2, 2)
    own.num_replicas, own.num_samples, own.total_size = 2, 6, 12
    assert list(own) == DATA[::2]
    assert said() == ""
