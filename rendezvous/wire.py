"""The typed messages and paths of the rendezvous protocol.

One request carries a batch of operations, one reply carries their results in the same
order. Everything is bounded here, so that a decoded message is a safe message. This module
knows keys, values, revisions and leases, and nothing of ranks or training.

Bytes travel as base64 in JSON (msgspec's encoding). Times are seconds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

MAX_KEY_CHARS = 512
MAX_VALUE_BYTES = 16 * 1024 * 1024
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_OPERATIONS = 4096
MAX_KEYS = 65536
MAX_WAIT_S = 60.0  # a longer wait is a client's loop of waits, so a dead client is forgotten soon

KV_PREFIX = "/v1/kv"
BATCH_PATH = "/v1/kv:batch"
EVENTS_PATH = "/v1/events"
HEALTH_PATH = "/healthz"

REVISION_HEADER = "X-Revision"

Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_CHARS)]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]
RequestId = Annotated[str, Meta(min_length=1, max_length=64)]


class Set(Struct, frozen=True, tag="set", forbid_unknown_fields=True):
    """Write a value; with `lease` (seconds) the key is a lease that expires unless renewed."""

    key: Key
    value: Value = b""
    lease: Annotated[float, Meta(gt=0.0, le=86400.0)] | None = None


class Get(Struct, frozen=True, tag="get", forbid_unknown_fields=True):
    """Read keys; with `wait`, first wait until every one of them has a revision above `after`."""

    keys: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=MAX_KEYS)]
    wait: Seconds = 0.0
    after: Annotated[int, Meta(ge=0)] = 0


class Watch(Struct, frozen=True, tag="watch", forbid_unknown_fields=True):
    """Wait until any of these keys has a revision above the one named beside it (0: exists)."""

    keys: Annotated[dict[Key, int], Meta(min_length=1, max_length=MAX_OPERATIONS)]
    wait: Seconds = 0.0


class Add(Struct, frozen=True, tag="add", forbid_unknown_fields=True):
    """Add to a decimal counter (missing: 0) and return the sum."""

    key: Key
    amount: int


class Append(Struct, frozen=True, tag="append", forbid_unknown_fields=True):
    """Append bytes to a value (missing: empty)."""

    key: Key
    value: Value


class CompareSet(Struct, frozen=True, tag="compare_set", forbid_unknown_fields=True):
    """Write `desired` if the value is `expected` (None: the key is missing); return what holds."""

    key: Key
    expected: Value | None
    desired: Value


class Delete(Struct, frozen=True, tag="delete", forbid_unknown_fields=True):
    """Delete one key; a waiter on it keeps waiting."""

    key: Key


class DeletePrefix(Struct, frozen=True, tag="delete_prefix", forbid_unknown_fields=True):
    """Delete every key below a prefix; `seal` also refuses every later write and wait there."""

    prefix: Key
    seal: bool = False


class Count(Struct, frozen=True, tag="count", forbid_unknown_fields=True):
    """How many keys live below a prefix."""

    prefix: Annotated[str, Meta(max_length=MAX_KEY_CHARS)] = ""


Operation = Set | Get | Watch | Add | Append | CompareSet | Delete | DeletePrefix | Count


class Entry(Struct, frozen=True):
    """A key's value and the store-wide revision of its last write."""

    value: bytes
    revision: int


class Entries(Struct, frozen=True, tag="entries"):
    """Answer to Get (in the order asked), Watch (the keys that changed): what was found.

    `timed_out` says that a wait ended before its condition held; `entries` then holds what
    was there at that moment.
    """

    entries: dict[str, Entry]
    timed_out: bool = False


class Number(Struct, frozen=True, tag="number"):
    """Answer to Add (the sum), Delete, DeletePrefix and Count (keys concerned)."""

    number: int


class Written(Struct, frozen=True, tag="written"):
    """Answer to Set and Append: the revision of the write."""

    revision: int


class Compared(Struct, frozen=True, tag="compared"):
    """Answer to CompareSet: whether it was written, and the value that holds now."""

    swapped: bool
    value: bytes | None


class Refused(Struct, frozen=True, tag="refused"):
    """An operation that was not carried out; nothing changed. `code` is stable, for programs."""

    code: str  # sealed | not_a_number | too_large
    message: str


Result = Entries | Number | Written | Compared | Refused


class Batch(Struct, frozen=True, forbid_unknown_fields=True):
    """Operations carried out in order, atomically up to the first one that has to wait.

    A repeat of the same `request_id` is answered with the first answer, so that a client
    may safely repeat a request whose answer it lost.
    """

    operations: Annotated[tuple[Operation, ...], Meta(min_length=1, max_length=MAX_OPERATIONS)]
    request_id: RequestId


class BatchReply(Struct, frozen=True):
    """One result for each operation, in order."""

    results: tuple[Result, ...]


class ErrorDetail(Struct, frozen=True):
    """What went wrong, for a program (`code`), a reader (`message`) and what to try (`hint`)."""

    code: str
    message: str
    hint: str = ""


class ErrorBody(Struct, frozen=True):
    """The body of every answer with status 4xx or 5xx."""

    error: ErrorDetail


encode = msgspec.json.Encoder().encode
decode_batch = msgspec.json.Decoder(Batch).decode
decode_reply = msgspec.json.Decoder(BatchReply).decode
decode_error = msgspec.json.Decoder(ErrorBody).decode
