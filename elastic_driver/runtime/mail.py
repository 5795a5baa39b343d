"""What can lie in the driver's mailbox: the core's events, and the shell's own messages.

Put there by the server, discovery, a starter's threads and whoever asks the job to stop; taken
out by the driver's mailbox thread alone, which turns most of the shell's messages into events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from elastic_driver.core.events import AgentLost, Event


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """The store has dropped a lease."""

    key: str


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """The starter says that an agent's process is gone, or never was."""

    event: AgentLost


@dataclass(frozen=True, slots=True)
class StatusAsked:
    """Somebody wants to see the job; `reply` takes the JSON document and does not block."""

    reply: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Hurry:
    """Asked to stop once more: no more grace for anyone."""


Message: TypeAlias = Event | LeaseExpired | AgentEnded | StatusAsked | Hurry
