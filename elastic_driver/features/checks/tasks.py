"""The tasks of one round of a node check: their processes, and their common start.

Pure. Times are monotonic seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic_driver.features.checks.evidence import Group, Measurement, failed
from elastic_driver.features.checks.messages import TaskResult
from elastic_driver.kernel.tables import saved

PATIENCE_S = 10.0  # for the last processes of a round to come up, once more than half are up


@dataclass(init=False, slots=True)
class StartingGate:
    """Opens when every process of the round has arrived or ended, or patience is over.

    Importing torch keeps a processor busy for seconds. If hosts share a machine, the first process
    would measure how the others start. So all processes wait for each other, but not for ever: one
    that hangs or is very slow must not make the others run out of time.
    """

    _awaited: set[str] = saved(factory=set, name="awaited")
    _half: float = saved(0.0, name="half")
    # It opens at this time even if processes are missing; None while too few are up.
    opens_at: float | None = saved(None)

    def __init__(self, workers: Iterable[str]) -> None:
        self._awaited = set(workers)
        self._half = len(self._awaited) / 2
        self.opens_at = None

    def passed(self, worker: str, now: float) -> None:
        """Record that a process is up or has ended: the others wait for it no longer."""
        self._awaited.discard(worker)
        if self.opens_at is None and len(self._awaited) < self._half:
            self.opens_at = now + PATIENCE_S

    def is_open(self, now: float) -> bool:
        """Return True if the processes that are up may begin."""
        return not self._awaited or (self.opens_at is not None and now >= self.opens_at)


@dataclass(slots=True)
class Process:
    """One process in one task."""

    worker: str
    host: str
    slot: int
    task: int  # the number of its task
    done: int = 0  # tasks before this one
    result: TaskResult | None = None
    failure: str = ""
    ended: bool = False  # True once this task or the process has ended


@dataclass(slots=True)
class GroupTask:
    """The task of one group in one round."""

    number: int
    group: Group
    processes: list[Process] = field(default_factory=list)

    def measurement(self, host: str) -> Measurement:
        """Return a host's measurement: it is as slow as its slowest process, and fails with any."""
        own = [process for process in self.processes if process.host == host]
        failure = next((process.failure for process in own if process.failure), "")
        results = [process.result for process in own if process.result is not None]
        if failure or not results:
            return failed(host, failure or "it was not started")
        return Measurement(
            host,
            max(r.compute for r in results),
            max(r.network for r in results),
            bandwidth=min((r.bandwidth for r in results if r.bandwidth is not None), default=None),
            latency=max((r.latency for r in results if r.latency is not None), default=None),
            linked=all(r.linked for r in results),
        )
