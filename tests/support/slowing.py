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
from collections.abc import Iterator, Sequence
from pathlib import Path

_CPU = Path("/sys/fs/cgroup/cpu")
_PERIOD_S = 0.02


@contextlib.contextmanager
def slowed(pid: int, share: float, period: float = _PERIOD_S) -> Iterator[str]:
    """While this lasts, the process has only this share of one processor; yields how."""
    try:
        quota = Quota(pid, share, period)
    except OSError:
        with _stopped_in_turns(pid, share):
            yield "stopped and continued"
        return
    try:
        yield "quota"
    finally:
        quota.end()


@contextlib.contextmanager
def held(
    pids: Sequence[int], share: float, period: float = _PERIOD_S
) -> Iterator[dict[int, Quota]]:
    """Each process has this share of a processor; needs root and cgroup v1."""
    with contextlib.ExitStack() as stack:
        quotas = {}
        for pid in pids:
            quotas[pid] = Quota(pid, share, period)
            stack.callback(quotas[pid].end)
        yield quotas


class Quota:
    """A control group of one process; `end` sets it free.

    `share`: of one processor, in each `period` (seconds; 0.1 is what containers usually get).
    Raises OSError where none can be made.
    """

    def __init__(self, pid: int, share: float, period: float = _PERIOD_S) -> None:
        self._share, self._period = share, period
        self._group = _CPU / f"elastic-test-{uuid.uuid4().hex[:8]}"
        self._group.mkdir()
        try:
            (self._group / "cpu.cfs_period_us").write_text(str(int(period * 1e6)))
            self._set(share)
            (self._group / "cgroup.procs").write_text(str(pid))
        except OSError:
            self._group.rmdir()
            raise

    @contextlib.contextmanager
    def at(self, share: float) -> Iterator[None]:
        """While this lasts, the process has this share in place of its own."""
        self._set(share)
        try:
            yield
        finally:
            self._set(self._share)

    def end(self) -> None:
        """The process has as much as it likes, and the group is gone."""
        for left in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has just ended
                (_CPU / "cgroup.procs").write_text(left)
        deadline = time.monotonic() + 5.0
        while True:
            try:
                return self._group.rmdir()
            except OSError:  # a process that is ending takes a moment to leave it
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _set(self, share: float) -> None:
        quota = max(int(share * self._period * 1e6), 1000)  # the kernel takes no less
        (self._group / "cpu.cfs_quota_us").write_text(str(quota))


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
