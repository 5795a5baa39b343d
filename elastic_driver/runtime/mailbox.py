"""The driver's thread: its mailbox and messages, its clock, and the garbage collector it pauses.

Messages are the events of machines, and some of the driver's own. The server, discovery, the
backends' threads and signal handlers put messages in; the driver's thread alone takes them out.

Times are monotonic seconds that stand still while no driver lives. A driver that goes on with a run
counts from the time of the last event in the journal. So no deadline passes between two drivers,
whatever has happened to the clock of the host: a reboot, or another host.

Python's collector looks at all objects again and again while many are made at once. In a job of
10,000 members that is half of the time of a snapshot.
"""

import collections
import contextlib
import gc
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from elastic_driver.errors import TakenOverError
from elastic_driver.job.job import Job
from elastic_driver.kernel.machine import ForMachine


class RunClock:
    """The clock of one driver; calling it returns the machines' time in seconds."""

    def __init__(self, resumed_at: float | None = None) -> None:
        """Begin at the host's monotonic time, or go on at the time of an earlier driver's end."""
        self._base = 0.0 if resumed_at is None else time.monotonic() - resumed_at

    def __call__(self) -> float:
        """Return the time of the machines."""
        return time.monotonic() - self._base

    @property
    def unix_offset(self) -> float:
        """Return unix seconds minus the time of the machines, at this moment."""
        return time.time() - self()


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cyclic garbage in the context, in all threads."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
class Called:
    """Call this in the driver's thread."""

    act: Callable[[], object]


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
    | KeysChanged | Called
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
