"""Makes a process slow for real: less of a processor, by its cgroup or by stopping it in turns.

A quota (as root) is what containers do to each other. Elsewhere the process is
stopped and continued a hundred times a second, which looks the same from outside.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence

from tests.support.control_group import ControlGroup

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
    """Each process has this share of a processor; needs root."""
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
        self._group = ControlGroup(f"elastic-test-{uuid.uuid4().hex[:8]}")
        try:
            self._group.limit(share, period)
            self._group.add(pid)
        except OSError:
            self._group.remove()
            raise

    @contextlib.contextmanager
    def at(self, share: float) -> Iterator[None]:
        """While this lasts, the process has this share in place of its own."""
        self._group.limit(share, self._period)
        try:
            yield
        finally:
            self._group.limit(self._share, self._period)

    def end(self) -> None:
        """The process has as much as it likes, and the group is gone."""
        self._group.remove()


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
