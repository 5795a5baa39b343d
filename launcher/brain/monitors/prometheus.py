"""Machines with Prometheus' node_exporter: its text, read from each of them."""

import http.client
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from elastic_driver.brain.monitoring import MonitorOptions
from elastic_driver.brain.store.records import Node
from elastic_driver.errors import UsageError

PORT = 9100
TIMEOUT_S = 3.0  # for a host to answer
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
        connection = http.client.HTTPConnection(host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                return OSError(f"it answered {answer.status}")
            return read(answer.read(MOST_BYTES).decode())
        except (OSError, http.client.HTTPException, ValueError) as error:
            return error
        finally:
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


def read(text: str) -> Figures:
    """Return the figures in a node_exporter's text; raises ValueError for another text."""
    idle, total, cpus = 0.0, 0.0, set()
    memory: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        if family.name not in _NEEDED:
            continue
        for sample in family.samples:
            if family.name != "node_cpu_seconds":
                memory[family.name] = int(sample.value)
                continue
            total += sample.value
            idle += sample.value if sample.labels.get("mode") in ("idle", "iowait") else 0.0
            cpus.add(sample.labels.get("cpu"))
    if len(memory) < 2 or not cpus:
        raise ValueError("its answer has no processors or memory; is it a node_exporter?")
    return Figures(idle, total, len(cpus), memory[_NEEDED[1]], memory[_NEEDED[2]])
