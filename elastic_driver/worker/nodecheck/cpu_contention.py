"""CPU time that a measurement lost to other programs, where its own host is not to blame.

On a machine of its own, a host whose processor is taken by other programs is slow, whoever they
are. Where several hosts share a machine, any other program there takes time from all of them, a
little more from the one that happens to be measured. There the time in which a thread was ready
while another program ran is subtracted; the kernel counts it for each thread. Time lost to a CPU
quota is not: the kernel stops a host's processes though a processor may be free, and that is the
host's own slowness. Times are seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from elastic_driver.worker.timing.cpu_slowdown import CpuTime, read_cpu_time

# Begins a measurement; the returned function returns the CPU time since then.
ContentionTimer = Callable[[], Callable[[], CpuTime]]

_CGROUPS = Path("/sys/fs/cgroup")
_THREAD = Path("/proc/thread-self/schedstat")
_THREADS = Path("/proc/self/task")
_NONE = CpuTime(0.0, 0.0)


def not_timed() -> Callable[[], CpuTime]:
    """Begin a measurement from which nothing is subtracted."""
    return lambda: _NONE


def of_thread() -> ContentionTimer:
    """Return the timer for work of the calling thread alone."""
    return _timer(lambda: read_cpu_time(_THREAD) or _NONE)


def of_process() -> ContentionTimer:
    """Return the timer for work that all threads of this process share."""
    return _timer(_read_all_threads)


def _timer(read: Callable[[], CpuTime]) -> ContentionTimer:
    """Return a timer whose `waited` is 0 where a quota stopped us, or nobody knows."""
    stats = tuple(_quota_files())

    def begin() -> Callable[[], CpuTime]:
        before, stops = read(), _quota_stops(stats)

        def since() -> CpuTime:
            now = read()
            waited = now.waited - before.waited if stats and _quota_stops(stats) == stops else 0.0
            return CpuTime(max(0.0, now.ran - before.ran), max(0.0, waited))

        return since

    return begin


def _read_all_threads() -> CpuTime:
    try:
        threads = os.listdir(_THREADS)
    except OSError:
        return _NONE
    times = [read_cpu_time(_THREADS / thread / "schedstat") or _NONE for thread in threads]
    return CpuTime(sum(time.ran for time in times), sum(time.waited for time in times))


def _quota_stops(stats: tuple[Path, ...]) -> int:
    """Return how often quotas have stopped our control groups so far."""
    stops = 0
    for path in stats:
        try:
            lines = path.read_text("ascii").splitlines()
        except OSError:
            continue
        stops += sum(int(line.split()[1]) for line in lines if line.startswith("nr_throttled "))
    return stops


def _quota_files() -> Iterator[Path]:
    """Yield the `cpu.stat` files of our control groups, from our own up to the root."""
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
        own = Path(group.lstrip("/"))
        stats = (root / folder / "cpu.stat" for folder in (own, *own.parents))
        yield from filter(Path.is_file, stats)
