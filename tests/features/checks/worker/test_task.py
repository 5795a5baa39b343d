"""The node check's task on real gloo groups."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic_driver.features.checks.messages import Place, TaskSettings
from elastic_driver.features.checks.worker.measure import NodeCheckTask
from tests.support.gloo import run_ranks

SMALL = TaskSettings(matrix=32, products=3, payload=4096, exchanges=3, model_steps=1)
LATE_S = 0.1


def places(*nodes: int, stack: str = "") -> list[Place]:
    """Ranks of these nodes; with a network stack that all share, or with one each."""
    return [Place(node=node, machine="", stack=stack or f"stack {node}") for node in nodes]


def no_lock(_machines: Iterable[str]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def task_of(settings: TaskSettings, rank: int, where: list[Place]) -> NodeCheckTask:
    return NodeCheckTask(settings, rank, where, lock=no_lock, shared=False)


def exchange_with_a_slow_third(rank: int, _size: int) -> float:
    """Seconds that this rank's fastest exchange took; rank 2 comes late to each of its own."""
    gather = dist.all_gather

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(LATE_S)
        return gather(*args, **kwargs)

    if rank == 2:
        dist.all_gather = late
    return task_of(SMALL, rank, places(0, 1, 2))._exchange()[0]


def test_in_a_group_of_three_the_slow_one_does_not_make_the_others_slow(tmp_path: Path) -> None:
    times = run_ranks(3, exchange_with_a_slow_third, tmp_path)
    assert times[2] >= SMALL.exchanges * LATE_S
    assert times[0] < times[2]
    assert times[1] < times[2]


def exchange_with_two_processes_a_node(rank: int, _size: int) -> float:
    return task_of(SMALL, rank, places(0, 0, 1, 1))._exchange()[0]


def test_all_processes_of_two_nodes_exchange_together(tmp_path: Path) -> None:
    times = run_ranks(4, exchange_with_two_processes_a_node, tmp_path)
    assert all(seconds > 0 for seconds in times)


def exchange_of_three(rank: int, _size: int, stacks: list[str]) -> tuple[float, bool]:
    where = [Place(node=n, machine="m", stack=stack) for n, stack in enumerate(stacks)]
    return NodeCheckTask(SMALL, rank, where, lock=no_lock, shared=True)._exchange()


@pytest.mark.parametrize(
    ("stacks", "linked"),
    [
        (["a", "a", "a"], [False, False, False]),
        (["a", "a", "b"], [True, True, True]),
        (["", "", ""], [True, True, True]),
    ],
)
def test_no_link_is_timed_within_one_network_stack(
    tmp_path: Path, stacks: list[str], linked: list[bool]
) -> None:
    found = run_ranks(3, exchange_of_three, tmp_path, stacks)
    assert [is_linked for _, is_linked in found] == linked
    assert all(seconds > 0 for seconds, _ in found)


def everything(rank: int, _size: int) -> tuple[float | int | None, ...]:
    settings = TaskSettings(
        matrix=32, products=3, payload=4096, exchanges=2, model=True, model_steps=1
    )
    result = task_of(settings, rank, places(*range(dist.get_world_size()))).measure()
    measured = (result.compute, result.network, result.step, result.bandwidth, result.latency)
    return (*measured, result.parameters)


@pytest.mark.parametrize("size", [1, 2])
def test_everything_that_is_asked_for_is_measured(tmp_path: Path, size: int) -> None:
    for measured in run_ranks(size, everything, tmp_path):
        compute, network, step, bandwidth, latency, parameters = measured
        assert compute > 0
        assert step > 0
        assert parameters == 532_992
        for between_nodes in (network, bandwidth, latency):
            assert bool(between_nodes) is (size > 1)


def late_at_computing(rank: int, _size: int, folder: Path) -> bool:
    """Whether the other one was computing still as the locks for the exchange were taken."""
    taken: list[bool] = []

    @contextlib.contextmanager
    def lock(machines: Iterable[str]) -> Iterator[None]:
        if len(tuple(machines)) > 1:
            taken.append((folder / "computed").exists())
        yield

    where = [Place(node=node, machine="m", stack="s") for node in range(2)]
    task = NodeCheckTask(SMALL, rank, where, lock=lock, shared=False)
    if rank == 1:
        time.sleep(LATE_S)
        (folder / "computed").touch()
    with task._all_locks():
        pass
    return all(taken)


def test_locks_for_the_exchange_are_taken_once_all_have_computed(tmp_path: Path) -> None:
    assert run_ranks(2, late_at_computing, tmp_path, tmp_path) == [True, True]


def broken_numbers(rank: int, _size: int) -> str:
    gather = dist.all_gather

    def corrupt(taken: list[Any], given: Any, **kwargs: Any) -> None:
        gather(taken, given, **kwargs)
        taken[0][-1] = 7.0

    dist.all_gather = corrupt
    with pytest.raises(ArithmeticError) as error:
        task_of(SMALL, rank, places(0, 1))._exchange()
    return str(error.value)


def test_numbers_that_change_on_the_way_are_a_failure(tmp_path: Path) -> None:
    said = run_ranks(2, broken_numbers, tmp_path)
    assert said == ["the exchange brought other numbers than were sent"] * 2
