"""A torch store over HTTP: the workers of one round find each other through it.

`torch.distributed.init_process_group(store=HTTPStore(...))` keeps its keys under a prefix of the
job's rendezvous; each round has its own prefix. If gloo reads many keys at once
(`GLOO_ENABLE_STORE_V2_API=1`), this takes one request. When the round is over, the driver seals the
prefix. From then on every write and every wait, pending ones included, raises SealedError: the
other members of the round do not come any more.

Torch's watchdog of a device's collectives tells the others of an error through the store, once for
each collective that is not done, and holds a lock meanwhile that training needs. The driver tells
the others of a loss; so these keys are not written (`_is_alarm`).

Any thread may call a store; torch does so from several threads. No other module of this package
imports torch.
"""

import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistStoreError, Store

from rendezvous import wire
from rendezvous.client import RendezvousClient
from rendezvous.errors import RefusedError

DEFAULT_TIMEOUT = timedelta(seconds=300)  # the default of torch's own stores
WAIT_S = 30.0  # for one request; a longer wait takes several, so that a dead client is noticed
_SHOWN_KEYS = 3
R = TypeVar("R")


class HTTPStore(Store):  # type: ignore[misc]  # torch is not followed by the type checker
    """A `torch.distributed.Store` under `prefix` of the rendezvous that `client` is connected to.

    The store takes the address and the token from `client`, and its connections while they rest;
    `close` ends its calls. `timeout` limits how long `get`, `wait` and
    `multi_get` wait for missing keys, and how long any call tries to reach the server.

    Calls raise the errors of `RendezvousClient`, SealedError when the round is over, AbortedError
    after `close`, and `torch.distributed.DistStoreError` when a wait times out.
    """

    def __init__(
        self, client: RendezvousClient, prefix: str, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        self._share(client.clone(borrows=True), prefix, timeout)
        weakref.finalize(self, self._client.abort)

    def _share(self, client: RendezvousClient, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        super().set_timeout(timeout)  # torch keeps it; `self.timeout` reads it
        self._client, self._prefix = client, prefix

    # ---- what torch calls ----------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value; an alarm of torch's watchdog is dropped."""
        if _is_alarm(key):
            return
        self._one(wire.Set(self._prefix + key, _bytes(value)), wire.Written)

    def get(self, key: str) -> bytes:
        """Wait for a key; return its value."""
        return self._wait_for((key,), self.timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all keys; return their values in the same order, with one request."""
        return self._wait_for(tuple(keys), self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until every key exists, at most `timeout` (default: the store's)."""
        self._wait_for(tuple(keys), self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether every key exists now; the alarms of torch's watchdog never do."""
        if any(_is_alarm(key) for key in keys):
            return False
        asked = tuple(dict.fromkeys(self._prefix + key for key in keys))
        return not asked or len(self._one(wire.Get(asked), wire.Entries).entries) == len(asked)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write many values with one request; no reader sees only some of them."""
        pairs = zip(keys, values, strict=True)
        sets = [wire.Set(self._prefix + key, _bytes(value)) for key, value in pairs]
        for start in range(0, len(sets), wire.MAX_OPERATIONS):
            for result in self._batch(*sets[start : start + wire.MAX_OPERATIONS]):
                wire.expect(result, wire.Written)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter (missing: 0); return the sum."""
        return self._one(wire.Add(self._prefix + key, amount), wire.Number).number

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value (missing: empty)."""
        self._one(wire.Append(self._prefix + key, _bytes(value)), wire.Written)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the key holds `expected`; return what it holds now.

        As in torch's stores, an empty `expected` also means a missing key, and `expected` is
        returned if the key is missing and something else was expected.
        """
        name, old, new = self._prefix + key, _bytes(expected), _bytes(desired)
        swaps: tuple[wire.Operation, ...] = (wire.CompareSet(name, old, new),)
        if not old:
            swaps = (wire.CompareSet(name, None, new), *swaps)
        held = [wire.expect(result, wire.Compared) for result in self._batch(*swaps)]
        swapped = next((one for one in held if one.swapped), held[-1])
        return old if swapped.value is None else swapped.value

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return self._one(wire.Delete(self._prefix + key), wire.Number).number > 0

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._one(wire.Count(self._prefix), wire.Number).number

    # PrefixStore calls these two by their C++ names, the others by their Python names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set exist, so gloo reads many keys at once."""
        return True

    def clone(self) -> "HTTPStore":
        """Return the same store for another thread; it ends together with this one."""
        twin = HTTPStore.__new__(HTTPStore)
        twin._share(self._client, self._prefix, self.timeout)
        return twin

    def close(self) -> None:
        """End the calls that block other threads, and every later one, with AbortedError."""
        self._client.abort()

    # ---- requests ------------------------------------------------------------------------

    def _wait_for(self, keys: tuple[str, ...], timeout: timedelta) -> list[bytes]:
        names = tuple(self._prefix + key for key in keys)
        if not names:
            return []
        until = time.monotonic() + timeout.total_seconds()
        while True:
            left = max(0.0, until - time.monotonic())
            try:
                found = self._one(wire.Get(names, wait=min(WAIT_S, left)), wire.Entries)
            except RefusedError as error:
                if error.code != "too_large" or len(keys) == 1:
                    raise
                parts, rest = (keys[: len(keys) // 2], keys[len(keys) // 2 :]), timedelta(0, left)
                return [value for part in parts for value in self._wait_for(part, rest)]
            if len(found.entries) == len(set(names)):
                return [found.entries[name].value for name in names]
            if time.monotonic() >= until:
                missing = [name for name in names if name not in found.entries]
                raise DistStoreError(
                    f"waited {timeout.total_seconds():g} s for {len(missing)} of {len(names)} "
                    f"keys ({', '.join(missing[:_SHOWN_KEYS])}, …); the members that should "
                    "write them are late or gone"
                )

    def _one(self, operation: wire.Operation, kind: type[R]) -> R:
        return wire.expect(self._batch(operation)[0], kind)

    def _batch(self, *operations: wire.Operation) -> tuple[wire.Result, ...]:
        longest = sum(o.wait for o in operations if isinstance(o, wire.Get))
        within = longest + max(self._client.timeout, self.timeout.total_seconds())
        return self._client.batch(*operations, deadline=within)


def _is_alarm(key: str) -> bool:
    """Return whether torch's watchdog writes this key to tell of an error."""
    name = key.rpartition("/")[2]  # a PrefixStore puts its own before it
    return name == "exception_dump" or name.partition(":")[0] == "remote_error"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
