"""The connections of a client to its driver, which may move to another address.

Each call has a connection of its own, which later calls use again as long as it leads to the driver
in use. Any number of threads may call at once. After a fork the child opens connections of its own.
Times are seconds.
"""

import contextlib
import errno
import ipaddress
import math
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from ssl import SSLError, SSLSocket, SSLWantReadError, SSLWantWriteError
from typing import Any
from urllib.parse import SplitResult, urlsplit

from rendezvous import errors
from rendezvous.tls import ServerIdentity

CONNECT_S = 3.0  # for one address to accept a connection
MOST_RESTING = 8  # connections that borrowers have given back
MOST_OWING = 4  # connections on which an answer is still to come that nobody waits for
_LATE_ANSWER_S = 0.05  # to read such an answer once it has begun to arrive
URL_FILE_POLL_S = 0.1  # between two looks at the file with the address, while a call waits


class ClientConnections:
    """Connections to the driver at `url`; the arguments are those of `RendezvousClient`.

    With a `lender` they are its own that rest, before new ones are made, and go back to it after
    each call: a handshake takes longer than a request.
    """

    def __init__(
        self,
        url: str,
        fingerprint: str,
        url_file: Path | None,
        lender: "ClientConnections | None" = None,
    ) -> None:
        parts = parse_url(url)
        self._lender = lender
        if lender is None:
            self.identity = _identity(url, parts, fingerprint)
        else:
            self.identity = lender.identity
        self.url, self.url_file = url.rstrip("/"), url_file
        self._host, self._port = str(parts.hostname), int(parts.port or 0)
        self._lock = threading.Lock()  # guards the next three
        self.idle: list[HTTPConnection] = []
        self.owing: list[HTTPConnection] = []  # the oldest first
        self.busy: set[HTTPConnection] = set()
        self._aborted = threading.Event()
        self.hurry = threading.Event()  # set for a moment: pauses between attempts end
        self._pid = os.getpid()
        self.read_url_file()

    @property
    def slice_s(self) -> float:
        """The longest time that a call waits without a look at the file."""
        return math.inf if self.url_file is None else URL_FILE_POLL_S

    def check_not_aborted(self) -> None:
        """Raise AbortedError after `abort`."""
        if self._aborted.is_set():
            raise errors.AbortedError(f"the client of {self.url} was closed; make a new one")

    def close(self) -> None:
        """Close the connections that no call is using; a later call opens new ones."""
        with self._lock:
            for connection in (*self.idle, *self.owing):
                connection.close()
            self.idle, self.owing = [], []

    def lend(self, host: str, port: int) -> HTTPConnection | None:
        """Return a connection to this driver that no call is using; None: there is none."""
        if self._pid != os.getpid():
            return None
        with self._lock:
            connection = self.idle.pop() if self.idle else None
        if connection is not None and (connection.host, connection.port) != (host, port):
            self.take_back(connection)
            return None
        return connection

    def take_back(self, connection: HTTPConnection) -> None:
        """Keep a connection that rests for a later call."""
        ours = self._pid == os.getpid() and self._leads_here(connection)
        if not ours:
            connection.close()
            return
        with self._lock:
            if len(self.idle) >= MOST_RESTING or self._aborted.is_set():
                connection.close()
            else:
                self.idle.append(connection)

    def abort(self) -> None:
        """End the calls that block other threads, and every later one, with AbortedError."""
        self._aborted.set()
        self._break_connections()

    def move(self, url: str) -> None:
        """Use the driver at this address from now on, also for the calls that are pending.

        Raises ValueError if it is no address, or one of plain HTTP beyond this machine where TLS
        is spoken, or the other way round.
        """
        parts = parse_url(url)
        if not _fits(parts, tls=self.identity is not None):
            raise ValueError(f"{url!r} is not {self.url.partition(':')[0]}")
        with self._lock:
            if url.rstrip("/") == self.url:
                return
            self.url = url.rstrip("/")
            self._host, self._port = str(parts.hostname), int(parts.port or 0)
        self._break_connections()

    def _break_connections(self) -> None:
        """Break every connection and end every pause: pending calls go on with their next attempt.

        After `abort` there is none.
        """
        if self._pid != os.getpid():  # the sockets are shared with the parent, who needs them
            return
        self.close()
        with self._lock:
            for connection in self.busy:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # it is closed already
                        # Not that of an SSLSocket: what it sends next would be in clear.
                        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
        self.hurry.set()
        if not self._aborted.is_set():
            self.hurry.clear()

    def read_url_file(self) -> None:
        """Move to the address in the file, if there is one and it is another one."""
        if self.url_file is not None:
            with contextlib.suppress(OSError, ValueError):
                self.move(self.url_file.read_text(encoding="ascii").strip())

    @contextlib.contextmanager
    def for_call(self) -> Iterator[HTTPConnection]:
        """Give a connection for one call, perhaps a connected one; close it if the call fails.

        A call that was woken owes an answer: its connection is used again once that has come, as a
        handshake takes longer than most requests.
        """
        if self._pid != os.getpid():
            # A fork: the connections belong to the parent, and closing our copies of their
            # descriptors does not end them. The lock may be held by a thread that is not here.
            self._pid, self._lock = os.getpid(), threading.Lock()
            for connection in (*self.idle, *self.owing, *self.busy):
                connection.close()
            self.idle, self.owing, self.busy = [], [], set()
        with self._lock:
            self.check_not_aborted()
            idle = self.idle.pop() if self.idle else None
            if idle is None and self._lender is not None:
                idle = self._lender.lend(self._host, self._port)
            late = self._answered_late() if idle is None else None
            connection = idle or late or HTTPConnection(self._host, self._port)
            self.busy.add(connection)
        owes = False
        try:
            if late is not None:
                _read_late_answer(late)
            yield connection
        except errors.WokenError:
            owes = True
            raise
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                self.busy.discard(connection)
                self._keep(connection, owes=owes)

    def _keep(self, connection: HTTPConnection, *, owes: bool) -> None:
        """Keep the connection of a call that is over for another one, or close it."""
        if self._aborted.is_set() or connection.sock is None or not self._leads_here(connection):
            connection.close()
        elif owes:
            self.owing.append(connection)
            if len(self.owing) > MOST_OWING:
                self.owing.pop(0).close()
        elif self._lender is None:
            self.idle.append(connection)
        else:
            self._lender.take_back(connection)

    def _answered_late(self) -> HTTPConnection | None:
        """Return a connection whose answer has come after its call was woken, if there is one."""
        sockets = {one.sock.fileno(): one for one in self.owing}
        for descriptor in readable(0.0, *sockets):
            self.owing.remove(sockets[descriptor])
            return sockets[descriptor]
        return None

    def _leads_here(self, connection: HTTPConnection) -> bool:
        """Return whether a connection leads to the driver in use, and not to an earlier one."""
        return (connection.host, connection.port) == (self._host, self._port)

    def connect(self, connection: HTTPConnection, until: float) -> None:
        """Connect as `http.client` does; meanwhile `abort` finds the socket and can end it."""
        problem = OSError(f"{connection.host} has no address")
        found = socket.getaddrinfo(connection.host, connection.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            connection.close()
            connection.sock = socket.socket(family, kind, protocol)
            try:
                self._reach(connection, address, min(until, time.monotonic() + CONNECT_S))
            except OSError as error:
                problem = error
            else:
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._meet(connection, until)
                return
        connection.close()
        raise problem

    def _reach(self, connection: HTTPConnection, address: Any, until: float) -> None:
        """Connect to one address; meanwhile look at the file, as a dead machine refuses nothing."""
        sock: socket.socket = connection.sock
        sock.setblocking(False)
        problem = sock.connect_ex(address)
        while problem == errno.EINPROGRESS and self._leads_here(connection):
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            if _ready(min(left, self.slice_s), select.POLLOUT, sock.fileno()):
                problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                break
            self.read_url_file()
        if problem not in (0, errno.EINPROGRESS):
            raise OSError(problem, os.strerror(problem))

    def _meet(self, connection: HTTPConnection, until: float) -> None:
        """Make sure that a new connection leads to the driver in use, before it gets any byte."""
        tls = None
        if self.identity is not None:
            tls = connection.sock = self.identity.wrap(connection.sock)
        self.check_not_aborted()
        if not self._leads_here(connection):
            raise ConnectionError("the driver has moved")
        if self.identity is not None and tls is not None:
            self._shake_hands(self.identity, tls, connection, until)

    def _shake_hands(
        self, identity: ServerIdentity, tls: SSLSocket, connection: HTTPConnection, until: float
    ) -> None:
        """Meet the server; meanwhile look at the file, as a stranger may listen and say nothing."""
        tls.setblocking(False)
        while True:
            try:
                identity.shake_hands(tls)
                return
            except SSLWantReadError:
                event = select.POLLIN
            except SSLWantWriteError:
                event = select.POLLOUT
            while not _ready(min(until - time.monotonic(), self.slice_s), event, tls.fileno()):
                if time.monotonic() >= until:
                    raise TimeoutError("timed out")
                self.read_url_file()
                if not self._leads_here(connection):
                    raise ConnectionError("the driver has moved")


def parse_url(url: str) -> SplitResult:
    """Return the parts of `http(s)://host:port`; raise ValueError for anything else."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port is None:
        raise ValueError(f"{url!r} is no rendezvous address; it looks like http://10.0.0.1:29400")
    return parts


def _identity(url: str, parts: SplitResult, fingerprint: str) -> ServerIdentity | None:
    """Return how the server at an address is known, None for plain HTTP; or raise TokenError."""
    if not _fits(parts, tls=bool(fingerprint)):
        if fingerprint:
            raise errors.TokenError(f"{url} is plain, and by its token file the job speaks TLS")
        raise errors.TokenError(
            f"{url} speaks TLS, and the token file has no fingerprint of its certificate; "
            "take the token file of this job"
        )
    try:
        return ServerIdentity(fingerprint) if fingerprint else None
    except (ValueError, SSLError) as error:
        raise errors.TokenError(f"the token file is damaged: {error}") from None


def _fits(parts: SplitResult, *, tls: bool) -> bool:
    """Return whether an address can be that of a server that speaks TLS, or plain HTTP.

    One that listens on loopback is published as `http:`, as it answers plain requests, too.
    """
    if not tls:
        return parts.scheme == "http"
    return parts.scheme == "https" or is_loopback(str(parts.hostname))


def is_loopback(host: str) -> bool:
    """Return whether this is `localhost` or a numeric address of loopback; no name is looked up."""
    with contextlib.suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def readable(seconds: float, *descriptors: int) -> list[int]:
    """Return the descriptors that can be read, or have ended, within this time."""
    return _ready(seconds, select.POLLIN, *descriptors)


def _ready(seconds: float, event: int, *descriptors: int) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, event)
    return [descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]


def _read_late_answer(connection: HTTPConnection) -> None:
    """Read an answer that nobody waits for; close the connection if it does not come whole."""
    try:
        connection.sock.settimeout(_LATE_ANSWER_S)
        connection.getresponse().read()
    except (OSError, HTTPException):
        connection.close()


def arm(connection: HTTPConnection, until: float) -> None:
    """Let the next socket operation end at `until`."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    if connection.sock is not None:
        connection.sock.settimeout(left)
