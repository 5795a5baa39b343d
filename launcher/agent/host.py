"""The host under an agent: its identity, memory, usage, free ports and unanswered connections.

*Identity*: a driver notices two names of one machine. Containers on one machine are machines of
their own: they have another network, other processes, another name or another disk. Copies of a
virtual machine have another boot or another address.

*Memory*: of the host, of the containers around a process, and of processes; also whether a worker
ran out of memory or was killed for another reason. A container is a control group of Linux, of
version 1 or 2 of its interface, with a limit of memory.

*Usage*: a thread of its own takes a sample each second, so a device that does not answer holds no
heartbeat up and does not keep the agent from ending. The agent's heartbeats carry the newest
sample. GPUs are sampled where the package `nvidia-ml-py` (module `pynvml`) and NVIDIA's driver are
installed. What is not known is left out.

*Ports* for torch's stores and for servers that workers start lie outside the range from which the
kernel takes ports for outgoing connections. So the kernel gives none of them away between the test
here and the moment when a worker listens on it.

*Connections that nobody answers*: a process that connects to a port behind a firewall waits for two
minutes and learns nothing. In the kernel's tables such a connection is in the state SYN_SENT. This
works for every library, and sends nothing.

Times are seconds (of connections: monotonic), sizes bytes.
"""

import contextlib
import hashlib
import importlib
import ipaddress
import os
import random
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil

from elastic_driver.failure_causes import lacks_memory, lost_a_loader
from elastic_driver.words.progress import (
    MAX_GPUS,
    MAX_WORKERS,
    GpuUsage,
    HostUsage,
    Pressure,
    Usage,
    WorkerUsage,
)
from elastic_driver.words.wire_events import OutOfMemory
from launcher.network import default_address

# ---- which machine this is ----------------------------------------------------------------


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID = Path("/etc/machine-id")
_SPACES = ("net", "pid", "uts")
_THIS = ("127.0.0.1", "::1")
_CHARS = 32


def machine_id(host: str) -> str:
    """Return what two names of one machine have in common; empty: that is not known.

    It is empty for the loopback addresses beside 127.0.0.1, too: they are names for hosts that
    share a machine on purpose.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass  # a name
    else:
        if address.is_loopback and host not in _THIS:
            return ""
    try:
        root = os.stat("/")
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in _SPACES]
        facts = [_BOOT_ID.read_text(), socket.gethostname(), str(default_address())]
    except OSError:
        return ""
    if _MACHINE_ID.is_file():
        facts.append(_MACHINE_ID.read_text())
    facts += [*spaces, f"{root.st_dev}/{root.st_ino}"]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:_CHARS]


# ---- memory -------------------------------------------------------------------------------


OWN_CGROUP = Path("/proc/self/cgroup")
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

    def __init__(self, cgroups: Path = CGROUPS, of: Path = OWN_CGROUP) -> None:
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

    def __init__(self, cgroups: Path = CGROUPS, of: Path = OWN_CGROUP) -> None:
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
        self._kills = kills or KillCount()
        self._limit = MemoryLimit()

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


# ---- usage --------------------------------------------------------------------------------


SAMPLE_S = 1.0
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
        self._limit = MemoryLimit()
        self._gpus = Gpus()
        self._processes: dict[str, _Sampled] = {}
        self._flows = _flows_of_host()
        psutil.cpu_percent()  # the first one begins to count

    def sample(self, workers: Mapping[str, int]) -> Usage:
        """Return the usage since the last sample; `workers` are names and pids."""
        return Usage(self._host(), self._of_workers(workers))

    def _host(self) -> HostUsage:
        used, total = host_memory(self._limit)
        disk = psutil.disk_usage(DISK)
        before = self._flows
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
        before = self._processes
        self._processes = {}
        found = {}
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
        read = now.since(before, "read_bytes")
        written = now.since(before, "write_bytes")
        return WorkerUsage(round(cpu, 4), memory, peak, read, written)


class UsageThread:
    """Samples until it is closed; `workers` returns names and pids, and is called by its thread."""

    def __init__(
        self, workers: Callable[[], Mapping[str, int]], interval: float = SAMPLE_S
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


# ---- free ports ---------------------------------------------------------------------------


_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_RANGE = (32768, 60999)  # Linux's own default
_USABLE = range(10240, 65536)  # below it many services have their registered ports


def first_free(ports: Sequence[int], wanted: int) -> tuple[int, ...]:
    """Return up to `wanted` of these ports that can be bound right now, in random order."""
    shuffled = random.SystemRandom().sample(ports, len(ports))
    return tuple(islice(filter(_can_bind, shuffled), wanted))


def free_ports(wanted: int, range_file: Path = _RANGE_FILE) -> tuple[int, ...]:
    """Return up to `wanted` distinct ports that can be bound right now, in random order.

    The order is random because agents of several jobs on one machine ask at the same time. There
    are fewer than `wanted` (or none) if the host has no more.
    """
    low, high = _DEFAULT_RANGE
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, range_file.read_text().split())
    # If no port lies outside the range, any port is better than none.
    candidates = [port for port in _USABLE if not low <= port <= high] or list(_USABLE)
    return first_free(candidates, wanted)


def _can_bind(port: int) -> bool:
    """Return whether the port is free on every interface, for IPv4 and, if there is one, IPv6."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError:
        return False
    return True


