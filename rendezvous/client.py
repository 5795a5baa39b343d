"""The blocking client of the rendezvous, for workers, tools and tests.

One client belongs to one thread at a time; only `abort` may come from another. It keeps one
connection open, repeats a call under the same request id when the connection breaks, and gives
up at the call's deadline. It survives a fork: the child opens a connection of its own.
Never resolves names where the address is a number, and never uses a proxy.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import threading
import time
from types import TracebackType
from typing import Any, TypeVar

from rendezvous.auth import AUTHORIZATION, bearer
from rendezvous.calls import (
    DEFAULT_TIMEOUT_S,
    REQUEST_ID_HEADER,
    STOPPING,
    delays,
    new_request_id,
    parse_url,
    put_batch,
    raise_for,
    raise_refused,
    read_results,
    time_for,
    unreachable,
)
from rendezvous.errors import AbortedError, RendezvousError, WokenError
from rendezvous.wire import (
    BATCH_PATH,
    MAX_WAIT_S,
    Add,
    Append,
    Compared,
    CompareSet,
    Delete,
    DeletePrefix,
    Entries,
    Entry,
    Get,
    Number,
    Operation,
    Refused,
    Result,
    Set,
    Watch,
    Written,
)

CONNECT_S = 3.0  # for one attempt to connect; abort() cannot cut that short
_CHUNK = 1024 * 1024
R = TypeVar("R")


class RendezvousClient:
    """A kept-alive connection to one rendezvous server.

    `timeout`: seconds a call may take beyond the waits in it. Every call raises, besides what
    its own description says: UnreachableError when the deadline passes without an answer,
    UnauthorizedError for a wrong token, RequestError when the server finds fault with the
    request, AbortedError after `abort`.
    """

    def __init__(self, url: str, token: str, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        parts = parse_url(url)
        self.url, self.timeout = url.rstrip("/"), timeout
        self.requests = 0  # attempts sent so far, for measurements
        self._host, self._port = str(parts.hostname), int(parts.port or 0)
        self._token = token
        self._connection: http.client.HTTPConnection | None = None
        self._pid = os.getpid()
        self._aborted = threading.Event()
        self._lock = threading.Lock()  # guards the step from "not aborted" to "has a socket"

    def clone(self, timeout: float | None = None) -> RendezvousClient:
        """Another client of the same server, for another thread; with a `timeout` of its own."""
        return RendezvousClient(self.url, self._token, self.timeout if timeout is None else timeout)

    # ---- the store -----------------------------------------------------------------------

    def batch(
        self, *operations: Operation, deadline: float | None = None, wake: int | None = None
    ) -> tuple[Result, ...]:
        """Carry out operations in order; one result for each, `Refused` among them.

        `deadline`: seconds from now in which the answer must be here, repeats included
        (default: the waits in the batch plus the client's timeout). `wake`: a descriptor; when it
        becomes readable before there is an answer, WokenError is raised.
        """
        expected = time_for(operations, self.timeout)
        body = put_batch(operations)
        within = expected if deadline is None else deadline
        return read_results(self._call("POST", BATCH_PATH, body, within, expected, wake=wake))

    def set(self, key: str, value: bytes, lease: float | None = None) -> int:
        """Write a value, with `lease` (seconds) as a lease; return its revision."""
        return self._one(Set(key, value, lease), Written).revision

    def get(self, key: str, wait: float = 0.0, after: int = 0) -> Entry | None:
        """Read a key; with `wait`, until its revision is above `after`, for so many seconds.

        None where the key is missing, or has nothing newer when the wait is over.
        """
        found = self._one(Get((key,), min(wait, MAX_WAIT_S), after), Entries)
        return None if found.timed_out else found.entries.get(key)

    def watch(self, keys: dict[str, int], wait: float) -> dict[str, Entry]:
        """Wait until one of the keys passes the revision beside it; the keys that have.

        Empty when `wait` seconds (at most MAX_WAIT_S) are over.
        """
        found = self._one(Watch(keys, min(wait, MAX_WAIT_S)), Entries)
        return {} if found.timed_out else found.entries

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return the sum."""
        return self._one(Add(key, amount), Number).number

    def append(self, key: str, value: bytes) -> int:
        """Append to a value; return the revision."""
        return self._one(Append(key, value), Written).revision

    def compare_set(self, key: str, expected: bytes | None, desired: bytes) -> Compared:
        """Write `desired` if the key holds `expected` (None: is missing)."""
        return self._one(CompareSet(key, expected, desired), Compared)

    def delete(self, key: str) -> bool:
        """Delete a key; whether it was there."""
        return self._one(Delete(key), Number).number > 0

    def delete_prefix(self, prefix: str, seal: bool = False) -> int:
        """Delete every key below a prefix, with `seal` for good; return how many there were."""
        return self._one(DeletePrefix(prefix, seal), Number).number

    def _one(self, operation: Operation, kind: type[R]) -> R:
        (result,) = self.batch(operation)
        if isinstance(result, Refused):
            raise_refused(result)
        if not isinstance(result, kind):
            raise RendezvousError(f"the rendezvous at {self.url} answered {result!r}")
        return result

    # ---- other rooms' routes -------------------------------------------------------------

    def post_json(self, path: str, body: bytes, deadline: float | None = None) -> bytes:
        """POST a JSON document (as bytes); return the answer's body.

        Repeats carry the same X-Request-Id, and the server answers an id once.
        """
        within = self.timeout if deadline is None else deadline
        return self._call("POST", path, body, within, self.timeout)

    def get_json(self, path: str, deadline: float | None = None) -> Any:
        """GET a path; return the decoded JSON document."""
        within = self.timeout if deadline is None else deadline
        return json.loads(self._call("GET", path, None, within, self.timeout))

    def put_json(self, path: str, body: bytes, deadline: float | None = None) -> None:
        """PUT a JSON document (as bytes); repeats are harmless, a PUT being what it is."""
        within = self.timeout if deadline is None else deadline
        self._call("PUT", path, body, within, self.timeout)

    # ---- life ----------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connection; a later call opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """End the call that blocks another thread, and every later one, with AbortedError."""
        self._aborted.set()
        with self._lock:
            sock = self._connection.sock if self._connection is not None else None
            if sock is not None and self._pid == os.getpid():
                with contextlib.suppress(OSError):  # it is closed already
                    sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- one call ------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        within: float,
        expected: float,
        *,
        wake: int | None = None,
    ) -> bytes:
        """The answer's body; repeats until `within` seconds are over.

        `expected`: seconds after which an attempt without an answer is given up and repeated.
        """
        started = time.monotonic()
        until = started + within
        headers = {AUTHORIZATION: bearer(self._token), "Content-Type": "application/json"}
        if method == "POST":
            headers[REQUEST_ID_HEADER] = new_request_id()
        pause = delays()
        while True:
            self._check_usable()
            reused = self._connection is not None
            try:
                attempt_until = min(until, time.monotonic() + expected)
                status, data = self._attempt(method, path, body, headers, attempt_until, wake=wake)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                cause: object = error or type(error).__name__
            else:
                if status != STOPPING:
                    raise_for(status, data, self.url)
                    return data
                self.close()
                cause, reused = "the server is stopping", False
            now = time.monotonic()
            # A kept connection may simply have been closed meanwhile: no need to pause.
            delay = 0.0 if reused else next(pause)
            if now + delay >= until:
                self._check_usable()
                raise unreachable(self.url, now - started, cause)
            self._pause(delay, wake)

    def _pause(self, seconds: float, wake: int | None) -> None:
        if wake is None:
            self._aborted.wait(seconds)
        elif wake in _readable(seconds, wake):
            raise WokenError(f"woken while {self.url} did not answer")

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            # A fork: the connection belongs to the parent. Closing our copy of its descriptor
            # does not end it; the lock may have been held by a thread that is not here.
            self._pid = os.getpid()
            self._lock = threading.Lock()
            self.close()
        if self._aborted.is_set():
            raise AbortedError(f"the call to {self.url} was aborted by another thread")

    def _attempt(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        until: float,
        *,
        wake: int | None,
    ) -> tuple[int, bytes]:
        connection = self._connection or self._connect(until)
        self.requests += 1
        _arm(connection, until)
        connection.request(method, path, body, headers)
        if wake is not None:
            self._await_answer(connection, until, wake)
        response = connection.getresponse()
        chunks = []
        while True:
            _arm(connection, until)
            chunk = response.read(_CHUNK)
            if not chunk:
                break
            chunks.append(chunk)
        if response.will_close:
            self.close()
        return response.status, b"".join(chunks)

    def _await_answer(
        self, connection: http.client.HTTPConnection, until: float, wake: int
    ) -> None:
        """Wait for an answer's first byte, or for `wake`; the answer comes first."""
        if connection.sock is None:
            return
        answer = connection.sock.fileno()
        ready = _readable(until - time.monotonic(), answer, wake)
        if wake in ready and answer not in ready:
            self.close()
            raise WokenError(f"woken before {self.url} answered")

    def _connect(self, until: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port)
        connection.timeout = min(CONNECT_S, max(0.001, until - time.monotonic()))
        connection.connect()
        with self._lock:  # from here on, abort() finds the socket
            self._connection = connection
        self._check_usable()
        return connection


def _readable(seconds: float, *descriptors: int) -> list[int]:
    """Those of the descriptors that can be read, or have ended, within so many seconds."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]


def _arm(connection: http.client.HTTPConnection, until: float) -> None:
    """Let the next socket operation end at `until`."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    if connection.sock is not None:
        connection.sock.settimeout(left)
