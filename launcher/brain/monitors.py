"""The monitors of `elasticbrain monitor --source NAME` (`brain.monitoring`).

`Agents` measures the machine that it runs on. `Prometheus` asks the node_exporter of each host.
Other machines are asked over TLS: who answers in place of an exporter decides where jobs train.
What one says is bounded, and one that says nonsense costs its own figures only. `Slurm` has the
nodes of a Slurm cluster, as `sinfo` lists them.
"""

import contextlib
import http.client
import math
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import psutil
from prometheus_client.parser import text_string_to_metric_families

from elastic_driver import contract
from elastic_driver.brain.monitoring import MonitorOptions
from elastic_driver.brain.store.records import Node
from elastic_driver.errors import UsageError
from launcher.agent.host import HostSampler, usable_cpus
from rendezvous.client_connections import is_loopback
from rendezvous.tls import TlsConnection


class Agents:
    """Measures the machine it runs on; `-H NAME:SLOTS` gives that another name."""

    def __init__(self, options: MonitorOptions) -> None:
        if len(options.hosts) > 1:
            raise UsageError("--source agents measures its own machine; name one host with -H")
        self._name = options.hosts[0][0] if options.hosts else socket.gethostname()
        self._slots = options.slots_of(self._name, usable_cpus())
        self._sampler = HostSampler()

    def look(self, now: float) -> Sequence[Node]:
        """See `Monitor.look`."""
        host = self._sampler.sample({}).host
        return [
            Node(
                name=self._name,
                seen=now,
                slots=self._slots,
                idle=None
                if self._slots is None
                else max(0, self._slots - workers(psutil.process_iter())),
                cpu=host.cpu,
                memory_free=max(0, host.memory_total - host.memory_used),
                memory_total=host.memory_total,
            )
        ]


def workers(processes: Iterable[psutil.Process]) -> int:
    """Return how many workers of jobs these are, as far as we may read them."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            environ = process.environ()
            if worker := environ.get(contract.WORKER_ID):
                found.add((environ.get(contract.RUN_ID), worker))
    return len(found)


# ---- node_exporter -------------------------------------------------------------------------

PORT = 9100
EXPORTER_S = 3.0  # for a host to answer, and to go on with its answer
WHOLE_S = 6.0  # for all of its answer
MOST_CPUS = 100_000
MOST_COUNTED = 2.0**53  # of seconds or bytes
TOGETHER = 32  # hosts that are asked at the same time
MOST_BYTES = 8 << 20  # of one answer
_NEEDED = ("node_cpu_seconds", "node_memory_MemAvailable_bytes", "node_memory_MemTotal_bytes")


class Figures(NamedTuple):
    """The figures of one node_exporter; processor seconds since the start of the machine."""

    idle: float
    all: float
    cpus: int
    memory_free: int
    memory_total: int


class Prometheus:
    """Asks the node_exporter of each host."""

    def __init__(self, options: MonitorOptions) -> None:
        if not options.hosts:
            raise UsageError("--source prometheus needs the hosts to ask; name them with -H")
        self._options, self._port = options, options.port or PORT
        try:
            self._tls = ssl.create_default_context(cafile=options.ca or None)
            self._tls.sslsocket_class = TlsConnection
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = error.strerror or error if isinstance(error, OSError) else error
            raise UsageError(f"--tls-ca {options.ca}: {why}; name a file of certificates") from None
        self._before: dict[str, Figures] = {}

    def look(self, now: float) -> Sequence[Node]:
        """See `Monitor.look`; a host that does not answer is left out."""
        names = [name for name, _slots in self._options.hosts]
        with ThreadPoolExecutor(min(TOGETHER, len(names))) as threads:
            answers = list(threads.map(self._ask, names))
        failed = [answer for answer in answers if isinstance(answer, Exception)]
        if len(failed) == len(names):
            raise OSError(f"no host answers; {names[0]}:{self._port}: {failed[0]}")
        return [
            self._node(name, found, now)
            for name, found in zip(names, answers, strict=True)
            if isinstance(found, Figures)
        ]

    def _ask(self, host: str) -> Figures | Exception:
        try:
            with socket.create_connection((host, self._port), EXPORTER_S) as plain:
                return self._asked(host, plain)
        except ssl.SSLCertVerificationError as error:
            return OSError(f"its certificate is not right ({error.verify_message}); see --tls-ca")
        except ssl.SSLError:
            return OSError("it speaks no TLS that we know; --insecure asks it in plain")
        except (OSError, http.client.HTTPException, ValueError) as error:
            return error

    def _asked(self, host: str, plain: socket.socket) -> Figures:
        """Return what a host answers on a new connection; raises as `_ask` catches."""
        with plain.dup() as twin:  # it stays when TLS takes the connection over
            late = threading.Timer(WHOLE_S, _hang_up, (twin,))
            late.start()
            connection = http.client.HTTPConnection(host, self._port)
            try:
                is_here = is_loopback(host)
                safe = not (is_here or self._options.insecure)
                connection.sock = (
                    self._tls.wrap_socket(plain, server_hostname=host) if safe else plain
                )
                connection.request("GET", "/metrics")
                with contextlib.closing(connection.getresponse()) as answer:
                    if answer.status != http.HTTPStatus.OK:
                        raise OSError(f"it answered {answer.status}")
                    return read_exporter(_whole(answer).decode())
            finally:
                late.cancel()
                connection.close()

    def _node(self, name: str, found: Figures, now: float) -> Node:
        before = self._before.get(name)
        self._before[name] = found
        cpu = None
        if before is not None and found.all > before.all:
            busy = 1 - (found.idle - before.idle) / (found.all - before.all)
            cpu = min(1.0, max(0.0, busy))
        return Node(
            name=name,
            seen=now,
            slots=self._options.slots_of(name, found.cpus),
            cpu=cpu,
            memory_free=found.memory_free,
            memory_total=found.memory_total,
        )


def _whole(answer: http.client.HTTPResponse) -> bytes:
    """Return the body of an answer; raises OSError if it is too large."""
    body = answer.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise OSError(f"its answer is larger than {MOST_BYTES >> 20} MiB")
    return body


def _hang_up(connection: socket.socket) -> None:
    """End a connection that another thread reads from: that ends, too."""
    with contextlib.suppress(OSError):  # it is over
        connection.shutdown(socket.SHUT_RDWR)


def _counted(value: float) -> float:
    """Return a count that can be; raises ValueError for another one."""
    if not (math.isfinite(value) and 0 <= value <= MOST_COUNTED):
        raise ValueError(f"it counts {value}")
    return value


def read_exporter(text: str) -> Figures:
    """Return the figures in a node_exporter's text; raises ValueError for another text."""
    idle, total, cpus = 0.0, 0.0, set()
    memory: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        if family.name not in _NEEDED:
            continue
        for sample in family.samples:
            if family.name != "node_cpu_seconds":
                memory[family.name] = int(_counted(sample.value))
                continue
            seconds = _counted(sample.value)
            total += seconds
            idle += seconds if sample.labels.get("mode") in ("idle", "iowait") else 0.0
            cpus.add(sample.labels.get("cpu"))
    if len(cpus) > MOST_CPUS:
        raise ValueError(f"it has {len(cpus)} processors")
    if len(memory) < 2 or not cpus:
        raise ValueError("its answer has no processors or memory; is it a node_exporter?")
    return Figures(idle, total, len(cpus), memory[_NEEDED[1]], memory[_NEEDED[2]])


