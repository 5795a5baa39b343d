"""What a measurement lost to other programs, where that says nothing about its own host.

On a machine of its own, a host whose processor is taken by other programs is slow, whoever they
are. Where several hosts share a machine, whatever else runs there takes from all of them, a
little more from the one that happens to be measured. There the time in which a thread was ready and
another program ran is excused, as the kernel counts it for each thread. A quota is no excuse:
the kernel stops a host's processes though a processor may be free, which is that host's own
slowness. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

Excuse = Callable[[], Callable[[], float]]  # begin; what was lost since then

_CGROUPS = Path("/sys/fs/cgroup")
_THREAD = Path("/proc/thread-self/schedstat")


def none() -> Callable[[], float]:
    """Every second counts."""
    return lambda: 0.0


def shared_machine() -> Excuse:
    """Waiting for other programs is excused, unless a quota stopped us; all of it counts where
    the kernel does not say which it was."""
    stats = tuple(_quota_files())

    def begin() -> Callable[[], float]:
        waited, stopped = _waited(), _stopped(stats)

        def lost() -> float:
            if not stats or _stopped(stats) != stopped:
                return 0.0
            return _waited() - waited

        return lost

    return begin


def _waited() -> float:
    """Seconds for which the calling thread was ready to run and did not."""
    try:
        return int(_THREAD.read_text("ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


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
