"""The HTTP client of a driver, for workers, agents, `elasticctl` and tests.

A call is repeated under the same request id until its deadline, whenever the connection breaks
or the server says that it is stopping; every other answer is final. Any number of threads may
call at once: each call has a connection of its own, which later calls use again. Code on an
asyncio loop calls through `asyncio.to_thread` and ends pending calls with `abort`. After a fork
the child opens connections of its own. A client never uses a proxy, and does not resolve a
numeric address. Times are seconds.

The driver may be replaced by one at another address. A client learns it from a file, which it reads
again after each attempt that failed and while it waits for an answer, or is told (`move`).
"""

import contextlib
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from ssl import SSLSocket
from typing import TypeVar

from rendezvous import errors, wire
from rendezvous.auth import AUTHORIZATION, bearer
from rendezvous.client_connections import ClientConnections, arm, readable

DEFAULT_TIMEOUT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
BUSY_GROWTH, AWAY_GROWTH = 2.0, 1.25  # of the longest pause, from one attempt to the next
_CHUNK_BYTES = 1024 * 1024
_RANDOM = random.SystemRandom()  # the generator of `random` is the script's: it may be seeded
# Worth a repeat: the server is over a limit or stopping, and then a successor may take over.
_AGAIN = (429, 503)
_STREAM, _DATA = "text/event-stream", b"data: "  # a stream of server-sent events; one event
# Method, path, body and headers.
_Request = tuple[str, str, bytes | None, dict[str, str]]
R = TypeVar("R")


