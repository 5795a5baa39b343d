"""The memory of this host, of the containers around a process, and of processes.

Also tells the workers that ran out of memory from those that were killed for another reason. A
container is a control group of Linux, of version 1 or 2 of its interface, with a limit of
memory. Sizes are bytes.
"""

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil

from elastic_driver.out_of_memory import lacks_memory, lost_a_loader
from elastic_driver.words.wire_events import OutOfMemory

OWN = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
_NUMBERS = re.compile(rb"^(\w+):?[ \t]+(\d+)", re.MULTILINE)
_NO_LIMIT = 2**60  # version 1 writes a huge number where there is no limit


def numbers_in(file: Path) -> dict[str, int]:
    """Return the lines of a file of the kernel that are a name and a number; none if unreadable."""
    with contextlib.suppress(OSError):
        return {name.decode(): int(number) for name, number in _NUMBERS.findall(file.read_bytes())}
    return {}


def memory_of(pid: int) -> tuple[int, int | None]:
    """Return the resident memory of a process, and its peak; raise OSError if it has ended."""
    sizes = numbers_in(Path(f"/proc/{pid}/status"))
    if "VmRSS" not in sizes:
        raise ProcessLookupError(f"process {pid} has no memory any more")
    peak = sizes.get("VmHWM")
    return sizes["VmRSS"] * 1024, None if peak is None else peak * 1024


class MemoryLimit:
    """The memory limit of the containers around a process: the smallest one counts.

    `of` is the file that names the control groups of the process.
    """

    def __init__(self, cgroups: Path = CGROUPS, of: Path = OWN) -> None:
        self._folder: Path | None = None
        self._limit = _NO_LIMIT
        for folder in memory_groups(cgroups, of):
            for name in ("memory.max", "memory.limit_in_bytes"):
                with contextlib.suppress(OSError, ValueError):
                    limit = int((folder / name).read_text())  # "max": there is none
                    if limit < self._limit:
                        self._folder, self._limit = folder, limit

    def usage(self) -> tuple[int, int] | None:
        """Return used memory, without files that can be dropped, and the limit; None: no limit."""
        if self._folder is None:
            return None
        stat = numbers_in(self._folder / "memory.stat")
        dropped = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                return max(int((self._folder / name).read_text()) - dropped, 0), self._limit
        return None


def memory_groups(cgroups: Path, of: Path) -> Iterator[Path]:
    """Yield the folders of the control groups around a process that count memory, inner first."""
    lines: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        lines = of.read_text().splitlines()
    for line in lines:
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if number == "0" and not kinds:
            top = cgroups
        elif "memory" in kinds.split(","):
            top = cgroups / "memory"
        else:
            continue
        here = top / path.strip("/")
        yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(top))


def host_memory(limit: MemoryLimit) -> tuple[int, int]:
    """Return the used memory and all memory of this host, or of a container on it."""
    memory = psutil.virtual_memory()
    used, total = limit.usage() or (memory.total - memory.available, memory.total)
    return used, min(total, memory.total)


def usable_memory() -> int:
    """Return the memory of this host, or of its container if that has a limit."""
    return host_memory(MemoryLimit())[1]


class KillCount:
    """Counts the processes that the kernel killed because memory was short.

    Workers are in the control group of their agent, or below it. The group's counter has their
    kills and no others; without one, the counter of the whole system has to do.
    """

    def __init__(self, cgroups: Path = CGROUPS, of: Path = OWN) -> None:
        self._files = (*_counters(cgroups, of), Path("/proc/vmstat"))
        self._explained = 0  # the part of the count that was taken

    def now(self) -> int:
        """Return how many were killed so far."""
        found = (numbers_in(file).get("oom_kill") for file in self._files)
        return next((count for count in found if count is not None), 0)

    def take(self, before: int) -> bool:
        """Return whether one was killed since `before`; each kill is taken once."""
        known = max(before, self._explained)
        if self.now() <= known:
            return False
        self._explained = known + 1
        return True


def _counters(cgroups: Path, of: Path) -> Iterator[Path]:
    """Yield the files that may count the kills of the inner control group around a process."""
    for folder in list(memory_groups(cgroups, of)):
        for name in ("memory.events", "memory.oom_control"):
            if "oom_kill" in numbers_in(folder / name):
                yield folder / name
                return


class MemoryJudge:
    """Finds out which workers of an agent ran out of memory."""

    def __init__(self, kills: KillCount | None = None) -> None:
        self._kills, self._limit = kills or KillCount(), MemoryLimit()

    def begin(self) -> int:
        """Return what `judge` has to know of the time before a worker."""
        return self._kills.now()

    def judge(self, before: int, code: int, tail: str, peak: int | None) -> OutOfMemory | None:
        """Return the facts if an ended worker ran out of memory; call it once its process is gone.

        `before` is what `begin` returned when it was started, `peak` the most memory that it had.
        """
        if code == 0:
            return None
        lacking = lacks_memory(tail)
        if lacking == "device":
            return OutOfMemory(peak, of_device=True)
        if lacking is None:
            may_be = code == -signal.SIGKILL or lost_a_loader(tail)
            if not may_be or not self._kills.take(before):
                return None
        used, total = host_memory(self._limit)
        return OutOfMemory(peak, max(total - used, 0))
