"""The memory of this host, of containers and of processes."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from launcher.agent.memory import MemoryLimit, host_memory, memory_of, usable_memory


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
