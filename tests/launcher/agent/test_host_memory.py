"""The memory of this host, of containers and of processes."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from launcher.agent.host import (
    KillCount,
    MemoryJudge,
    MemoryLimit,
    host_memory,
    memory_of,
    usable_memory,
)


def test_the_memory_of_a_container_counts_up_to_its_limit(tmp_path: Path) -> None:
    inner = tmp_path / "cgroups" / "pod" / "box"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (inner.parent / "memory.current").write_text("700\n")
    (inner.parent / "memory.stat").write_text("anon 400\ninactive_file 100\n")
    own = tmp_path / "own"
    own.write_text("4:memory:/other\n0::/pod/box\n")
    assert MemoryLimit(tmp_path / "cgroups", own).usage() == (600, 1000)
    own.write_text("0::/\n")
    assert MemoryLimit(tmp_path / "cgroups", own).usage() is None
    assert MemoryLimit(tmp_path / "none", tmp_path / "neither").usage() is None


def test_the_memory_of_a_container_is_read_from_version_1_too(tmp_path: Path) -> None:
    box = tmp_path / "cgroups" / "memory" / "box"
    box.mkdir(parents=True)
    (box / "memory.limit_in_bytes").write_text("1000\n")
    (box / "memory.usage_in_bytes").write_text("700\n")
    (box / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100\n")
    (box.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    own = tmp_path / "own"
    own.write_text("5:cpu:/other\n4:memory:/box/inner\n0::/\n")
    assert MemoryLimit(tmp_path / "cgroups", own).usage() == (600, 1000)
    own.write_text("4:memory:/\n")
    assert MemoryLimit(tmp_path / "cgroups", own).usage() is None, "that number means no limit"


def test_a_host_without_a_limit_has_what_the_system_has(tmp_path: Path) -> None:
    used, total = host_memory(MemoryLimit(tmp_path, tmp_path / "none"))
    assert total == psutil.virtual_memory().total
    assert 0 < used < total
    assert 0 < usable_memory() <= total


def test_a_process_has_memory_and_a_peak_of_it() -> None:
    memory, peak = memory_of(os.getpid())
    assert memory == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)
    assert peak is not None
    assert peak >= memory * 0.95


def counted(folder: Path, kills: int) -> KillCount:
    """A count of kills that a control group of version 2 makes."""
    (folder / "box").mkdir(exist_ok=True)
    (folder / "box" / "memory.events").write_text(f"low 0\noom 5\noom_kill {kills}\n")
    (folder / "own").write_text("0::/box\n")
    return KillCount(folder, folder / "own")


def test_a_kill_explains_the_end_of_one_worker(tmp_path: Path) -> None:
    kills = counted(tmp_path, 3)
    before = kills.now()
    assert before == 3
    assert not kills.take(before), "earlier kills were of others"
    counted(tmp_path, 5)
    assert [kills.take(before) for _ in range(3)] == [True, True, False]
    assert not kills.take(kills.now())


def test_without_a_counter_of_its_group_the_systems_count_has_to_do(tmp_path: Path) -> None:
    found = [line for line in Path("/proc/vmstat").read_text().splitlines() if "oom_kill " in line]
    expected = int(found[0].split()[1]) if found else 0
    assert KillCount(tmp_path, tmp_path / "none").now() == expected


@pytest.mark.parametrize(
    ("code", "tail", "killed", "short"),
    [
        (-9, "", 1, True),
        (-9, "", 0, False),  # by somebody else
        (-15, "", 1, False),  # the kernel sends no SIGTERM
        (0, "", 1, False),
        (1, "MemoryError\n", 0, True),
        (1, "ValueError: x\n", 1, False),
        (1, "RuntimeError: DataLoader worker (pid 3) is killed by signal: Killed.\n", 1, True),
        (1, "RuntimeError: DataLoader worker (pid 3) is killed by signal: Killed.\n", 0, False),
    ],
)
def test_a_worker_that_ran_out_of_memory_is_told_from_others(
    tmp_path: Path, code: int, tail: str, killed: int, short: bool
) -> None:
    judge = MemoryJudge(counted(tmp_path, 0))
    before = judge.begin()
    counted(tmp_path, killed)
    found = judge.judge(before, code, tail, 1000)
    assert (found is not None) == short
    if found is not None:
        assert (found.peak, found.of_device) == (1000, False)
        assert found.idle is not None
        assert 0 < found.idle < psutil.virtual_memory().total


def test_the_memory_of_a_gpu_says_nothing_of_the_hosts(tmp_path: Path) -> None:
    judge = MemoryJudge(counted(tmp_path, 0))
    found = judge.judge(0, 1, "torch.OutOfMemoryError: CUDA out of memory.\n", 1000)
    assert found is not None
    assert (found.of_device, found.idle) == (True, None)
