"""`GET /metrics`: the status document in Prometheus' text format.

A scrape takes one status document and derives all metrics from it, so that they are consistent.
Names begin with `elastic_`, counters end with `_total`, times are seconds. docs/operations.md lists
them. Called in the server's thread.
"""

from collections import Counter
from collections.abc import Iterator

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from elastic_driver.core.rules.workers import WorkerState
from elastic_driver.core.status import HostStatus, MemberStatus, SlowStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HOST_STATES = ("usable", "cool-down", "draining", "drained", "removed")
JOB_STATES = ("forming", "running", "changing", "finishing", "succeeded", "failed")


class Counters(Struct, frozen=True):
    """The counters of the status document that become metrics."""

    failures: int
    resets: int
    restart_count: int
    ignored_events: int
    false_alarms: int


class Document(Struct, frozen=True):
    """The part of the status document that becomes metrics."""

    run_id: str
    started: float
    state: str
    round: int
    step: int
    size: int
    min_np: int
    wanted: int | None
    max_np: int | None
    members: tuple[MemberStatus, ...]
    hosts: tuple[HostStatus, ...]
    counters: Counters
    slow: tuple[SlowStatus, ...]
    events: dict[str, int]


_decode = msgspec.json.Decoder(Document).decode


def exposition(status: bytes) -> bytes:
    """Return the metrics of a status document in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Picture(_decode(status)))
    return generate_latest(registry)


class _Picture(Collector):
    """The metrics of one document."""

    def __init__(self, document: Document) -> None:
        self._document = document

    def describe(self) -> list[Metric]:
        """Return nothing: no other collector's names could clash."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        document = self._document
        yield InfoMetricFamily("elastic_job", "The run.", value={"run_id": document.run_id})
        yield from self._gauges()
        states = {state: int(state == document.state) for state in JOB_STATES}
        yield _by_label("elastic_job_state", "The job's state: 1.", "state", states)
        workers = Counter({state.value: 0 for state in WorkerState})
        workers.update(member.state for member in document.members)
        yield _by_label("elastic_workers", "Worker processes by state.", "state", workers)
        hosts = Counter(dict.fromkeys(HOST_STATES, 0))
        hosts.update(host.state for host in document.hosts)
        yield _by_label("elastic_hosts", "Hosts by state.", "state", hosts)
        yield self._slow()
        yield from self._counters()

    def _gauges(self) -> Iterator[Metric]:
        document = self._document
        slots = sum(host.slots for host in document.hosts if host.state == "usable")
        figures: list[tuple[str, str, float | None]] = [
            ("job_start_time_seconds", "Start of the driver, in unix seconds.", document.started),
            ("round", "Number of the present round.", document.round),
            ("step", "Committed steps, as the workers last said.", document.step),
            ("world_size", "Members of the newest complete round still in it.", document.size),
            ("world_size_min", "Fewest workers the job trains with.", document.min_np),
            ("world_size_wanted", "Workers aimed at; missing: every slot.", document.wanted),
            ("world_size_max", "Most workers the job trains with; missing: any.", document.max_np),
            ("slots", "Slots of usable hosts.", slots),
        ]
        for name, text, value in figures:
            if value is not None:
                yield GaugeMetricFamily(f"elastic_{name}", text, value=value)

    def _slow(self) -> Metric:
        text = "How many times the usual time a rank that is slow takes; none: nobody is."
        family = GaugeMetricFamily("elastic_slow_rank_ratio", text, labels=("rank", "host", "kind"))
        for slow in self._document.slow:
            family.add_metric((str(slow.rank), slow.host, slow.kind), slow.ratio)
        return family

    def _counters(self) -> Iterator[Metric]:
        counters, events = self._document.counters, self._document.events
        figures = [
            ("worker_failures", "Failures of workers.", counters.failures),
            ("restarts", "How often workers were started again.", counters.restart_count),
            ("world_changes", "Changes of membership.", counters.resets),
            (
                "ignored_events",
                "Events that came late, twice or out of order.",
                counters.ignored_events,
            ),
            ("hangs", "Workers killed because they hung.", events.get("worker_hung", 0)),
            ("slow_ranks", "Alarms about slow ranks.", events.get("rank_slow", 0)),
            ("slow_rank_false_alarms", "Alarms that were soon withdrawn.", counters.false_alarms),
            ("work_moved", "How often work was moved.", events.get("work_moved", 0)),
        ]
        for name, text, value in figures:
            yield CounterMetricFamily(f"elastic_{name}", text, value=value)
        family = CounterMetricFamily("elastic_events", "Logged events by name.", labels=("event",))
        for event, count in sorted(events.items()):
            family.add_metric((event,), count)
        yield family


def _by_label(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family
