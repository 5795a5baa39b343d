"""The bounds of one rendezvous server, and the count of how often each was hit.

The store, the service and the server read the bounds and count the hits; nothing here acts. Every
default fits a job of 10,000 members. docs/security.md says why each bound exists. Times are
seconds.
"""

import re
from collections import Counter

from msgspec import Struct
from msgspec.structs import replace

from rendezvous import wire


class Limits(Struct, frozen=True, kw_only=True):
    """The bounds of one server; `Hits` counts under the names given here in brackets."""

    # connections
    reserve: int | None = None  # descriptors kept for the driver; None: see `reserve_of` [files]
    unproven: int = 1024  # connections without an authorized request so far [unproven]
    unproven_s: float = 5.0  # until the first authorized request [unproven_time]
    of_one_caller: int = 256  # connections of one agent or worker [caller]
    head_s: float = 10.0  # for a head to arrive, from its first byte [request_time]
    body_s: float = 60.0  # for a whole request to arrive [request_time]
    stuck_s: float = 60.0  # for a client to take the next piece of an answer [answer_time]
    hellos: int = 4096  # of joining nodes, that wait for their proof [no_proof]
    hellos_of_peer: int = 256  # of them, of one address [no_proof]
    hello_s: float = 5.0  # between a hello and its proof [no_proof]

    # memory
    store_bytes: int = 1024**3  # of keys and values, with KEY_BYTES for each key [store]
    store_keys: int = 262_144  # [store]
    users_bytes: int = 512 * 1024**2  # of keys that are users' [users]
    users_keys: int = 131_072  # [users]
    caller_bytes: int = 256 * 1024**2  # of keys that one client has written last [share]
    caller_keys: int = 65_536  # [share]
    caller_waits: int = 1024**2  # keys that one client waits for [share]
    waited_keys: int = 4 * 1024**2  # over all batches that wait [waits]
    reply_bytes: int = wire.MAX_VALUE_BYTES + 1024**2  # in the results of one batch [reply]
    arriving_bytes: int = 256 * 1024**2  # in all requests that have not arrived whole [arriving]
    leaving_bytes: int = 1024**3  # in all answers that clients have not taken yet [leaving]

    # time of the server's loop
    batch_waits: int = 16  # waits in one batch [batch_waits]
    wait_keys: int = 16_384  # that one batch waits for at a time [batch_waits]
    seal_lengths: int = 16  # of prefixes that clients have sealed [seals]
    batch_cost: int = 100_000  # of one batch, in looks at a key, about 50 ns each [batch_cost]


_NUMBER = re.compile(r"[0-9]{1,15}")
_DURATION = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


def read_limits(*words: str) -> Limits:
    """Return the defaults with other bounds, each written NAME=N, by the names of the fields.

    Raises ValueError with a phrase that completes "--limit …".
    """
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in Limits.__struct_fields__:
            raise ValueError(f"knows {', '.join(Limits.__struct_fields__)}; got {name!r}")
        in_seconds = name.endswith("_s")
        if not (_DURATION if in_seconds else _NUMBER).fullmatch(value) or float(value) <= 0:
            kind = "a number of seconds" if in_seconds else "a whole number"
            raise ValueError(f"needs {name}=N with {kind} above 0, got {word!r}")
        found[name] = float(value) if in_seconds else int(value)
    return replace(Limits(), **found)


KEY_BYTES = 256  # what a key costs in memory, besides its text and value
UNLIMITED = Limits(
    store_bytes=2**63,
    store_keys=2**63,
    users_bytes=2**63,
    users_keys=2**63,
    waited_keys=2**63,
    reply_bytes=2**63,
    batch_waits=2**63,
    wait_keys=2**63,
    seal_lengths=2**63,
    batch_cost=2**63,
)  # for the driver's own operations on the store
NAMES = (
    *("files", "unproven", "unproven_time", "caller", "request_time", "answer_time", "no_proof"),
    *("store", "users", "share", "waits", "reply", "arriving", "leaving"),
    *("batch_waits", "seals", "batch_cost"),
)


class Hits:
    """Counts of how often each bound was hit; written by the server's thread, read by any."""

    def __init__(self) -> None:
        self._counts = Counter(dict.fromkeys(NAMES, 0))

    def count(self, name: str) -> None:
        """Record that the bound with this name (see `NAMES`) was hit once more."""
        self._counts[name] += 1

    def snapshot(self) -> dict[str, int]:
        """Return the counts by name."""
        return dict(self._counts)


def reserve_of(files: int, limits: Limits) -> int:
    """Return how many of the process's `files` descriptors clients leave to the driver.

    A quarter, at most 4,096: hosts that are reached through ssh take several each.
    """
    return min(files // 4, 4096) if limits.reserve is None else limits.reserve
