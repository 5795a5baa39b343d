"""`GET /metrics`: the status document, and histograms of a job's durations, for Prometheus.

A scrape takes one status document and derives all metrics from it, so that they are consistent.
Names begin with `elastic_`, counters end with `_total`, times are seconds. docs/operations.md lists
them. Called in the server's thread.

The driver's thread writes the histograms. Each driver of a run begins with empty ones, which
Prometheus takes for the restart of a counter.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from elastic_driver.features import chapters
from elastic_driver.job.decisions import Announce
from elastic_driver.job.events import Evidence
from elastic_driver.job.workers import WorkerState
from elastic_driver.kernel.log import name_of
from elastic_driver.runtime.status_document import (
    JobDocument,
    StatusDocument,
    read_status,
)
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import log_events as log
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.orders import World
from rendezvous.answers import Histogram

STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
CHANGE_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class JobTimes:
    """The histograms of one driver; all times are those of the driver's clock.

    A step counts once, with the time that the usual rank reported last; steps that are done again
    after a failure do not count. A round counts from `round_opened` to `round_completed`. A
    recovery counts from the loss of a member of the world to the first step that is committed in a
    later round; scripts that commit no steps have none.
    """

    def __init__(self) -> None:
        self.steps = Histogram(STEP_BOUNDS)
        self.rounds, self.recoveries = Histogram(CHANGE_BOUNDS), Histogram(CHANGE_BOUNDS)
        self._step: int | None = None  # the newest that was counted
        self._opened: float | None = None  # when the round was opened that is not complete
        self._lost: tuple[float, int] | None = None  # when, in which round; no step since then

    def announced(self, event: Announce, world: World | None, now: float) -> None:
        """Record an event of the log; `world` is the newest that was published."""
        match event.what:
            case log.RoundOpened():
                self._opened = now
            case log.RoundCompleted() if self._opened is not None:
                self.rounds.observe(now - self._opened)
                self._opened = None
            case what if what.is_loss and world is not None and self._lost is None:
                if any(member.worker == event.worker for member in world.members):
                    self._lost = now, world.round

    def stepped(self, round_id: int, now: float) -> None:
        """Record that a worker has committed its first step of a round."""
        if self._lost is not None and round_id > self._lost[1]:
            self.recoveries.observe(now - self._lost[0])
            self._lost = None

    def progressed(self, step: int, step_time: float) -> None:
        """Record that `step` steps are committed, each of the last ones in `step_time`."""
        if self._step is not None and step > self._step and step_time > 0:
            self.steps.observe(step_time, step - self._step)
        self._step = step if self._step is None else max(step, self._step)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HOST_STATES = (
    *("usable", "checking", "cool-down", "pausing", "unreachable"),
    *("draining", "drained", "removed"),
)
JOB_STATES = ("forming", "running", "changing", "finishing", "succeeded", "failed")
EVIDENCE: tuple[str, ...] = get_args(Evidence)
_GAUGES = (  # name, key in the document, help
    ("job_start_time_seconds", "started", "Start of the driver, in unix seconds."),
    ("round", "round", "Number of the present round."),
    ("step", "step", "Steps done, as the workers last reported."),
    ("world_size", "size", "Members of the newest complete round still in it."),
    ("world_size_min", "min_np", "Fewest workers the job trains with."),
    ("world_size_wanted", "wanted", "Workers aimed at; missing: every slot."),
    ("world_size_max", "max_np", "Most workers the job trains with; missing: any."),
)
_COUNTERS = (  # name, key in the document's counters, help
    ("worker_failures", "failures", "Failures of workers."),
    ("restarts", "restart_count", "How often workers were started again."),
    ("world_changes", "resets", "Changes of membership."),
    ("ignored_events", "ignored_events", "Events that came late, twice or out of order."),
    ("slow_rank_false_alarms", "false_alarms", "Alarms that were soon withdrawn."),
)
_COUNTED = (  # name, event in the log, help
    ("hangs", name_of(worker_log.WorkerHung), "Workers killed because they hung."),
    ("slow_ranks", name_of(worker_log.RankSlow), "Alarms about slow ranks."),
    ("state_differences", name_of(log.StateDiffers), "How often ranks held different states."),
    ("agents_cleared", name_of(host_log.AgentCleared), "Agents that were suspected and live."),
    ("agents_lost", name_of(host_log.AgentLost), "Agents that were lost."),
    ("work_moved", name_of(worker_log.WorkMoved), "How often work was moved."),
)


class ServerFigures(NamedTuple):
    """The rendezvous server's counts and times of its requests."""

    limit_hits: Mapping[str, int]  # by the name of the bound
    refusals: Mapping[str, int]  # because of their tokens, by the code of the answer
    times: Mapping[str, Histogram]  # by kind of route


