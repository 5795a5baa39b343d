"""The usage of a host and of the workers of its agent, sampled every few seconds.

A thread of its own samples, so a device that does not answer holds no heartbeat up and does not
keep the agent from ending. The agent's heartbeats carry the newest sample. GPUs are sampled where
the package `nvidia-ml-py` (module `pynvml`) and NVIDIA's driver are installed. A sample costs a few
milliseconds. Times are seconds, sizes bytes.
"""

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from elastic_driver.core.measured import (
    MAX_GPUS,
    MAX_WORKERS,
    GpuUsage,
    HostUsage,
    Usage,
    WorkerUsage,
)

INTERVAL_S = 5.0
FIRST_S = 1.0  # to the first sample: shares of time need two looks
DISK = "/"
_LOOPBACK = "lo"
_CGROUPS = Path("/sys/fs/cgroup")


class MemoryLimit:
    """The memory limit of the container around this process (cgroup v2)."""

    def __init__(self, cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> None:
        self._folder: Path | None = None
        self._limit = 0
        with contextlib.suppress(OSError, ValueError):
            line = next(x for x in own.read_text().splitlines() if x.startswith("0::"))
            here = cgroups / line[3:].strip("/")
            for folder in (here, *here.parents):
                if not folder.is_relative_to(cgroups):
                    break
                self._consider(folder)

    def _consider(self, folder: Path) -> None:
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text())  # "max": there is none
            if self._folder is None or limit < self._limit:
                self._folder, self._limit = folder, limit

    def usage(self) -> tuple[int, int] | None:
        """Return used memory, without files that can be dropped, and the limit; None: no limit."""
        if self._folder is None:
            return None
        try:
            used = int((self._folder / "memory.current").read_text())
            stat = (self._folder / "memory.stat").read_text().split()
        except (OSError, ValueError):
            return None
        if "inactive_file" in stat:
            used -= int(stat[stat.index("inactive_file") + 1])
        return max(used, 0), self._limit


def usable_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def usable_memory() -> int:
    """Return the memory of this host, or of its container if that has a limit."""
    total = int(psutil.virtual_memory().total)
    limited = MemoryLimit().usage()
    return total if limited is None else min(total, limited[1])


class Gpus:
    """The GPUs of this host, by NVML; none if its package or its driver is not there."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[tuple[int, str, Any]] = []
        with contextlib.suppress(Exception):  # of any kind: these numbers are only shown
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            for index in range(min(nvml.nvmlDeviceGetCount(), MAX_GPUS)):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                name = nvml.nvmlDeviceGetName(handle)
                name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
                self._handles.append((index, name[:256], handle))
            self._nvml = nvml

    def usage(self) -> tuple[GpuUsage, ...]:
        """Return the usage of all GPUs that answer."""
        found = []
        for index, name, handle in self._handles:
            with contextlib.suppress(Exception):  # as above
                used = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                found.append(GpuUsage(index, name, used, int(memory.used), int(memory.total)))
        return tuple(found)


class _Network(NamedTuple):
    """Bytes so far, at a monotonic time."""

    at: float
    received: int
    sent: int


class HostSampler:
    """Samples this host, and processes on it; all methods belong to one thread."""

    def __init__(self) -> None:
        self._limit, self._gpus = MemoryLimit(), Gpus()
        self._processes: dict[str, psutil.Process] = {}
        self._network = _network()
        psutil.cpu_percent()  # the first one begins to count

    def sample(self, workers: Mapping[str, int]) -> Usage:
        """Return the usage since the last sample; `workers` are names and pids."""
        return Usage(self._host(), self._of_workers(workers))

    def _host(self) -> HostUsage:
        memory, disk, before = psutil.virtual_memory(), psutil.disk_usage(DISK), self._network
        used, total = self._limit.usage() or (memory.total - memory.available, memory.total)
        now = self._network = _network()
        passed = max(now.at - before.at, 1e-3)
        return HostUsage(
            cpu=round(psutil.cpu_percent() / 100, 4),
            memory_used=used,
            memory_total=min(total, memory.total),
            disk_used=disk.used,
            disk_total=disk.total,
            net_in=round(max(now.received - before.received, 0) / passed, 1),
            net_out=round(max(now.sent - before.sent, 0) / passed, 1),
            gpus=self._gpus.usage(),
        )

    def _of_workers(self, workers: Mapping[str, int]) -> dict[str, WorkerUsage]:
        before, self._processes, found = self._processes, {}, {}
        for worker, pid in list(workers.items())[:MAX_WORKERS]:
            with contextlib.suppress(psutil.Error):  # it has ended
                process = before.get(worker)
                is_new = process is None
                if process is None:
                    process = psutil.Process(pid)
                self._processes[worker] = process
                with process.oneshot():
                    since_last, memory = process.cpu_percent() / 100, process.memory_info().rss
                    cpu = _since_its_start(process) if is_new else since_last
                found[worker] = WorkerUsage(round(cpu, 4), memory)
        return found


class UsageThread:
    """Samples until it is closed; `workers` returns names and pids, and is called by its thread."""

    def __init__(
        self, workers: Callable[[], Mapping[str, int]], interval: float = INTERVAL_S
    ) -> None:
        self._workers, self._interval = workers, interval
        self._newest: bytes | None = None  # replaced as a whole
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def take(self) -> bytes | None:
        """Return the newest sample, encoded; None if it was taken already. Any thread may call."""
        newest, self._newest = self._newest, None
        return newest

    def close(self) -> None:
        """End the thread soon; does not wait for it."""
        self._closed.set()

    def _run(self) -> None:
        with contextlib.suppress(OSError, psutil.Error):  # a system without what we look at
            sampler, wait = HostSampler(), min(FIRST_S, self._interval)
            sampler.sample(self._workers())  # the first look at the processes begins to count
            while not self._closed.wait(wait):
                self._newest = msgspec.json.encode(sampler.sample(self._workers()))
                wait = self._interval


def _since_its_start(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system) / max(time.time() - process.create_time(), 0.1)


def _network() -> _Network:
    received = sent = 0
    with contextlib.suppress(OSError):
        for name, counts in psutil.net_io_counters(pernic=True).items():
            if name != _LOOPBACK:
                received, sent = received + counts.bytes_recv, sent + counts.bytes_sent
    return _Network(time.monotonic(), received, sent)
