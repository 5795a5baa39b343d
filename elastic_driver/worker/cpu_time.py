"""CPU time: how long a thread ran, and how long it was ready to run and did not.

The kernel counts both for each thread (`schedstat`, see `proc(5)`). The second is time taken by
other programs or by a CPU quota; time in which a thread waits for data or for peers is in neither.
`CpuSlowdown` is the slowdown of training. The accounts are for node checks.

On a machine of its own, a host is slow if any other program takes its processor. Where several
hosts share a machine, any other program there takes time from all of them, and a little more from
the host that is being measured. There a node check subtracts the time in which a thread was ready
while another program ran. It does not subtract time lost to a CPU quota: the kernel stops a host's
processes though a processor may be free, and that is the host's own slowness. Times are seconds.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

LEAST_RUN_S = 0.02  # a shorter CPU time says nothing
_CGROUPS = Path("/sys/fs/cgroup")
_MAIN_THREAD = Path("/proc/self/schedstat")
_THREAD = Path("/proc/thread-self/schedstat")
_THREADS = Path("/proc/self/task")


class CpuTime(NamedTuple):
    """The kernel's account of a thread, or of several."""

    ran: float = 0.0
    waited: float = 0.0  # ready to run, while something else ran
    stops: int = 0  # by a CPU quota

    def since(self, before: "CpuTime") -> "CpuTime":
        """Return the account since an earlier one; `waited` is 0 where a quota has stopped us."""
        waited = self.waited - before.waited if self.stops == before.stops else 0.0
        return CpuTime(max(0.0, self.ran - before.ran), max(0.0, waited))


CpuAccount = Callable[[], CpuTime]  # returns the account so far


def read_cpu_time(*schedstats: Path) -> CpuTime:
    """Return the sum of the accounts in these `schedstat` files; 0 where the kernel keeps none.

    A file holds nanoseconds run, nanoseconds ready, and a number of time slices (`proc(5)`).
    """
    ran = waited = 0
    for path in schedstats:
        with contextlib.suppress(OSError, ValueError):  # the thread has ended
            own_ran, own_waited, _slices = map(int, path.read_text("ascii").split())
            ran, waited = ran + own_ran, waited + own_waited
    return CpuTime(ran / 1e9, waited / 1e9)


class CpuSlowdown:
    """The slowdown of this process's main thread, which trains, over the newest interval.

    The heartbeat thread reads it, so it costs training nothing.
    """

    def __init__(self) -> None:
        self._before: CpuTime | None = None
        self._factor = 1.0

    def factor(self) -> float:
        """Return the seconds that pass for each second of CPU time; 1.0 if they are not known."""
        now = read_cpu_time(_MAIN_THREAD)
        passed = now.since(self._before or now)
        if self._before is None or passed.ran >= LEAST_RUN_S:
            self._before = now
        if passed.ran >= LEAST_RUN_S:
            self._factor = 1.0 + passed.waited / passed.ran
        return self._factor


def of_thread() -> CpuAccount:
    """Return the account of the thread that calls it."""
    return partial(_account, lambda: (_THREAD,), tuple(_quota_files()))


def of_process() -> CpuAccount:
    """Return the account of all threads of this process together."""
    return partial(_account, lambda: _THREADS.glob("*/schedstat"), tuple(_quota_files()))


def _account(schedstats: Callable[[], Iterable[Path]], quotas: tuple[Path, ...]) -> CpuTime:
    """Return the account so far; `waited` is 0 where the kernel does not report quotas."""
    ran, waited, _ = read_cpu_time(*schedstats())
    return CpuTime(ran, waited if quotas else 0.0, sum(map(_stops, quotas)))


def _stops(stat: Path) -> int:
    """Return how often the quota of a control group has stopped it so far."""
    with contextlib.suppress(OSError):
        lines = stat.read_text("ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("nr_throttled "))
    return 0


def _quota_files() -> Iterator[Path]:
    """Yield the `cpu.stat` files of our control groups, from our own up to the root."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text("utf-8", "replace").splitlines():
            _number, controllers, group = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                root = _CGROUPS / "cpu" if controllers else _CGROUPS  # version 1, or 2
                own = Path(group.lstrip("/"))
                stats = (root / folder / "cpu.stat" for folder in (own, *own.parents))
                yield from filter(Path.is_file, stats)
