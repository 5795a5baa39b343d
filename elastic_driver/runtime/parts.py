"""What features do in the driver's process: in its thread, and beside the job.

The chapter `driver` of a feature may have `part(setup, began) -> DriverPart`, which each driver
calls once (`setup`: `resources.DriverSetup`; `began`: unix seconds). The chapter `companion` has
`begin(run: Run) -> Companion | None`, which is called when the job has begun; nothing of the job
waits for a companion before its end. Times are seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_driver.brain.store.records import Prior
from elastic_driver.job.job import Job
from elastic_driver.kernel.kernel import Handler, Kernel
from elastic_driver.kernel.machine import ForMachine
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.mailbox import RunClock
from elastic_driver.runtime.watch import Watch
from elastic_driver.words.progress import History, Measured
from rendezvous.wire import Entry


class DriverThread(Protocol):
    """The driver's thread, as its parts use it."""

    job: Job | None  # None: not begun yet
    clock: RunClock
    kernel: Kernel
    watch: Watch

    def call(self, act: Callable[[], object]) -> None:
        """Have `act` called soon in the driver's thread; any thread may ask for that."""

    def post(self, event: ForMachine) -> None:
        """Put an event into the mailbox; any thread may do so."""

    def read(self, keys: tuple[str, ...], found: Callable[[dict[str, Entry]], None]) -> None:
        """Read keys of the store; `found` gets what there is, in the server's thread."""

    def journal_states(self) -> None:
        """Write the machines' states down: one has begun that is journalled."""

    def tell_measured(self, document: Callable[[], Measured]) -> Callable[[], None]:
        """Tell all parts of a new measurement.

        Returns what then tells the machines: how long they think counts for nobody.
        """

    def tell_prior(self, prior: Prior) -> None:
        """Tell all parts what similar jobs have measured; any thread may do so."""


class DriverPart:
    """What a feature does in the driver's thread, which calls all methods. These do nothing."""

    def attach(self, thread: DriverThread) -> None:
        """Take the thread; this comes first."""

    def handlers(self) -> Mapping[type[Any], Handler]:
        """Return what carries out decisions of the feature's machines, or instead of others."""
        return {}

    def job_begins(self, job: Job) -> None:
        """Take part in a job that begins, or goes on."""

    @property
    def due(self) -> float | None:
        """When `look` is to be called; None: not yet."""
        return None

    def look(self, now: float) -> None:
        """Do what is due."""

    def measured(self, _document: Callable[[], Measured]) -> list[ForMachine]:
        """Return what follows from a measurement for machines that run."""
        return []

    def prior(self, _prior: Prior) -> list[ForMachine]:
        """Return what follows from measurements of similar jobs; any thread may call this."""
        return []

    def before_job(self) -> dict[str, Any]:
        """Return what the status shows before the job."""
        return {}

    def status(self) -> dict[str, Any]:
        """Return what the status of the job shows."""
        return {}

    def close(self, exit_code: int | None) -> None:
        """End: the job is over, or another driver goes on with it (None)."""


class Measuring(DriverPart):
    """The part that measures the job; this one measures nothing. Any thread may call `history`."""

    @property
    def job(self) -> Measured:
        """The job as a whole, without workers and hosts; any thread may ask."""
        return Measured()

    def history(self, _since: float) -> History:
        """Return how the job has trained since then (unix seconds), in the last hour."""
        return History()

    def idle_memory(self) -> tuple[tuple[str, int], ...]:
        """Return the hosts whose idle memory is known, with it in bytes."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, as its companions know it."""

    run_id: str
    began: float  # unix seconds
    environ: Mapping[str, str]  # the variables of `elasticrun`
    log: EventLog
    say: Callable[[str], None]  # shows a line to the user; any thread may call it


class Companion(Protocol):
    """Something that runs beside the job."""

    @property
    def busy(self) -> bool:
        """Return whether it still does something."""

    def close(self) -> None:
        """End it, within seconds: the job is over."""