def exposition(status: bytes, server: ServerFigures, times: JobTimes) -> bytes:
    """Return the metrics of a status document in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Picture(read_status(status), server, times))
    return generate_latest(registry)


class _Picture(Collector):
    """The metrics of one document."""

    def __init__(self, document: StatusDocument, server: ServerFigures, times: JobTimes) -> None:
        self._document, self._server, self._times = document, server, times

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        document = self._document
        yield InfoMetricFamily("elastic_job", "The run.", value={"run_id": document.run_id})
        for name, key, text in _GAUGES:
            value = getattr(document, key, None)
            if key == "step" and isinstance(document, JobDocument):
                # With the steps of scripts that commit none.
                value = max(document.step, document.measured.step)
            if value is not None:
                yield GaugeMetricFamily(f"elastic_{name}", text, value=value)
        text = "How often clients have hit a bound of the rendezvous."
        hits = CounterMetricFamily("elastic_limit_hits", text, labels=("limit",))
        for limit, count in self._server.limit_hits.items():
            hits.add_metric((limit,), count)
        yield hits
        text = "Requests refused because of their tokens, by the code of the answer."
        refused = CounterMetricFamily("elastic_requests_refused", text, labels=("code",))
        for code, count in self._server.refusals.items():
            refused.add_metric((code,), count)
        yield refused
        text = "From the arrival of a request to its answer, by kind of route."
        name, kinds = "elastic_request_duration_seconds", self._server.times
        yield _histogram(name, text, {(kind,): kinds[kind] for kind in sorted(kinds)}, "route")
        for chapter in chapters("metrics"):
            yield from chapter.families(document)
        if isinstance(document, JobDocument):
            yield from self._of_the_job(document)

    def _of_the_job(self, document: JobDocument) -> Iterator[Metric]:
        events = document.events
        usable = (host.slots for host in document.hosts if host.state == "usable")
        yield GaugeMetricFamily("elastic_slots", "Slots of usable hosts.", value=sum(usable))
        states = {state: int(state == document.state) for state in JOB_STATES}
        yield _by_label("elastic_job_state", "The job's state: 1.", "state", states)
        workers = Counter({state.value: 0 for state in WorkerState})
        workers.update(member.state for member in document.members)
        yield _by_label("elastic_workers", "Worker processes by state.", "state", workers)
        hosts = Counter(dict.fromkeys(HOST_STATES, 0))
        hosts.update(host.state for host in document.hosts)
        yield _by_label("elastic_hosts", "Hosts by state.", "state", hosts)
        text = "Time of a slow rank over the usual time; missing: no rank is slow."
        slow = GaugeMetricFamily("elastic_slow_rank_ratio", text, labels=("rank", "host", "kind"))
        for rank in document.slow:
            slow.add_metric((str(rank.rank), rank.host, rank.kind), rank.ratio)
        yield slow
        for name, key, text in _COUNTERS:
            yield CounterMetricFamily(
                f"elastic_{name}", text, value=getattr(document.counters, key)
            )
        for name, event, text in _COUNTED:
            yield CounterMetricFamily(f"elastic_{name}", text, value=events.get(event, 0))
        text = "How often an agent was suspected to be lost."
        doubts = CounterMetricFamily("elastic_agent_suspicions", text, labels=("evidence",))
        for evidence in EVIDENCE:
            doubts.add_metric((evidence,), document.suspicions.get(evidence, 0))
        yield doubts
        yield from self._of_durations()
        family = CounterMetricFamily("elastic_events", "Logged events by name.", labels=("event",))
        for event, count in sorted(events.items()):
            family.add_metric((event,), count)
        yield family

    def _of_durations(self) -> Iterator[Metric]:
        for name, text, times in (
            ("step", "Committed steps, each once.", self._times.steps),
            ("round", "Rounds, from opened to complete.", self._times.rounds),
            ("recovery", "From the loss of a worker to the next step.", self._times.recoveries),
        ):
            yield _histogram(f"elastic_{name}_duration_seconds", text, {(): times})


def _histogram(
    name: str, text: str, times: Mapping[tuple[str, ...], Histogram], *labels: str
) -> Metric:
    """Return one histogram for each set of values of the labels."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, found in times.items():
        family.add_metric(values, found.cumulative(), found.sum)
    return family


def _by_label(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family