# ---- connections that nobody answers ------------------------------------------------------


CONNECTIONS_LOOK_S = 2.0  # between two looks
CONNECT_PATIENCE_S = 4.0  # more than three attempts of the kernel
REPORT_AGAIN_S = 10.0  # between two reports of one connection
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_SYN_SENT = "02"
_WORD = struct.Struct("=I")  # addresses stand there as words of this machine, in hexadecimal


class Waiting(NamedTuple):
    """A worker that waits for an answer of this address, and for how long."""

    worker: str
    address: str
    port: int
    seconds: float


class Unanswered:
    """Remembers connections that wait, from one look to the next."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # inode of a socket → the first look that has found it
        self._told: dict[int, float] = {}

    def look(self, workers: Mapping[str, int]) -> list[Waiting]:
        """Return what waits too long now; `workers`: their names and pids."""
        now = time.monotonic()
        open_now = dict(_connecting())
        self._since = {inode: self._since.get(inode, now) for inode in open_now}
        self._told = {inode: at for inode, at in self._told.items() if inode in open_now}
        late = {
            inode
            for inode, since in self._since.items()
            if now - since >= CONNECT_PATIENCE_S
            and now - self._told.get(inode, -REPORT_AGAIN_S) >= REPORT_AGAIN_S
        }
        found = []
        for worker, pid in workers.items() if late else ():
            for inode in late & _sockets_below(pid):
                self._told[inode] = now
                found.append(Waiting(worker, *open_now[inode], now - self._since[inode]))
        return found


def _connecting() -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield (inode, remote end) of every connection of this network that is not answered yet."""
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines, None)
            for line in lines:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _SYN_SENT:
                    yield int(fields[9]), _address_in(fields[2])


def _address_in(text: str) -> tuple[str, int]:
    """Return the address and the port that the kernel writes as `0100007F:1F90`."""
    address, _, port = text.partition(":")
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    packed = b"".join(map(_WORD.pack, words))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:"), int(port, 16)


def _sockets_below(pid: int) -> set[int]:
    """Return the inodes of the sockets of a process and its descendants."""
    found: set[int] = set()
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            folder = f"/proc/{process.pid}/fd"
            with contextlib.suppress(OSError):  # it has ended
                for name in os.listdir(folder):
                    with contextlib.suppress(OSError):  # closed meanwhile
                        target = os.readlink(f"{folder}/{name}")
                        if target.startswith("socket:["):
                            found.add(int(target[8:-1]))
    return found
