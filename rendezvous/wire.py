"""The messages and paths of the rendezvous protocol.

A request carries a batch of operations, and its reply their results in the same order. All
sizes are bounded here, so that a decoded message is safe to use. This module knows keys, values,
revisions and leases, and nothing about ranks or training.

In JSON, bytes are base64 (msgspec's encoding). Times are seconds.
"""

from functools import cached_property
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from rendezvous.errors import RefusedError, RendezvousError, SealedError

MAX_KEY_CHARS = 512
MAX_VALUE_BYTES = 16 * 1024 * 1024
MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_OPERATIONS = 4096
MAX_KEYS = 65536
MAX_WAIT_S = 60.0  # a client repeats a longer wait, so that the server notices a dead client
MAX_LEASE_S = 86400.0
RESULT_BYTES = 256  # assumed size of a result without its values
_ENTRY_BYTES = 128  # assumed size of an entry without its value

KV_PREFIX = "/v1/kv"
BATCH_PATH = "/v1/kv:batch"
HEALTH_PATH = "/healthz"

REVISION_HEADER = "X-Revision"
REQUEST_ID_HEADER = "X-Request-Id"

Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_CHARS)]
Value = Annotated[bytes, Meta(max_length=MAX_VALUE_BYTES)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_WAIT_S)]
R = TypeVar("R")
# What may be raised where bytes of another process are decoded: msgspec's errors are ValueErrors,
# and text that is no UTF-8 is one; a RecursionError comes of deep nesting.
UNREADABLE = (ValueError, RecursionError)


class Set(Struct, frozen=True, tag="set", forbid_unknown_fields=True):
    """Write a value; with `lease` (seconds) the key is a lease that expires unless renewed."""

    key: Key
    value: Value = b""
    lease: Annotated[float, Meta(gt=0.0, le=MAX_LEASE_S)] | None = None


class Get(Struct, frozen=True, tag="get", forbid_unknown_fields=True):
    """Read keys; with `wait`, first wait until all of them have a revision above `after`."""

    keys: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=MAX_KEYS)]
    wait: Seconds = 0.0
    after: Annotated[int, Meta(ge=0)] = 0


class Watch(Struct, frozen=True, tag="watch", forbid_unknown_fields=True):
    """Wait until one of the keys has a revision above the one given for it (0: it exists)."""

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
    """Write `desired` if the key holds `expected` (None: is missing); return what it holds now."""

    key: Key
    expected: Value | None
    desired: Value


class Delete(Struct, frozen=True, tag="delete", forbid_unknown_fields=True):
    """Delete one key; batches that wait for it keep waiting."""

    key: Key


class DeletePrefix(Struct, frozen=True, tag="delete_prefix", forbid_unknown_fields=True):
    """Delete every key below a prefix; `seal` also refuses every later write and wait there."""

    prefix: Key
    seal: bool = False


class Count(Struct, frozen=True, tag="count", forbid_unknown_fields=True):
    """Count the keys below a prefix."""

    prefix: Annotated[str, Meta(max_length=MAX_KEY_CHARS)] = ""


Operation = Set | Get | Watch | Add | Append | CompareSet | Delete | DeletePrefix | Count


class Entry(Struct, frozen=True):
    """The value of a key, and the store-wide revision of its last write."""

    value: bytes
    revision: int


class Entries(Struct, frozen=True, tag="entries", dict=True):
    """Answer to Get (in the order asked) and Watch (the keys that changed).

    If `timed_out`, a wait ended before its condition held, and `entries` is what was there then.
    """

    entries: dict[str, Entry]
    timed_out: bool = False

    @cached_property
    def size(self) -> int:
        """About how many bytes the entries have, without the text of the keys."""
        size = _ENTRY_BYTES * len(self.entries)
        for entry in self.entries.values():
            size += len(entry.value)
        return size

    @cached_property
    def reply(self) -> bytes:
        """A reply with this result alone; the store gives many clients the same object."""
        return encode(BatchReply((self,)))


class Number(Struct, frozen=True, tag="number"):
    """Answer to Add (the sum), Delete, DeletePrefix and Count (the number of keys)."""

    number: int


class Written(Struct, frozen=True, tag="written"):
    """Answer to Set and Append: the revision of the write."""

    revision: int


class Compared(Struct, frozen=True, tag="compared"):
    """Answer to CompareSet: whether it was written, and the value that the key holds now."""

    swapped: bool
    value: bytes | None


class StoreRefusal(Struct, frozen=True, tag="refused"):
    """Answer to an operation that was refused; nothing changed. `code` is for programs."""

    code: str  # sealed | not_a_number | too_large | store_full | busy
    message: str


Result = Entries | Number | Written | Compared | StoreRefusal


_LARGE_KINDS = (Entries, Compared)


def size_of(result: Result) -> int:
    """Return about how many bytes a result has, in memory and, a third more, in a reply."""
    match result:
        case Entries():
            return RESULT_BYTES + result.size
        case Compared(value=value):
            return RESULT_BYTES + len(value or b"")
        case StoreRefusal(message=message):
            return RESULT_BYTES + len(message)
        case _:
            return RESULT_BYTES


class KVBatch(Struct, frozen=True, forbid_unknown_fields=True):
    """Operations that are carried out in order, without interruption until one has to wait.

    A repeat with the same `request_id` gets the first answer, so that a client may repeat a
    request whose answer it lost.
    """

    operations: Annotated[tuple[Operation, ...], Meta(min_length=1, max_length=MAX_OPERATIONS)]
    request_id: Annotated[str, Meta(min_length=1, max_length=64)]

    @property
    def write_id(self) -> str:
        """The request id; empty if the batch changes nothing, so that it may be repeated."""
        reads_only = all(isinstance(o, Get | Watch | Count) for o in self.operations)
        return "" if reads_only else self.request_id


class BatchReply(Struct, frozen=True):
    """One result for each operation, in order."""

    results: tuple[Result, ...]


class ErrorDetail(Struct, frozen=True):
    """An error: `code` for programs, `message` for people, `hint` for what to try."""

    code: str
    message: str
    hint: str = ""


class ErrorBody(Struct, frozen=True):
    """Body of every answer with status 4xx or 5xx."""

    error: ErrorDetail


encode = msgspec.json.Encoder().encode
decode_batch = msgspec.json.Decoder(KVBatch).decode
decode_reply = msgspec.json.Decoder(BatchReply).decode
decode_error = msgspec.json.Decoder(ErrorBody).decode


def is_large(results: tuple[Result, ...], size: int) -> bool:
    """Return whether results have more than `size` bytes together."""
    return sum(size_of(r) for r in results if isinstance(r, _LARGE_KINDS)) > size


def encode_reply(results: tuple[Result, ...]) -> bytes:
    """Return `BatchReply(results)` as JSON; clients that get the same `Entries` share its bytes."""
    if len(results) == 1 and isinstance(results[0], Entries):
        return results[0].reply
    return encode(BatchReply(results))


def expect(result: Result, kind: type[R]) -> R:
    """Return a result of this kind; raise RefusedError or SealedError if it is a refusal."""
    if isinstance(result, StoreRefusal):
        error = SealedError if result.code == "sealed" else RefusedError
        raise error(result.code, result.message)
    if not isinstance(result, kind):
        raise RendezvousError(f"the rendezvous answered {result!r}, not {kind.__name__}")
    return result
