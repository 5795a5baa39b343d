"""Which processors a slot gets, on machines that are made of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.agent.environment import Core, choose, gpu_nodes, in_words, usable_cores

# Two NUMA nodes of four cores with two hardware threads each, numbered as Linux does on Intel.
TWO_NODES = [Core(n, n, (4 * n + c, 8 + 4 * n + c)) for n in (0, 1) for c in range(4)]


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The files of /sys on such a machine, with two GPUs on node 1 and one on node 0."""
    for node in (0, 1):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        low = 4 * node
        (folder / "cpulist").write_text(f"{low}-{low + 3},{low + 8}-{low + 11}\n")
    for cpu in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 8 // 4}\n")
        (folder / "core_id").write_text(f"{cpu % 4}\n")
    for address, node in (("0000:17:00.0", 1), ("0000:65:00.0", 0), ("0000:ca:00.0", 1)):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (tmp_path / "driver/nvidia/gpus" / address).mkdir(parents=True)
    return tmp_path


def test_cores_are_read_with_their_threads_and_nodes(machine: Path) -> None:
    assert usable_cores(range(16), machine) == TWO_NODES


def test_only_processors_that_may_be_used_count(machine: Path) -> None:
    assert usable_cores({1, 9, 6}, machine) == [Core(0, 0, (1, 9)), Core(1, 1, (6,))]
    allowed = set().union(*(core.cpus for core in usable_cores()))
    assert allowed == os.sched_getaffinity(0)


def test_a_machine_without_topology_has_single_cores(tmp_path: Path) -> None:
    assert usable_cores({2, 5}, tmp_path) == [Core(0, 0, (2,)), Core(0, 0, (5,))]


def test_numa_gives_a_whole_node_and_shares_slots_out_over_the_nodes() -> None:
    found = [in_words(choose("numa", slot, 4, TWO_NODES)) for slot in range(4)]
    assert found == ["0-3,8-11"] * 2 + ["4-7,12-15"] * 2


@pytest.mark.parametrize("slots", range(1, 9))
def test_core_gives_whole_cores_that_nobody_else_has(slots: int) -> None:
    found = [choose("core", slot, slots, TWO_NODES) for slot in range(slots)]
    assert len(frozenset().union(*found)) == sum(map(len, found)), "no processor twice"
    for cpus in found:
        assert {cpu % 8 for cpu in cpus} == {cpu % 8 for cpu in cpus if cpu < 8}, "whole cores"
        assert len({cpu % 8 // 4 for cpu in cpus}) == 1, "of one node"


def test_more_slots_than_cores_share_some() -> None:
    found = [choose("core", slot, 20, TWO_NODES) for slot in range(20)]
    assert all(len(cpus) == 2 for cpus in found)
    assert frozenset().union(*found) == frozenset(range(16))
    assert choose("core", 5, 2, TWO_NODES)  # a slot beyond those that the driver knows


def test_a_slot_goes_where_its_gpu_is(machine: Path) -> None:
    nodes = gpu_nodes({}, machine, machine)
    assert nodes == [1, 0, 1]
    assert in_words(choose("numa", 0, 3, TWO_NODES, nodes)) == "4-7,12-15"
    assert in_words(choose("core", 0, 3, TWO_NODES, nodes)) == "4-5,12-13"
    assert in_words(choose("core", 2, 3, TWO_NODES, nodes)) == "6-7,14-15"
    assert in_words(choose("core", 1, 3, TWO_NODES, nodes)) == "0-3,8-11"


def test_visible_devices_and_unknown_gpus(machine: Path, tmp_path: Path) -> None:
    seen = {"CUDA_VISIBLE_DEVICES": "1, 2,GPU-8a,9"}
    assert gpu_nodes(seen, machine, machine) == [0, 1, None, None]
    assert gpu_nodes({}, tmp_path / "none", tmp_path / "none") == []
    only_node_0 = [core for core in TWO_NODES if core.node == 0]
    assert choose("numa", 0, 2, only_node_0, [1, 0]) == frozenset({0, 1, 2, 3, 8, 9, 10, 11})


def test_processors_are_written_as_the_kernel_does() -> None:
    assert in_words({0, 1, 2, 8, 10, 11}) == "0-2,8,10-11"
    assert in_words(()) == ""
