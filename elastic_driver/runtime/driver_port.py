"""The driver, as its HTTP routes use it."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from elastic_driver.job.events import JobEvent
from elastic_driver.kernel.machine import ForMachine
from elastic_driver.words.progress import History
from elastic_driver.words.wire_events import StateDescribed


class OfWorker(ForMachine, Protocol):
    """An event of a feature that a worker sends (`machines.REPORTED`)."""

    @property
    def worker(self) -> str:
        """The worker that sends it."""


# An event that a client sends.
Request: TypeAlias = JobEvent | StateDescribed | OfWorker


class DriverPort(Protocol):
    """The driver as routes see it; every method may be called by any thread."""

    @property
    def size_bounds(self) -> tuple[int, int | None]:
        """The fewest and (None: no limit) the most workers the job may have."""

    def post(self, event: ForMachine) -> bool:
        """Put an event into the mailbox; False when it is full or the job is over."""

    def deliver(self, event: Request, acknowledge: Callable[[], None]) -> bool:
        """Do the same, and have `acknowledge` handed to `EventRoutes.acknowledge`.

        That is done once the journal has the event, so that no driver forgets it any more.
        """

    def request_stop(self, reason: str, exit_code: int) -> None:
        """Ask for the job's end; a second call ends it at once."""

    def ask_status(self, reply: Callable[[bytes], None]) -> None:
        """Have `reply` called soon with the status document, in another thread."""

    def history(self, since: float) -> History:
        """Return how the job has trained since then (unix seconds), in the last hour."""