# ---- Slurm ---------------------------------------------------------------------------------

SINFO_S = 10.0
MOST_NUMBER = 2.0**40  # a load, or MiB
# Name, processors (allocated/idle/other/all), load, free and all memory in MiB, state.
_FORMAT = "%N|%C|%O|%e|%m|%T"
_USABLE = ("idle", "mixed", "allocated", "completing")
_MIB = 1 << 20


class Slurm:
    """Asks Slurm's controller; nodes that take no jobs are left out."""

    def __init__(self, options: MonitorOptions) -> None:
        found = shutil.which("sinfo")
        if found is None:
            raise UsageError("--source slurm needs sinfo, which is not on the PATH; install it")
        self._sinfo, self._options = found, options

    def look(self, now: float) -> Sequence[Node]:
        """See `Monitor.look`."""
        command = [self._sinfo, "--noheader", "--Node", f"--format={_FORMAT}"]
        try:
            done = subprocess.run(
                command,
                check=False,
                capture_output=True,
                text=True,
                timeout=SINFO_S,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"sinfo took longer than {SINFO_S:g} s") from None
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or ["no message"]
            raise OSError(f"sinfo failed: {said[-1]}")
        named = dict(self._options.hosts)
        nodes = read_sinfo(done.stdout, self._options, now)
        return [node for node in nodes if not named or node.name in named]


def read_sinfo(text: str, options: MonitorOptions, now: float) -> list[Node]:
    """Return the usable nodes in sinfo's lines, each once; raises ValueError for other lines."""
    found: dict[str, Node] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 6 or fields[1].count("/") != 3:
            raise ValueError(f"sinfo printed {line[:80]!r}")
        name, cpus, load, free, memory, state = fields
        if state.strip("*~#$@^-+!%").lower() not in _USABLE or state.endswith("*"):
            continue  # down, drained, reserved, or not responding ("*")
        _allocated, idle, _other, total = map(int, cpus.split("/"))
        slots = options.slots_of(name, total)
        known = _number(load)
        found[name] = Node(
            name=name,
            seen=now,
            slots=slots,
            idle=None if slots is None or not total else slots * idle // total,
            cpu=None if known is None or not total else min(1.0, known / total),
            memory_free=_mib(free),
            memory_total=_mib(memory),
        )
    return list(found.values())


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None  # "N/A": the node has not said it yet
    return found if 0 <= found < MOST_NUMBER else None


def _mib(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number * _MIB)
