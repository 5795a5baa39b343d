"""The rendezvous server: aiohttp on a thread of its own, around the key-value store.

The driver starts a server and writes with `post` and `apply`, without HTTP; agents and workers use
HTTP. Other modules mount their routes with `routes`, behind the same token check. The constructor
starts nothing; `start` binds in the caller's thread, so a port in use is an error there. Beside its
address and its rights a server is given three groups of values: `ServerTls`, `Callbacks` and
`Succession`.

The server resolves no names: its address is a number, and it never looks up its clients.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import ipaddress
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from rendezvous.access import Access
from rendezvous.answers import PostsOnce, RequestTimes
from rendezvous.auth import Role, Tokens
from rendezvous.client_connections import is_loopback
from rendezvous.connections import (
    HANDSHAKE_WAIT_S,
    Acceptor,
    Client,
    Connections,
    EitherConnection,
    TlsConnections,
)
from rendezvous.errors import AddressError, RendezvousError, StoppedError
from rendezvous.fairness import Turns
from rendezvous.fast_path import FastConnection, FastPath
from rendezvous.limits import Hits, Limits
from rendezvous.routes import (
    ACCESS,
    HITS,
    REFUSALS,
    REQUEST_TIMES,
    SESSIONS,
    TOKENS,
    Post,
    Problem,
    problem_body,
)
from rendezvous.service import Done, OnChanges, Results, StoreService
from rendezvous.sessions import Refusals, Sessions
from rendezvous.store_routes import PLAIN_STORE, mount_store
from rendezvous.tls import ServerCertificate
from rendezvous.web import around, dress, guard, once, within
from rendezvous.wire import MAX_BODY_BYTES, Operation


def _ignore(_said: object) -> None:
    pass


def _nothing_first(_url: str) -> Sequence[Operation]:
    return ()


@dataclass(frozen=True)
class ServerTls:
    """How a server speaks TLS: not at all without a certificate.

    `known_by` is what its clients are told of the certificate (default: its fingerprint, see
    `tls`). With `also_plain` and an address of loopback, plain requests are answered at the same
    port, too.
    """

    certificate: ServerCertificate | None = None
    known_by: str = ""
    also_plain: bool = False


@dataclass(frozen=True)
class Callbacks:
    """What a server calls on its thread; none of these may block.

    `on_lease_expired(key)` and `on_client_left(key)`: see `StoreService`. `on_failed` is called if
    an error ends the server that was not expected.
    """

    on_lease_expired: Callable[[str], None] | None = None
    on_client_left: Callable[[str], None] | None = None
    on_failed: Callable[[Exception], None] = _ignore


@dataclass(frozen=True)
class Succession:
    """What a server takes over from the one before it, and keeps for the one after it.

    `first_revision`: see `KVStore`. `first(url)` returns operations that are carried out before
    any client's. `on_changes` and `passing`: see `StoreService`; `on_changes` is called on the
    server's thread and must not block.
    """

    first_revision: int = 0
    first: Callable[[str], Sequence[Operation]] = _nothing_first
    on_changes: OnChanges | None = None
    passing: tuple[str, ...] = ()


log = logging.getLogger(__name__)

# ---- the server --------------------------------------------------------------------------

START_S = 10.0  # for the thread to come up, and to go down
_TURNS = 4  # of the loop: accept, make the transport, call the protocol, close
LINGER_S = 1.0  # for handlers of other modules to end when the server stops
BACKLOG = 4096  # connections that may arrive together while the loop is busy
FILES = 65536  # open files of the process, connections included
KEEPALIVE_S = 600.0  # idle connections stay open: a client's next request finds one
_REFUSAL = problem_body(
    Problem(
        503,
        "busy",
        "all connections that the driver has are in use",
        "close some, or raise the limit of open files (ulimit -n)",
    )
)
_BIND_HINTS = {
    errno.EADDRINUSE: "another program listens there; choose another port, or 0 for any",
    errno.EACCES: "ports below 1024 need privileges; choose a higher one",
    errno.EADDRNOTAVAIL: "no interface of this machine has that address",
}


class RendezvousServer:
    """The HTTP server of one job's rendezvous.

    `host` is a numeric address; `port` 0 means any free port; of several
    ports the first free one is taken.
    `others` are secrets that are taken beside the token and those derived from it, each with the
    role that it gives. `access`: what the tokens may do; by default all may use the store, and the
    driver's alone anything else.
    `routes(app)` may add routes to the application; `posts` answers POSTs that are sent very often,
    by path (see `fast_path`). `limits`: the bounds for clients; the calls below have none.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | Sequence[int] = 0,
        *,
        token: str,
        others: Mapping[str, Role] | None = None,
        access: Access | None = None,
        tls: ServerTls = ServerTls(),
        routes: Callable[[web.Application], None] | None = None,
        posts: Mapping[str, Post] | None = None,
        limits: Limits | None = None,
        callbacks: Callbacks = Callbacks(),
        succession: Succession = Succession(),
    ) -> None:
        if not token:
            raise ValueError("a rendezvous server needs a token (rendezvous.auth.make_token)")
        self._host, self._wanted_port = host, port
        self._callbacks, self._succession = callbacks, succession
        certificate = tls.certificate
        self._tls = None if certificate is None else certificate.context()
        self.fingerprint = "" if certificate is None else certificate.fingerprint()
        self.known_by = tls.known_by or self.fingerprint  # the second line of token files
        self._also_plain = tls.also_plain and self._tls is not None and is_loopback(host)
        self._routes, self._posts = routes, posts or {}
        self.limits, self.hits = Limits() if limits is None else limits, Hits()
        self.refusals, self.request_times = Refusals(), RequestTimes()
        self._access = Access(PLAIN_STORE) if access is None else access
        self._tokens = Tokens(token, others, self._access.roles)
        self._port: int | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: StoreService | None = None
        self._connections: Connections | None = None
        self._stop: asyncio.Event | None = None

    # ---- life ----------------------------------------------------------------------------

    def start(self) -> "RendezvousServer":
        """Listen and serve; return self. Raises AddressError if it cannot listen."""
        if self._thread is not None:
            raise RuntimeError("a rendezvous server starts once")
        self._files = _allow_many_connections()
        listener = _listen_at_one(self._host, self._wanted_port)
        self._port = listener.getsockname()[1]
        up: concurrent.futures.Future[None] = concurrent.futures.Future()
        run = partial(self._run, listener, up)
        self._thread = threading.Thread(target=run, name="rendezvous", daemon=True)
        self._thread.start()
        try:
            up.result(START_S)
        except concurrent.futures.TimeoutError as error:
            raise RendezvousError(
                f"the rendezvous server on {self.url} did not come up within {START_S:g} s; "
                "is this machine overloaded?"
            ) from error
        return self

    def stop(self) -> None:
        """Refuse pending requests, close all connections, end the thread. May be called again."""
        if self._thread is None or self._loop is None or self._stop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_S)
        if self._thread.is_alive():
            log.warning("rendezvous server on %s still busy %gs after stop", self.url, START_S)

    def __enter__(self) -> "RendezvousServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """Port it listens on; raises StoppedError before `start`."""
        if self._port is None:
            raise StoppedError("the rendezvous server was not started; call start() first")
        return self._port

    @property
    def url(self) -> str:
        """Its `http(s)://host:port`, with loopback in place of a wildcard address.

        It is `http` also for TLS if plain requests are answered, too.
        """
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)  # noqa: S104
        scheme = "http" if self._tls is None or self._also_plain else "https"
        return (
            f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
        )

    # ---- the driver's own access ---------------------------------------------------------

    def apply(self, operations: Sequence[Operation], timeout: float = 10.0) -> Results:
        """Carry out a batch from another thread than the server's; return its results.

        Raises RendezvousError after `timeout` seconds (the batch is given up then), StoppedError
        if the server is not running.
        """
        service, loop = self._running()
        work = service.carry_out(operations, bounded=False)
        call = asyncio.run_coroutine_threadsafe(work, loop)
        try:
            return call.result(timeout)
        except concurrent.futures.TimeoutError as error:
            call.cancel()
            raise RendezvousError(
                f"the store did not answer within {timeout:g} s; give the batch a shorter wait "
                "or apply() a longer timeout"
            ) from error
        except concurrent.futures.CancelledError as error:
            raise StoppedError("the rendezvous server was stopped meanwhile") from error

    def post(self, operations: Sequence[Operation]) -> None:
        """Carry out a batch soon, in the order of the calls, and drop its results."""
        self.ask(operations, lambda _results: None)

    def ask(self, operations: Sequence[Operation], done: Done) -> None:
        """Carry out a batch as `post` does; `done` is called with its results.

        It is called by the server's thread, and must not block. The results are None if the server
        was stopped first.
        """
        service, loop = self._running()
        ask = partial(service.ask, tuple(operations), done, bounded=False)
        loop.call_soon_threadsafe(ask)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the server's loop; it ends when the server stops."""
        try:
            spawned = asyncio.run_coroutine_threadsafe(work, self._running()[1])
            spawned.add_done_callback(_tell_of_error)
        except (StoppedError, RuntimeError):  # RuntimeError: the loop has just been closed
            work.close()

    async def carry_out(self, operations: Sequence[Operation]) -> Results:
        """Return the results of a batch, for handlers that run on the server's loop."""
        return await self._running()[0].carry_out(operations, bounded=False)

    def _running(self) -> tuple[StoreService, asyncio.AbstractEventLoop]:
        if self._service is None or self._loop is None or self._loop.is_closed():
            raise StoppedError("the rendezvous server is not running; start() it first")
        return self._service, self._loop

    # ---- the thread ----------------------------------------------------------------------

    def _run(self, listener: socket.socket, up: concurrent.futures.Future[None]) -> None:
        try:
            asyncio.run(self._serve(listener, up))
        except Exception as error:
            if up.done():
                log.exception("rendezvous server on %s ended by an error", self.url)
                self._callbacks.on_failed(error)
            else:
                up.set_exception(error)
        finally:
            listener.close()

    async def _serve(self, listener: socket.socket, up: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        service = self._service = self._make_service()
        posts_once, turns = PostsOnce(), Turns()
        connections = self._connections = Connections(
            self.limits,
            self.hits,
            self._files,
            len(os.listdir("/proc/self/fd")),
            handshake=0.0 if self._tls is None or self._also_plain else HANDSHAKE_WAIT_S,
        )
        runner = await self._aiohttp(service, posts_once, within(connections, turns))
        assert runner.server is not None  # noqa: S101 - it is set up
        fast_path = FastPath(
            service,
            posts_once,
            self._posts,
            self._tokens,
            self._access,
            general=runner.server,
            clients=connections,
            turns=turns,
            times=self.request_times,
        )
        tls = None if self._tls is None else TlsConnections(self._tls)

        def serve(client: Client) -> asyncio.BaseProtocol:
            plain = partial(FastConnection, fast_path, client)
            end = partial(connections.closed, client)
            if tls is None:
                return plain()
            if not self._also_plain:
                return tls.around(plain(), end)

            def secured() -> asyncio.BaseProtocol:
                connections.shakes_hands(client, HANDSHAKE_WAIT_S)
                return tls.around(plain(), end)

            return EitherConnection(secured, plain, end)

        acceptor = Acceptor(listener, connections, serve, _REFUSAL if tls is None else b"")
        try:
            up.set_result(None)
            await self._stop.wait()
            # Accept no more connections, and finish those being accepted: a connection that finds
            # its server closed fails an assertion in asyncio and never frees its socket.
            acceptor.stop()
            await _turn()
        finally:
            acceptor.stop()
            connections.close()
            service.close()
            await runner.cleanup()
            fast_path.close()
            if tls is not None:
                await _turn()  # what is written goes, and the end of each session
                tls.abort()
            await _turn()  # transports that were closed free their sockets

    def _make_service(self) -> StoreService:
        """Return the store on this loop, with the first keys in it."""
        succession = self._succession
        service = StoreService(
            self._callbacks.on_lease_expired,
            succession.first_revision,
            on_client_left=self._callbacks.on_client_left,
            on_changes=succession.on_changes,
            passing=succession.passing,
            limits=self.limits,
            hits=self.hits,
            system=self._access.system,
        )
        service.ask(succession.first(self.url), lambda _results: None, bounded=False)
        return service

    async def _aiohttp(
        self, service: StoreService, posts_once: PostsOnce, bounded: Middleware
    ) -> web.AppRunner:
        """Return aiohttp with all routes, without a socket of its own."""
        sessions = Sessions()
        let_in = guard(self._tokens, self._access, self.refusals, sessions)
        middlewares = [around, let_in, bounded, once(posts_once)]
        app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
        app[HITS], app[REFUSALS], app[ACCESS] = self.hits, self.refusals, self._access
        app[REQUEST_TIMES] = self.request_times
        app[SESSIONS], app[TOKENS] = sessions, self._tokens
        app.on_response_prepare.append(dress)
        mount_store(app, service)
        if self._routes is not None:
            self._routes(app)
        runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,  # a few KB may become GB, before a handler knows of the request
            handle_signals=False,
            handler_cancellation=True,  # the wait of a client that goes away ends
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=LINGER_S,
        )
        await runner.setup()
        return runner


