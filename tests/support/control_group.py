"""A control group of processes, with a share of one processor, memory and a freezer; needs root.

Both versions of the kernel's interface are spoken: one folder in the unified hierarchy (v2), or
one in each controller's own (v1).
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_GONE_S = 5.0  # for processes that are ending to leave it


class ControlGroup:
    """A new, empty control group; raises OSError where none can be made."""

    def __init__(self, name: str, root: Path = _ROOT) -> None:
        self._unified = (root / "cgroup.controllers").exists()
        if self._unified:
            with contextlib.suppress(OSError):  # a controller that is elsewhere; the others do
                (root / "cgroup.subtree_control").write_text("+cpu +memory")
            self._cpu = self._freezer = self._memory = root / name
        else:
            self._cpu, self._freezer = root / "cpu" / name, root / "freezer" / name
            self._memory = root / "memory" / name
        self._folders = sorted({self._cpu, self._freezer, self._memory})
        made: list[Path] = []
        try:
            for folder in self._folders:
                folder.mkdir()
                made.append(folder)
        except OSError:
            for folder in made:
                folder.rmdir()
            raise

    @property
    def process_lists(self) -> list[Path]:
        """Return the files to write a pid to; a process that writes 0 puts itself there."""
        return [folder / "cgroup.procs" for folder in self._folders]

    def add(self, pid: int) -> None:
        """Put a process into the group."""
        for file in self.process_lists:
            file.write_text(str(pid))

    def limit(self, share: float, period: float) -> None:
        """Let all of its processes together have `share` of one processor in `period` seconds."""
        period_us = int(period * 1e6)
        quota_us = max(int(share * period_us), 1000)  # the kernel takes no less
        if self._unified:
            (self._cpu / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (self._cpu / "cpu.cfs_period_us").write_text(str(period_us))
            (self._cpu / "cpu.cfs_quota_us").write_text(str(quota_us))

    def unlimit(self) -> None:
        """Undo `limit`."""
        if self._unified:
            (self._cpu / "cpu.max").write_text("max")
        else:
            (self._cpu / "cpu.cfs_quota_us").write_text("-1")

    def limit_memory(self, size: int) -> None:
        """Let all of its processes together have `size` bytes of memory, and no swap space."""
        names = ("memory.max", "memory.swap.max") if self._unified else ("memory.limit_in_bytes",)
        (self._memory / names[0]).write_text(str(size))
        for name in names[1:]:
            with contextlib.suppress(OSError):  # a kernel that counts no swap space
                (self._memory / name).write_text("0")

    def freeze(self) -> None:
        """Stop all of its processes, which cannot tell."""
        self._freeze("1", "FROZEN")

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._freeze("0", "THAWED")

    def remove(self) -> None:
        """Remove the group; processes that are left in it stay as they are, outside of it."""
        for folder in self._folders:
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it has just ended
                    (folder.parent / "cgroup.procs").write_text(pid)
            deadline = time.monotonic() + _GONE_S
            while True:
                try:
                    folder.rmdir()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)

    def _freeze(self, unified: str, state: str) -> None:
        if self._unified:
            (self._freezer / "cgroup.freeze").write_text(unified)
        else:
            (self._freezer / "freezer.state").write_text(state)
