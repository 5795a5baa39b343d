"""Events and decisions that several machines have in common.

A request comes to its machine as an event with a ticket; the machine decides a `Reply` with the
same ticket, at once or later. `runtime.machine_api` keeps the connections.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from elastic_driver.job.events import JobEvent
from elastic_driver.kernel.machine import CausedDecision

# Values of the store with their revisions, by key.
Entries: TypeAlias = dict[str, tuple[bytes, int]]


class RepeatableRequest(Struct, frozen=True, kw_only=True):
    """A request that may come again, perhaps to the next driver, if its answer was lost.

    `request` is its own name, made by the client; the repetition gets the answer of the first one.
    "": it has no name, and each time counts.
    """

    request: Annotated[str, Meta(max_length=64)] = ""


class Rejection(Struct, frozen=True):
    """The reply to a rejected request: a code for programs, the reason, and what to try."""

    code: str
    message: str
    hint: str = ""


class RequestDropped(Struct, frozen=True, tag="request_dropped"):
    """The client of this request has gone and reads no answer."""

    machine: str
    ticket: int


class ReadKeys(CausedDecision, frozen=True, tag="read_keys"):
    """Read keys of the store for this machine; `KeysRead` answers."""

    machine: str
    keys: tuple[str, ...]
    reason: str


class KeysRead(Struct, frozen=True, tag="keys_read"):
    """The entries under these keys; it is empty if there are none, or if the store was too busy.

    `seconds`: the time for this read, and for the machine to handle the answer before it.
    """

    machine: str
    keys: tuple[str, ...]
    entries: Entries
    seconds: float


class PublishKey(CausedDecision, frozen=True, tag="publish_key"):
    """Write a key of the store."""

    key: str
    value: bytes
    reason: str


class AdmitMembers(CausedDecision, frozen=True, tag="admit_members"):
    """Let these workers, and no others, write the keys of a round."""

    round: int
    members: tuple[str, ...]
    reason: str


class ShowLine(CausedDecision, frozen=True, tag="show_line"):
    """Show the user a line."""

    line: str
    reason: str


class SendEvent(CausedDecision, frozen=True, tag="send_event"):
    """Hand an event to another machine."""

    event: JobEvent
    reason: str
