"""Makes a process slow for real: less of a processor, by its cgroup or by stopping it in turns.

A quota (cgroup v1, as root) is what containers do to each other. Elsewhere the process is
stopped and continued a hundred times a second, which looks the same from outside.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_CPU = Path("/sys/fs/cgroup/cpu")
_PERIOD_S = 0.02


@contextlib.contextmanager
def slowed(pid: int, share: float) -> Iterator[str]:
    """While this lasts, the process has only this share of one processor; yields how."""
    try:
        group = _make_group(share)
    except OSError:
        with _stopped_in_turns(pid, share):
            yield "stopped and continued"
        return
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield "quota"
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has just ended
                (_CPU / "cgroup.procs").write_text(left)
        _remove(group)


def _remove(group: Path) -> None:
    """Remove the group once the process has left it; one that is ending takes a moment."""
    deadline = time.monotonic() + 5.0
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _make_group(share: float) -> Path:
    group = _CPU / f"elastic-test-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(int(_PERIOD_S * 1e6)))
        (group / "cpu.cfs_quota_us").write_text(str(int(share * _PERIOD_S * 1e6)))
    except OSError:
        group.rmdir()
        raise
    return group


@contextlib.contextmanager
def _stopped_in_turns(pid: int, share: float) -> Iterator[None]:
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.wait(_PERIOD_S * share):
                os.kill(pid, signal.SIGSTOP)
                over.wait(_PERIOD_S * (1 - share))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
