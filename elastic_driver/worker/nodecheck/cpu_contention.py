"""What a measurement lost to other programs, where that says nothing about its own host.

On a machine of its own, a host whose processor is taken by other programs is slow, whoever they
are. Where several hosts share a machine, whatever else runs there takes from all of them, a
little more from the one that happens to be measured. There the time in which a thread was ready and
another program ran is excused, as the kernel counts it for each thread. A quota is no excuse:
the kernel stops a host's processes though a processor may be free, which is that host's own
slowness. Times are seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Account(NamedTuple):
    """Where the time of a measurement went."""

    lost: float  # ready to run, while other programs ran
    used: float  # running


Excuse = Callable[[], Callable[[], Account]]  # begin; the account since then

_CGROUPS = Path("/sys/fs/cgroup")
_THREAD = Path("/proc/thread-self/schedstat")
_PROCESS = Path("/proc/self/task")
_NOTHING = Account(0.0, 0.0)


def none() -> Callable[[], Account]:
    """Every second counts."""
    return lambda: _NOTHING


def of_thread() -> Excuse:
    """For work of the calling thread alone, on a machine that hosts share."""
    return _excuse(lambda: _read(_THREAD))


def of_process() -> Excuse:
    """For work that all threads of this process have a part in, on a machine that hosts share."""
    return _excuse(_all_threads)


def _excuse(read: Callable[[], Account]) -> Excuse:
    """Waiting for other programs is excused, unless a quota stopped us; nothing is where
    the kernel does not say which it was."""
    stats = tuple(_quota_files())

    def begin() -> Callable[[], Account]:
        before, stopped = read(), _stopped(stats)

        def account() -> Account:
            now = read()
            lost = now.lost - before.lost if stats and _stopped(stats) == stopped else 0.0
            return Account(max(0.0, lost), max(0.0, now.used - before.used))

        return account

    return begin


def _read(schedstat: Path) -> Account:
    """Nanoseconds run, and ready but not running, as `proc(5)` has them for a thread."""
    try:
        used, lost, _times = schedstat.read_text("ascii").split()
        return Account(int(lost) / 1e9, int(used) / 1e9)
    except (OSError, ValueError):
        return _NOTHING


def _all_threads() -> Account:
    try:
        threads = os.listdir(_PROCESS)
    except OSError:
        return _NOTHING
    accounts = [_read(_PROCESS / thread / "schedstat") for thread in threads]
    return Account(sum(a.lost for a in accounts), sum(a.used for a in accounts))


def _stopped(stats: tuple[Path, ...]) -> int:
    """How often quotas have stopped our control groups, so far."""
    times = 0
    for path in stats:
        try:
            lines = path.read_text("ascii").splitlines()
        except OSError:
            continue
        times += sum(int(line.split()[1]) for line in lines if line.startswith("nr_throttled "))
    return times


def _quota_files() -> Iterator[Path]:
    """The accounts of the control groups we are in, from our own up to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        _number, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        if controllers and not root.is_dir():
            root = _CGROUPS / "cpu"
        parts = Path(group.lstrip("/"))
        for folder in (parts, *parts.parents):
            path = root / folder / "cpu.stat"
            if path.is_file():
                yield path
