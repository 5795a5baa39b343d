"""The driver's mailbox and its messages: the machines' events, and some of the driver's own.

The server, discovery, the backends' threads and signal handlers put messages in; the driver's
thread alone takes them out.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from elastic_driver.core.events import Event
from elastic_driver.core.job import Job
from elastic_driver.policies.messages import KeysRead, RequestDropped
from elastic_driver.policies.nodecheck.messages import TaskEnded
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.policies.shards.messages import ShardRequest, WorkerEnded
from elastic_driver.policies.stragglers.machine import RoundPublished
from elastic_driver.policies.tf.messages import TfRequest
from elastic_driver.runtime.host_lists import Hosts


@dataclass(frozen=True, slots=True)
class LeaseLapsed:
    """The store has dropped a lease."""

    key: str


@dataclass(frozen=True, slots=True)
class JobBegins:
    """The job is to begin: its machine takes part from now on."""

    job: Job


@dataclass(frozen=True, slots=True)
class CheckAsked:
    """Hosts are to be checked before the job; `answer` takes the report, or why there is none."""

    hosts: Hosts
    answer: Callable[[CheckReport | Exception], None]


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """Somebody wants to see the job; `reply` takes the JSON document and does not block."""

    reply: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class StopNow:
    """Somebody has asked for the job's end a second time: no more grace for anyone."""


PolicyEvent: TypeAlias = (
    ShardRequest | WorkerEnded | TfRequest | RequestDropped | KeysRead | RoundPublished | TaskEnded
)
"""Events that name their machine: each has a `machine`."""
MachineEvent: TypeAlias = Event | PolicyEvent
Message: TypeAlias = MachineEvent | LeaseLapsed | StatusAsked | StopNow | JobBegins | CheckAsked
M = TypeVar("M")


class Mailbox:
    """A queue with one reader, who may also take what follows as long as it is of some kind."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._next: Message | None = None  # taken out of the queue, not handed out yet

    def __len__(self) -> int:
        """About how many messages wait."""
        return self._queue.qsize() + (self._next is not None)

    def put(self, message: Message) -> None:
        """Add a message; for any thread, and for signal handlers."""
        self._queue.put(message)

    def get(self, timeout: float | None = None) -> Message:
        """The next message; raises `queue.Empty` when there is none for so many seconds."""
        message, self._next = self._next, None
        return self._queue.get(timeout=timeout) if message is None else message

    def following(self, kinds: tuple[type[M], ...], most: int) -> list[M]:
        """The messages that come next and are there already, while they are of these kinds."""
        found: list[M] = []
        while self._next is None and len(found) < most:
            try:
                message = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(message, kinds):
                found.append(message)
            else:
                self._next = message
        return found
