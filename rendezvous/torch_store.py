"""A torch store over HTTP: how the workers of one round find each other.

`torch.distributed.init_process_group(store=HTTPStore(...))` keeps its keys under a prefix of
the job's rendezvous, one prefix a round. Where gloo asks for many keys at once
(`GLOO_ENABLE_STORE_V2_API=1`) that is one request. When the round is over its prefix is
sealed, and every write or wait here, those under way too, raises SealedError instead of waiting
for members that will never come.

torch calls a store from several threads; no two calls share a connection at the same time.
This is the only module of the package that imports torch.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistStoreError, Store

from rendezvous.calls import raise_refused
from rendezvous.client import RendezvousClient
from rendezvous.errors import AbortedError, RendezvousError
from rendezvous.wire import (
    MAX_OPERATIONS,
    Add,
    Append,
    Compared,
    CompareSet,
    Count,
    Delete,
    Entries,
    Get,
    Number,
    Operation,
    Refused,
    Result,
    Set,
    Written,
)

DEFAULT_TIMEOUT = timedelta(seconds=300)  # as torch's own stores
WAIT_S = 30.0  # a longer wait is asked for in pieces, so that the server soon forgets the dead
_SHOWN_KEYS = 3
R = TypeVar("R")


class HTTPStore(Store):  # type: ignore[misc]  # torch is not followed by the type checker
    """`torch.distributed.Store` under `prefix` of the rendezvous that `client` speaks to.

    `client` only names the server and the token: the store opens connections of its own, and
    whoever made it ends them with `close`. `timeout` is how long `get`, `wait` and `multi_get`
    wait for keys that are missing, and how long any call tries to reach the server.

    Raises, besides the errors of `RendezvousClient`: SealedError when the round is over,
    AbortedError after `abort`, `torch.distributed.DistStoreError` when a wait runs out.
    """

    def __init__(
        self, client: RendezvousClient, prefix: str, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        self._share(_Connections(client), prefix, timeout)
        weakref.finalize(self, self._connections.abort)

    def _share(self, connections: _Connections, prefix: str, timeout: timedelta) -> None:
        super().__init__()
        super().set_timeout(timeout)  # torch keeps it; `self.timeout` reads it
        self._connections, self._prefix = connections, prefix

    # ---- what torch calls ----------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._one(Set(self._prefix + key, _bytes(value)), Written)

    def get(self, key: str) -> bytes:
        """The value, once it is there."""
        return self._wait_for((key,), self.timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values in the order of the keys, once all are there: one request for all."""
        return self._wait_for(tuple(keys), self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once every key is there."""
        self._wait_for(tuple(keys), self.timeout if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether every key is there now."""
        asked = tuple(dict.fromkeys(self._prefix + key for key in keys))
        return not asked or len(self._one(Get(asked), Entries).entries) == len(asked)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write many values in one request; nobody sees only some of them."""
        sets = [
            Set(self._prefix + key, _bytes(value)) for key, value in zip(keys, values, strict=True)
        ]
        for start in range(0, len(sets), MAX_OPERATIONS):
            for result in self._batch(*sets[start : start + MAX_OPERATIONS]):
                _expect(result, Written)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter (missing: 0); the sum."""
        return self._one(Add(self._prefix + key, amount), Number).number

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value (missing: empty)."""
        self._one(Append(self._prefix + key, _bytes(value)), Written)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the key holds `expected`; what it holds now.

        As in torch's stores an empty `expected` also stands for a missing key, and `expected`
        is the answer where the key is missing and something else was expected.
        """
        name, old, new = self._prefix + key, _bytes(expected), _bytes(desired)
        swaps: tuple[Operation, ...] = (CompareSet(name, old, new),)
        if not old:
            swaps = (CompareSet(name, None, new), *swaps)
        held = [_expect(result, Compared) for result in self._batch(*swaps)]
        swapped = next((one for one in held if one.swapped), held[-1])
        return old if swapped.value is None else swapped.value

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return self._one(Delete(self._prefix + key), Number).number > 0

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._one(Count(self._prefix), Number).number

    # PrefixStore calls these two by their C++ names, the rest by their Python ones.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def has_extended_api(self) -> bool:
        """Yes: append, multi_get and multi_set are here, so gloo asks for many keys at once."""
        return True

    def clone(self) -> HTTPStore:
        """The same store for another thread; it ends together with this one."""
        twin = HTTPStore.__new__(HTTPStore)
        twin._share(self._connections, self._prefix, self.timeout)
        return twin

    # ---- for the worker ------------------------------------------------------------------

    def abort(self) -> None:
        """End the calls other threads are blocked in, and every later one, with AbortedError."""
        self._connections.abort()

    def close(self) -> None:
        """Free the connections; the store is of no use from now on. May be called again."""
        self._connections.abort()

    @property
    def requests(self) -> int:
        """HTTP requests sent so far, for measurements."""
        return self._connections.requests

    # ---- carrying it out -----------------------------------------------------------------

    def _wait_for(self, keys: tuple[str, ...], timeout: timedelta) -> list[bytes]:
        names = tuple(self._prefix + key for key in keys)
        if not names:
            return []
        until = time.monotonic() + timeout.total_seconds()
        while True:
            left = max(0.0, until - time.monotonic())
            found = self._one(Get(names, wait=min(WAIT_S, left)), Entries)
            if len(found.entries) == len(set(names)):
                return [found.entries[name].value for name in names]
            if time.monotonic() >= until:
                missing = [name for name in names if name not in found.entries]
                raise DistStoreError(
                    f"waited {timeout.total_seconds():g} s for {len(missing)} of {len(names)} "
                    f"keys ({', '.join(missing[:_SHOWN_KEYS])}, …); the members that should "
                    "write them are late or gone"
                )

    def _one(self, operation: Operation, kind: type[R]) -> R:
        (result,) = self._batch(operation)
        return _expect(result, kind)

    def _batch(self, *operations: Operation) -> tuple[Result, ...]:
        longest = sum(o.wait for o in operations if isinstance(o, Get))
        with self._connections.client() as client:
            within = longest + max(client.timeout, self.timeout.total_seconds())
            return client.batch(*operations, deadline=within)


class _Connections:
    """Clients for as many threads as call at the same time; one that comes free is used again."""

    def __init__(self, client: RendezvousClient) -> None:
        self._model = client
        self._lock = threading.Lock()
        self._idle: list[RendezvousClient] = []
        self._all: list[RendezvousClient] = []
        self._aborted = False

    @property
    def requests(self) -> int:
        with self._lock:
            return sum(client.requests for client in self._all)

    @contextlib.contextmanager
    def client(self) -> Iterator[RendezvousClient]:
        """A client nobody else uses meanwhile."""
        with self._lock:
            if self._aborted:
                raise AbortedError("this torch store was closed; make a new one for the next round")
            if self._idle:
                client = self._idle.pop()
            else:
                client = self._model.clone()
                self._all.append(client)
        try:
            yield client
        finally:
            with self._lock:
                self._idle.append(client)
                if self._aborted:
                    client.close()

    def abort(self) -> None:
        """Interrupt the busy clients (their threads close them) and close the idle ones."""
        with self._lock:
            self._aborted = True
            for client in self._all:
                client.abort()
            for client in self._idle:
                client.close()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _expect(result: Result, kind: type[R]) -> R:
    if isinstance(result, Refused):
        raise_refused(result)
    if not isinstance(result, kind):
        raise RendezvousError(f"the rendezvous answered {result!r}, not {kind.__name__}")
    return result
