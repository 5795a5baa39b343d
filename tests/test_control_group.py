"""Groups of processes, of either version of the kernel's interface, freeze and are removed."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.control_group import ControlGroup
from tests.support.job import eventually


def roots() -> list[Path]:
    """Where control groups are mounted: the unified hierarchy may lie beside the older ones."""
    root = Path("/sys/fs/cgroup")
    return [path for path in (root, root / "unified") if path.is_dir()]


@pytest.mark.parametrize("root", roots(), ids=lambda root: root.name)
def test_a_frozen_process_goes_on_when_it_thaws_and_outlives_its_group(root: Path) -> None:
    try:
        group = ControlGroup(f"elastic-test-{uuid.uuid4().hex[:8]}", root)
    except OSError:
        pytest.skip("no control group can be made here")
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        group.add(child.pid)
        group.freeze()
        eventually(frozen(group), within=5, what="it is frozen")
        group.thaw()
        group.remove()
        assert child.communicate("still here", timeout=10)[0] == "still here"
    finally:
        child.kill()
        child.wait(10)
    assert not any(file.exists() for file in group.process_lists)


def frozen(group: ControlGroup) -> Callable[[], bool]:
    """Return the question whether the kernel says that the group is frozen."""
    folders = [file.parent for file in group.process_lists]

    def look() -> bool:
        states = [folder / "freezer.state" for folder in folders]
        events = [folder / "cgroup.events" for folder in folders]
        return any(f.exists() and "FROZEN" in f.read_text() for f in states) or any(
            f.exists() and "frozen 1" in f.read_text() for f in events
        )

    return look


def memory_roots() -> list[Path]:
    """Those of them that count memory: a hierarchy beside the older ones may not."""
    counts = (root for root in roots() if (root / "memory").is_dir())
    controllers = [root for root in roots() if (root / "cgroup.controllers").is_file()]
    unified = [r for r in controllers if "memory" in (r / "cgroup.controllers").read_text().split()]
    return [*counts, *unified]


@pytest.mark.parametrize("root", memory_roots(), ids=lambda root: root.name)
def test_a_process_that_outgrows_its_group_is_killed(root: Path) -> None:
    try:
        group = ControlGroup(f"elastic-test-{uuid.uuid4().hex[:8]}", root)
    except OSError:
        pytest.skip("no control group can be made here")
    try:
        group.limit_memory(50 * 2**20)
        script = "input(); b'x' * (200 * 2**20); print('survived')"
        argv = [sys.executable, "-c", script]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            group.add(child.pid)
            assert child.communicate(b"go\n", timeout=30)[0] == b""
        assert child.returncode == -9
    finally:
        group.remove()
