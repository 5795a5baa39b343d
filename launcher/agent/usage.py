"""The usage of a host and of the workers of its agent, sampled each second.

A thread of its own samples, so a device that does not answer holds no heartbeat up and does not
keep the agent from ending. The agent's heartbeats carry the newest sample. GPUs are sampled where
the package `nvidia-ml-py` (module `pynvml`) and NVIDIA's driver are installed. What is not known is
left out. Times are seconds, sizes bytes.
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

from elastic_driver.words.progress import (
    MAX_GPUS,
    MAX_WORKERS,
    GpuUsage,
    HostUsage,
    Pressure,
    Usage,
    WorkerUsage,
)
from launcher.agent.memory import MemoryLimit, host_memory, memory_of, numbers_in

INTERVAL_S = 1.0
DISK = "/"
_LOOPBACK = "lo"


def usable_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


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


class _Flows(NamedTuple):
    """Bytes so far, by name, at a monotonic time."""

    at: float
    bytes: Mapping[str, int]

    def since(self, before: "_Flows | None", name: str) -> float | None:
        """Return bytes per second since an earlier look; None: not known."""
        if before is None or name not in self.bytes or name not in before.bytes:
            return None
        passed = max(self.at - before.at, 1e-3)
        return round(max(self.bytes[name] - before.bytes[name], 0) / passed, 1)


class HostSampler:
    """Samples this host, and processes on it; all methods belong to one thread."""

    def __init__(self) -> None:
        self._limit, self._gpus = MemoryLimit(), Gpus()
        self._processes: dict[str, _Sampled] = {}
        self._flows = _flows_of_host()
        psutil.cpu_percent()  # the first one begins to count

    def sample(self, workers: Mapping[str, int]) -> Usage:
        """Return the usage since the last sample; `workers` are names and pids."""
        return Usage(self._host(), self._of_workers(workers))

    def _host(self) -> HostUsage:
        (used, total), disk, before = host_memory(self._limit), psutil.disk_usage(DISK), self._flows
        now = self._flows = _flows_of_host()
        return HostUsage(
            cpu=round(psutil.cpu_percent() / 100, 4),
            memory_used=used,
            memory_total=total,
            disk_used=disk.used,
            disk_total=disk.total,
            net_in=now.since(before, "net_in"),
            net_out=now.since(before, "net_out"),
            disk_read=now.since(before, "disk_read"),
            disk_write=now.since(before, "disk_write"),
            pressure=Pressure(*(_pressure(name) for name in ("cpu", "memory", "io"))),
            gpus=self._gpus.usage(),
        )

    def _of_workers(self, workers: Mapping[str, int]) -> dict[str, WorkerUsage]:
        before, self._processes, found = self._processes, {}, {}
        for worker, pid in list(workers.items())[:MAX_WORKERS]:
            with contextlib.suppress(psutil.Error, OSError):  # it has ended
                sampled = before.get(worker) or _Sampled(pid)
                self._processes[worker] = sampled
                found[worker] = sampled.usage()
        return found


class _Sampled:
    """A process that is sampled again and again."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._flows: _Flows | None = None

    def usage(self) -> WorkerUsage:
        """Return what it has used since the last call, or since its start."""
        process, before = self._process, self._flows
        with process.oneshot():
            since_last = process.cpu_percent() / 100
            cpu = _since_its_start(process) if before is None else since_last
        memory, peak = memory_of(process.pid)
        self._flows = now = _Flows(time.monotonic(), numbers_in(Path(f"/proc/{process.pid}/io")))
        read, written = now.since(before, "read_bytes"), now.since(before, "write_bytes")
        return WorkerUsage(round(cpu, 4), memory, peak, read, written)


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
            sampler = HostSampler()
            sampler.sample(self._workers())  # the first look at the processes begins to count
            while not self._closed.wait(self._interval):
                self._newest = msgspec.json.encode(sampler.sample(self._workers()))


def _since_its_start(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system) / max(time.time() - process.create_time(), 0.1)


def _pressure(resource: str) -> float | None:
    """Return the share of the last ten seconds in which a process waited; None: not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        first = Path(f"/proc/pressure/{resource}").read_text(encoding="ascii").split()
        return round(float(first[1].removeprefix("avg10=")) / 100, 4)
    return None


def _flows_of_host() -> _Flows:
    counts: dict[str, int] = {}
    with contextlib.suppress(OSError):
        pernic = psutil.net_io_counters(pernic=True)
        cards = [found for name, found in pernic.items() if name != _LOOPBACK]
        counts["net_in"] = sum(card.bytes_recv for card in cards)
        counts["net_out"] = sum(card.bytes_sent for card in cards)
    with contextlib.suppress(OSError, RuntimeError):
        if (disks := psutil.disk_io_counters()) is not None:
            counts["disk_read"], counts["disk_write"] = disks.read_bytes, disks.write_bytes
    return _Flows(time.monotonic(), counts)