class RendezvousClient(contextlib.AbstractContextManager["RendezvousClient"]):
    """Connections to one driver.

    `timeout` is the time for a call, without the waits that it contains; with `repeats=False` a
    call is tried once. `url_file` holds the address of a driver that took over, once there is one.
    `fingerprint` tells how the server's certificate is known (`rendezvous.tls`); with one, the
    client speaks TLS only, also to `http:` on loopback, and sends nothing before it has seen that
    certificate. `max_answer` is for a server that is not trusted: an answer of more bytes counts
    as none. `lender`: see `clone`. Raises ValueError for an address that is none, TokenError for
    one that does not go with the fingerprint.
    Every call may raise UnreachableError (no answer before the deadline),
    UnauthorizedError (wrong token), RequestError (the server refuses the request), AbortedError
    (after `abort`), and the errors in its own description.
    """

    def __init__(
        self,
        url: str,
        token: str,
        timeout: float = DEFAULT_TIMEOUT_S,
        *,
        repeats: bool = True,
        url_file: Path | None = None,
        fingerprint: str = "",
        max_answer: int | None = None,
        lender: "RendezvousClient | None" = None,
    ) -> None:
        lending: ClientConnections | None = None if lender is None else lender._connections
        self._connections: ClientConnections = ClientConnections(
            url, fingerprint, url_file, lending
        )
        self.timeout = timeout
        self.requests = 0  # attempts sent so far, for measurements
        self.silent_since: float | None = None  # monotonic; None: the last attempt was answered
        self._token, self._repeats = token, repeats
        self._max_answer = max_answer
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers[AUTHORIZATION] = bearer(token)

    @property
    def url(self) -> str:
        """The address of the driver in use."""
        return self._connections.url

    @property
    def token(self) -> str:
        """The token that it sends."""
        return self._token

    def clone(self, timeout: float | None = None, *, borrows: bool = False) -> "RendezvousClient":
        """Return another client of the same server, with its own connections and `abort`.

        With `borrows` it uses connections of this one while they rest, and gives them back after
        each call.
        """
        seconds = self.timeout if timeout is None else timeout
        return RendezvousClient(
            self.url,
            self._token,
            seconds,
            repeats=self._repeats,
            url_file=self._connections.url_file,
            fingerprint="" if (known := self._connections.identity) is None else known.known,
            lender=self if borrows else None,
        )

    @property
    def peer_fingerprint(self) -> str:
        """The fingerprint of the certificate that the server has shown; "": none."""
        identity = self._connections.identity
        return "" if identity is None else identity.seen

    # ---- the store -----------------------------------------------------------------------

    def batch(
        self, *operations: wire.Operation, deadline: float | None = None, wake: int | None = None
    ) -> tuple[wire.Result, ...]:
        """Carry out operations in order; return one result for each, refusals included.

        `deadline` is the time for the answer to arrive, repeats included (default: the waits in
        the batch plus the client's timeout). `wake` is a file descriptor: if it becomes readable
        before the answer, WokenError is raised.
        """
        waits = sum(o.wait for o in operations if isinstance(o, wire.Get | wire.Watch))
        body = wire.encode(wire.KVBatch(operations, new_request_id()))
        expected = self.timeout + waits
        answer = self._call("POST", wire.BATCH_PATH, body, deadline, expected=expected, wake=wake)
        try:
            return wire.decode_reply(answer).results
        except wire.UNREADABLE as error:
            raise errors.RendezvousError(f"{self.url} answered with no reply: {error}") from error

    def one(self, operation: wire.Operation, kind: type[R]) -> R:
        """Carry out one operation; return its result, of this kind.

        Raises RefusedError or SealedError if the store refuses it.
        """
        return wire.expect(self.batch(operation)[0], kind)

    def set(self, key: str, value: bytes, lease: float | None = None) -> int:
        """Write a value, with a lease of `lease` seconds if given; return its revision."""
        return self.one(wire.Set(key, value, lease), wire.Written).revision

    def get(self, key: str, wait: float = 0.0, after: int = 0) -> wire.Entry | None:
        """Read a key, waiting at most `wait` seconds until its revision is above `after`.

        Returns None if the key is missing or has nothing newer when the wait is over.
        """
        found = self.one(wire.Get((key,), min(wait, wire.MAX_WAIT_S), after), wire.Entries)
        return None if found.timed_out else found.entries.get(key)

    # ---- other routes of the driver ------------------------------------------------------

    def get_bytes(self, path: str, deadline: float | None = None) -> bytes:
        """GET a path; return the answer's body."""
        return self._call("GET", path, None, deadline)

    def post_json(
        self,
        path: str,
        body: bytes | Callable[[], bytes],
        deadline: float | None = None,
        wake: int | None = None,
    ) -> bytes:
        """POST an encoded JSON document; return the answer's body; `wake` as in `batch`.

        Repeats carry the same X-Request-Id, and the server carries out an id once. A `body` that
        tells of the present moment is a function, called for each attempt.
        """
        return self._call("POST", path, body, deadline, wake=wake)

    def put_json(self, path: str, body: bytes, deadline: float | None = None) -> None:
        """PUT an encoded JSON document; a repeat does no harm."""
        self._call("PUT", path, body, deadline)

    def follow(self, path: str, silence: float) -> Iterator[bytes]:
        """Yield the data of the server-sent events at a path until the server ends the stream.

        Raises UnreachableError after `silence` seconds without a byte. Nothing is repeated.
        """
        started = time.monotonic()
        try:
            with self._connections.for_call() as connection:
                self._connections.connect(connection, started + self.timeout)
                connection.sock.settimeout(silence)
                connection.request("GET", path, headers={**self._headers, "Accept": _STREAM})
                response = connection.getresponse()
                if response.status >= 400:
                    self._checked(response.status, response.read())
                rest = b""
                while piece := response.read1(_CHUNK_BYTES):  # a broken stream is an error here
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if line.startswith(_DATA):
                            yield line[len(_DATA) :].rstrip(b"\r")
                connection.close()
        except (OSError, HTTPException) as error:
            raise errors.UnreachableError(self.url, time.monotonic() - started, error) from error

    # ---- life ----------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections that no call is using; a later call opens new ones."""
        self._connections.close()

    def abort(self) -> None:
        """End the calls that block other threads, and every later one, with AbortedError."""
        self._connections.abort()

    def move(self, url: str) -> None:
        """Use the driver at this address from now on, also for the calls that are pending.

        Raises ValueError if it is no address, or one of plain HTTP beyond this machine where TLS
        is spoken, or the other way round.
        """
        self._connections.move(url)

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one call ------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | Callable[[], bytes] | None,
        deadline: float | None,
        *,
        expected: float | None = None,
        wake: int | None = None,
    ) -> bytes:
        """Return the answer's body; repeat until `deadline` seconds are over.

        `expected` is how long one attempt may take (default: the client's timeout).
        """
        started = time.monotonic()
        expected = self.timeout if expected is None else expected
        until = started + (expected if deadline is None else deadline)
        headers = {**self._headers, wire.REQUEST_ID_HEADER: new_request_id()}
        longest, refused = 0.0, None
        told: Exception | None = None  # the last problem other than too little time
        while True:
            reused, attempt_at = False, time.monotonic()
            try:
                with self._connections.for_call() as connection:
                    reused = connection.sock is not None
                    attempt_until = min(until, time.monotonic() + expected)
                    made = body() if callable(body) else body
                    request = method, path, made, headers
                    status, answer = self._attempt(connection, request, attempt_until, wake)
                    if status in _AGAIN and self._repeats:
                        raise _TryAgainError(status, answer)
                self.silent_since = None
                return self._checked(status, answer)
            except (OSError, HTTPException) as error:
                problem = error
            if isinstance(problem, _TryAgainError):
                refused = problem
            elif not isinstance(problem, TimeoutError):  # of an attempt that had too little time
                refused, told = None, problem
            if self.silent_since is None:
                self.silent_since = time.monotonic()
            self._connections.read_url_file()
            # The server may just have closed an idle connection: no need to pause.
            longest = longest if reused else longest_pause(longest, is_busy=refused is not None)
            pause = 0.0 if reused else longest * _RANDOM.uniform(0.5, 1.0)
            if time.monotonic() + pause >= until or not (self._repeats or reused):
                self._connections.check_not_aborted()
                if refused is not None and not refused.is_stopping:
                    return self._checked(refused.status, refused.body)
                if attempt_at - started < (until - started) / 2:  # it had time enough
                    told = problem
                raise errors.UnreachableError(self.url, time.monotonic() - started, told or problem)
            self._pause(pause, wake)

    def _pause(self, seconds: float, wake: int | None) -> None:
        """Wait before the next attempt; less if the driver moves, or `abort` is called.

        Raises WokenError if `wake` is readable before.
        """
        until, before, hurry = time.monotonic() + seconds, self.url, False
        while (left := until - time.monotonic()) > 0 and self.url == before and not hurry:
            slice_s = min(left, self._connections.slice_s)
            if wake is None:
                hurry = self._connections.hurry.wait(slice_s)
            elif readable(slice_s, wake):
                raise errors.WokenError(f"woken while {self.url} did not answer")
            self._connections.read_url_file()

    def _attempt(
        self, connection: HTTPConnection, request: _Request, until: float, wake: int | None
    ) -> tuple[int, bytes]:
        """Send the request once; return the answer's status and body.

        Raises WokenError if `wake` is readable before the answer.
        """
        if connection.sock is None:
            self._connections.connect(connection, until)
        arm(connection, until)
        self.requests += 1
        connection.request(*request)
        if wake is not None or self._connections.url_file is not None:
            self._await_answer(connection.sock, until, wake)
        response = connection.getresponse()

        def read_chunk() -> bytes:
            arm(connection, until)
            return response.read(_CHUNK_BYTES)

        if (most := self._max_answer) is not None:
            arm(connection, until)
            answer = response.read(most + 1)
            if len(answer) > most:
                raise HTTPException(f"the answer has more than {most} bytes")
            return response.status, answer
        return response.status, b"".join(iter(read_chunk, b""))

    def _await_answer(self, source: socket.socket, until: float, wake: int | None) -> None:
        """Wait until the connection `source` is readable, or `until`.

        Meanwhile look at the file: a host without power closes no connection, so the request would
        wait for an answer of the earlier driver. Raises TimeoutError when the time is over, and
        WokenError if `wake` is readable before.
        """
        answer = source.fileno()
        if isinstance(source, SSLSocket) and source.pending():  # TLS has read it already
            return
        descriptors = (answer,) if wake is None else (answer, wake)
        while (left := until - time.monotonic()) > 0:
            ready = readable(min(left, self._connections.slice_s), *descriptors)
            if answer in ready:
                return
            if ready:
                raise errors.WokenError(f"woken before {self.url} answered")
            self._connections.read_url_file()  # ends this connection if it has another address
        raise TimeoutError("timed out")

    # ---- errors --------------------------------------------------------------------------

    def _checked(self, status: int, body: bytes) -> bytes:
        """Return the body of a success; raise the error that another status means."""
        if status < 400:
            return body
        try:
            detail = wire.decode_error(body).error
        except wire.UNREADABLE:
            hint = "does elasticrun listen there?"
            detail = wire.ErrorDetail("http_error", f"status {status}", hint)
        if status == 401:
            raise errors.UnauthorizedError(
                f"the rendezvous at {self.url} refused our token: {detail.message}; it may serve "
                "another job now, see that the token file is this job's"
            )
        raise errors.RequestError(self.url, status, detail.code, detail.message, detail.hint)


class _TryAgainError(ConnectionError):
    """The server asks for the same request a little later."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__("the server is stopping")
        self.status, self.body = status, body
        self.is_stopping = b'"stopping"' in body


def new_request_id() -> str:
    """Return an id that no other request has."""
    return secrets.token_hex(12)


def longest_pause(before: float, *, is_busy: bool) -> float:
    """Return the longest time until the next attempt, in seconds; `before`: the one before it.

    It doubles while the server is there and busy. While nobody answers it grows slowly, so that a
    driver that comes back is found within about a quarter of its absence; in both cases up to a
    second. A pause is half of that or more, at random: clients of a driver that comes back do
    not arrive together.
    """
    growth = BUSY_GROWTH if is_busy else AWAY_GROWTH
    return min(max(FIRST_PAUSE_S, growth * before), LONGEST_PAUSE_S)
