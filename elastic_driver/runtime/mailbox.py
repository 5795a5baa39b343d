"""The driver's mailbox and its messages: the events of machines, and some of the driver's own.

The server, discovery, the backends' threads and signal handlers put messages in; the driver's
thread alone takes them out.
"""

import collections
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from elastic_driver.errors import TakenOverError
from elastic_driver.job.job import Job
from elastic_driver.kernel.machine import ForMachine
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.runtime.host_lists import Hosts
from rendezvous.wire import Entry


@dataclass(frozen=True, slots=True)
class JobBegins:
    """Begin the job, or go on with it: its machine takes part from now on."""

    job: Job
    run_id: str


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another driver goes on with the job: this one ends."""

    error: TakenOverError


@dataclass(frozen=True, slots=True)
class KeysChanged:
    """Keep these keys for the next driver; None: this one is gone.

    `kept` is called by any thread once the journal has them.
    """

    values: dict[str, bytes | None]
    kept: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class UsageRead:
    """Take in what the agents have written about their hosts, by key."""

    entries: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class CheckAsked:
    """Check hosts before the job; `answer` takes the report, or the error."""

    hosts: Hosts
    answer: Callable[[CheckReport | Exception], None]


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """Make the status document; `reply` takes it as JSON and does not block."""

    reply: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class StopNow:
    """End the job at once: its end was requested a second time."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """An event whose sender waits until the journal has it."""

    event: ForMachine
    acknowledge: Callable[[], None]  # to be called on the server's loop


Message: TypeAlias = (
    ForMachine | Delivered | StatusAsked | StopNow | TakenOver | JobBegins
    | KeysChanged | UsageRead | CheckAsked
)  # fmt: skip


M = TypeVar("M")


class Mailbox(Generic[M]):
    """A queue with one reader, which may take several messages of some kinds at once."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[M] = queue.SimpleQueue()
        self._next: M | None = None  # taken out of the queue, not handed out yet
        self._back: collections.deque[M] = collections.deque()  # put back by the reader
        self.put = self._queue.put  # for any thread, and for signal handlers

    def __len__(self) -> int:
        """Return about how many messages wait."""
        return self._queue.qsize() + (self._next is not None) + len(self._back)

    def put_back(self, messages: Sequence[M]) -> None:
        """Put messages back that came before all others; for the reader alone."""
        self._back.extendleft(reversed(messages))

    @property
    def has_old(self) -> bool:
        """Return whether messages wait that the reader has put back."""
        return bool(self._back)

    def get(self, timeout: float | None = None) -> M:
        """Return the next message; raises `queue.Empty` if there is none for so many seconds."""
        if self._back:
            return self._back.popleft()
        message, self._next = self._next, None
        return self._queue.get(timeout=timeout) if message is None else message

    def following(self, kinds: tuple[type, ...], most: int) -> list[Any]:
        """Return the next waiting messages, as long as they are, or deliver, these kinds."""
        found: list[Any] = []
        while self._back and len(found) < most and _is(self._back[0], kinds):
            found.append(self._back.popleft())
        while (
            not self._back and self._next is None and len(found) < most and not self._queue.empty()
        ):
            message = self._queue.get_nowait()  # it has no other reader
            if _is(message, kinds):
                found.append(message)
            else:
                self._next = message
        return found


def _is(message: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(message.event if isinstance(message, Delivered) else message, kinds)


DriverMailbox: TypeAlias = Mailbox[Message]
