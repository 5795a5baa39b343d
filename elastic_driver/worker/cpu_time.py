"""CPU time: how long a thread ran, and how long it was ready to run and did not.

The kernel counts both for each thread (`schedstat`, see `proc(5)`). The second is time taken by
other programs or by a CPU quota; time in which a thread waits for data or for peers is in neither.
`CpuSlowdown` is the slowdown of training. The contention timers are for node checks.

On a machine of its own, a host whose processor is taken by other programs is slow, whoever they
are. Where several hosts share a machine, any other program there takes time from all of them, a
little more from the one that happens to be measured. There a node check subtracts the time in which
a thread was ready while another program ran. It does not subtract time lost to a CPU quota: the
kernel stops a host's processes though a processor may be free, and that is the host's own slowness.
Times are seconds.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

LEAST_RUN_S = 0.02  # a shorter CPU time says nothing
_CGROUPS = Path("/sys/fs/cgroup")
_MAIN_THREAD = Path("/proc/self/schedstat")
_THREAD = Path("/proc/thread-self/schedstat")
_THREADS = Path("/proc/self/task")


class CpuTime(NamedTuple):
    """The kernel's account of a thread, or of several."""

    ran: float
    waited: float  # ready to run, while something else ran


# Begins a measurement; the returned function returns the CPU time since then.
ContentionTimer = Callable[[], Callable[[], CpuTime]]


def read_cpu_time(*schedstats: Path) -> CpuTime | None:
    """Return the sum of the accounts in these `schedstat` files; None where the kernel keeps none.

    A file holds nanoseconds run, nanoseconds ready, and a number of time slices (`proc(5)`).
    """
    ran = waited = found = 0
    for path in schedstats:
        with contextlib.suppress(OSError, ValueError):  # the thread has ended
            own_ran, own_waited, _slices = map(int, path.read_text("ascii").split())
            ran, waited, found = ran + own_ran, waited + own_waited, found + 1
    return CpuTime(ran / 1e9, waited / 1e9) if found else None


class CpuSlowdown:
    """The slowdown of this process's main thread, which trains, over the newest interval.

    The heartbeat thread reads it, so it costs training nothing.
    """

    def __init__(self) -> None:
        self._before: CpuTime | None = None
        self._factor = 1.0

    def factor(self) -> float:
        """Return the seconds it takes to run for one second; 1.0 where the kernel keeps none."""
        now = read_cpu_time(_MAIN_THREAD)
        if now is None:
            return 1.0
        if self._before is None:
            self._before = now
        ran, waited = now.ran - self._before.ran, now.waited - self._before.waited
        if ran >= LEAST_RUN_S:
            self._before, self._factor = now, 1.0 + max(waited, 0.0) / ran
        return self._factor


def not_timed() -> Callable[[], CpuTime]:
    """Begin a measurement from which nothing is subtracted."""
    return lambda: CpuTime(0.0, 0.0)


def of_thread() -> ContentionTimer:
    """Return the timer for work of the calling thread alone."""
    return _timer(lambda: (_THREAD,))


def of_process() -> ContentionTimer:
    """Return the timer for work that all threads of this process share."""
    return _timer(lambda: _THREADS.glob("*/schedstat"))


def _timer(schedstats: Callable[[], Iterable[Path]]) -> ContentionTimer:
    """Return a timer whose `waited` is 0 where a quota stopped us, or the kernel does not tell."""
    quotas = tuple(_quota_files())

    def begin() -> Callable[[], CpuTime]:
        before, stops = read_cpu_time(*schedstats()), _quota_stops(quotas)

        def since() -> CpuTime:
            now = read_cpu_time(*schedstats())
            if before is None or now is None:
                return CpuTime(0.0, 0.0)
            stopped = not quotas or _quota_stops(quotas) != stops
            waited = 0.0 if stopped else max(0.0, now.waited - before.waited)
            return CpuTime(max(0.0, now.ran - before.ran), waited)

        return since

    return begin


def _quota_stops(stats: tuple[Path, ...]) -> int:
    """Return how often quotas have stopped our control groups so far."""
    stops = 0
    for path in stats:
        with contextlib.suppress(OSError):
            lines = path.read_text("ascii").splitlines()
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