def _tell_of_error(spawned: "concurrent.futures.Future[None]") -> None:
    """Log the error of work that nobody waits for, unless the end of the server has ended it."""
    error = None if spawned.cancelled() else spawned.exception()
    if error is not None and not isinstance(error, StoppedError):
        log.error("work on the rendezvous server's loop has failed", exc_info=error)


async def _turn() -> None:
    """Let the loop run its callbacks, and those that they schedule."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _allow_many_connections() -> int:
    """Raise the soft limit of open files, often 1024, and return it: every client needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return FILES if soft == resource.RLIM_INFINITY else soft


def _listen_at_one(host: str, ports: int | Sequence[int]) -> socket.socket:
    """Return a socket that listens at the first of these ports that is free.

    Raises AddressError if that is impossible.
    """
    if isinstance(ports, int):
        return _listen(host, ports)
    for port in ports:
        try:
            return _listen(host, port)
        except AddressError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    raise AddressError(
        f"cannot listen on {host}: none of the ports {min(ports)} to {max(ports)} is free; give a "
        "larger range, or end what listens there (ss -ltnp)"
    )


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise AddressError with advice if that is impossible."""
    try:
        family = socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6
    except ValueError:
        raise AddressError(
            f"cannot listen on {host!r}: not a numeric address; "
            "give the address of an interface, or 0.0.0.0 for all"
        ) from None
    try:
        dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual
        )
    except OSError as error:
        hint = _BIND_HINTS.get(error.errno or 0, "choose another address or port")
        found = os.strerror(error.errno or 0)
        raise AddressError(f"cannot listen on {host}:{port}: {found}; {hint}") from error
    listener.setblocking(False)
    return listener
