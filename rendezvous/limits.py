"""The bounds of one rendezvous server: what they are, what counts them, what a batch may cost.

`Limits` has the bounds, and `Hits` counts how often each was hit. Every default fits a job of
10,000 members. docs/security.md says why each bound exists. `StoreSpace` is the room that keys take
in the store: in all, those of users, and those of each client. A key belongs to the client that has
written it last; keys of the driver belong to nobody. `Budget` is what one batch may cost, return
and wait for. A refusal names the bound, and the batch goes on with its next operation.

Pure. Times are seconds. Sizes are bytes, with `KEY_BYTES` for each key besides its text and value.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable

from msgspec import Struct
from msgspec.structs import replace

from rendezvous import wire


class Limits(Struct, frozen=True, kw_only=True):
    """The bounds of one server; `Hits` counts under the names given here in brackets."""

    # connections
    reserve: int | None = None  # descriptors kept for the driver; None: see `reserve_of` [files]
    unproven: int = 1024  # connections without an authorized request so far [unproven]
    unproven_s: float = 5.0  # until the first authorized request [unproven_time]
    of_one_caller: int = 256  # connections of one client [caller]
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


Owner = Hashable  # None: the driver, for which no bounds hold
# ---- the room that keys take -------------------------------------------------------------

_NOTHING = (0, 0)


class StoreSpace:
    """The bytes and keys in a store.

    Keys that begin with one of `system` are the job's own; all others are users'. `is_of_crowd`
    tells the owners that leave an eighth of all to the others.
    """

    def __init__(
        self,
        system: tuple[str, ...] = (),
        is_of_crowd: Callable[[Owner], bool] = lambda _owner: False,
    ) -> None:
        self._system, self._is_of_crowd = system, is_of_crowd
        self.bytes = self.keys = 0
        self._users_bytes = self._users_keys = 0
        self._owners: dict[str, Owner] = {}
        self._held: dict[Owner, tuple[int, int]] = {}  # bytes and keys

    def refuse(
        self, key: str, before: int | None, after: int, owner: Owner, limits: Limits
    ) -> tuple[str, str, str] | None:
        """Return the bound that a write is over, a code and a sentence; None: there is room.

        `before`, `after`: the bytes of the key's value; `before` is None for a new key.
        """
        size = len(key) + after + KEY_BYTES
        new, more = (1, size) if before is None else (0, after - before)
        is_own = self._owners.get(key) == owner
        if more <= 0 and is_own:
            return None
        if owner is not None:
            held, keys = self._held.get(owner, _NOTHING)
            added, added_keys = (more, new) if is_own else (size, 1)
            if held + added > limits.caller_bytes or keys + added_keys > limits.caller_keys:
                return "share", "share_full", "this client has its share of the store; delete keys"
        if more <= 0:
            return None
        most_bytes, most_keys = self._open_to(owner, limits.store_bytes, limits.store_keys)
        if self.bytes + more > most_bytes or self.keys + new > most_keys:
            return "store", "store_full", "the store is full; delete keys, or write smaller values"
        if not key.startswith(self._system):
            held, keys = self._users_bytes, self._users_keys
            most_bytes, most_keys = self._open_to(owner, limits.users_bytes, limits.users_keys)
            if held + more > most_bytes or keys + new > most_keys:
                return "users", "store_full", "users' keys have taken all their room; delete some"
        return None

    def _open_to(self, owner: Owner, size: int, keys: int) -> tuple[int, int]:
        """Return how many of these bytes and keys may be taken before an owner gets no more."""
        if self._is_of_crowd(owner):
            return size - size // 8, keys - keys // 8
        return size, keys

    def put(self, key: str, before: int | None, after: int, owner: Owner) -> None:
        """Record a write; see `refuse`."""
        size, former = len(key) + after + KEY_BYTES, self._owners.get(key)
        new, more = (1, size) if before is None else (0, after - before)
        if not more and former == owner:
            return
        self._add(key, more, new)
        if former is not None:
            self._charge(former, more - size, -1)
        if owner is not None:
            self._owners[key] = owner
            self._charge(owner, size, 1)
        elif former is not None:
            del self._owners[key]

    def drop(self, key: str, value: int) -> None:
        """Record that a key is gone whose value had so many bytes."""
        size = len(key) + value + KEY_BYTES
        self._add(key, -size, -1)
        if (former := self._owners.pop(key, None)) is not None:
            self._charge(former, -size, -1)

    def seal(self, prefix: str, owner: Owner) -> None:
        """Record a sealed prefix, which is kept for ever, as a key without a value would be."""
        size = len(prefix) + KEY_BYTES
        self._add(prefix, size, 0)
        if owner is not None:
            self._charge(owner, size, 1)

    def _add(self, key: str, size: int, keys: int) -> None:
        self.bytes += size
        self.keys += keys
        if not key.startswith(self._system):
            self._users_bytes += size
            self._users_keys += keys

    def _charge(self, owner: Owner, size: int, keys: int) -> None:
        held, count = self._held.get(owner, _NOTHING)
        if count + keys:
            self._held[owner] = held + size, count + keys
        else:
            self._held.pop(owner, None)


# Costs, in looks at a key (see `Limits.batch_cost`). Other operations cost next to nothing.
READ_COST, DELETE_COST, TOLD_COST = 4, 10, 2  # for each key, and for each batch that is told
BYTES_PER_LOOK = 128  # of a value that is copied
_SMALL = (wire.Written, wire.Number)


class Budget:
    """The cost, size and waits of one batch so far; `owner`: the client that has sent it."""

    __slots__ = ("_cost", "_hits", "_size", "_waits", "limits", "owner")

    def __init__(self, limits: Limits, hits: Hits, owner: Owner = None) -> None:
        self.limits, self._hits, self.owner = limits, hits, owner
        self._cost = self._size = self._waits = 0

    def over(self) -> wire.StoreRefusal | None:
        """Return a refusal once the operations so far have cost too much."""
        if self._cost <= self.limits.batch_cost:
            return None
        problem = "the operations of this batch take too long together; send fewer in a batch"
        return self.refuse("batch_cost", "too_large", problem)

    def spend(self, cost: int) -> None:
        """Charge for so many looks at a key."""
        self._cost += cost

    def wait(self, waited: int, own: int, keys: int) -> wire.StoreRefusal | None:
        """Charge for a wait for `keys` keys.

        `waited`: keys that all batches wait for already; `own`: of them, those of this client.
        """
        if self._waits >= self.limits.batch_waits:
            problem = f"a batch may wait {self._waits} times; send the rest in another one"
            return self.refuse("batch_waits", "too_large", problem)
        if keys > self.limits.wait_keys:
            problem = f"{keys} keys are too many for one wait; wait for fewer at a time"
            return self.refuse("batch_waits", "too_large", problem)
        if waited + keys > self.limits.waited_keys:
            problem = f"clients wait for {waited} keys already; try again in a moment"
            return self.refuse("waits", "busy", problem)
        if own + keys > self.limits.caller_waits and self.owner is not None:
            problem = f"this client waits for {own} keys already; wait for fewer at a time"
            return self.refuse("share", "busy", problem)
        self._waits += 1
        return None

    def fit(self, result: wire.Result) -> wire.Result:
        """Return the result, or a refusal if the batch returns too much with it."""
        if isinstance(result, _SMALL):
            return result
        size = wire.size_of(result)
        if self._size + size > self.limits.reply_bytes and size > wire.RESULT_BYTES:
            most = self.limits.reply_bytes / 1024**2
            problem = f"the results of this batch are over {most:g} MiB; ask for less at once"
            return self.refuse("reply", "too_large", problem)
        self._size += size
        return result

    def refuse(self, bound: str, code: str, problem: str) -> wire.StoreRefusal:
        """Return a refusal, and count that this bound was hit."""
        self._hits.count(bound)
        return wire.StoreRefusal(code, problem)
