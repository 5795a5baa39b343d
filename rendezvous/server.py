"""The rendezvous server: aiohttp on a thread of its own, around the key-value store.

The driver starts one and publishes with `post` and `apply`, without HTTP; agents and workers use
HTTP. Other rooms mount their routes with `routes`, behind the same token check. The constructor
starts nothing; `start` binds in the caller's thread, so a port in use is an error there.

Nothing here resolves names: the address is a number, and peers are never looked up.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import ipaddress
import logging
import resource
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from aiohttp import web

from rendezvous.errors import AddressError, RendezvousError, StoppedError
from rendezvous.fast_path import FastPath, Post
from rendezvous.repeats import PostsOnce, Repeats
from rendezvous.routes import KVRoutes
from rendezvous.service import StoreService
from rendezvous.web import guard
from rendezvous.wire import MAX_BODY_BYTES, Operation, ReplyEncoder, Result

log = logging.getLogger(__name__)

START_S = 10.0  # for the thread to come up, and to go down
_TURNS = 4  # of the loop: accept, make the transport, tell the protocol, close
LINGER_S = 1.0  # for handlers of other rooms to end when the server stops
BACKLOG = 4096  # connections that may arrive together while the loop is busy
FILES = 65536  # open files of the process, connections included
KEEPALIVE_S = 600.0  # idle connections stay open: a client's next request finds one


class RendezvousServer:
    """The HTTP server of one job's rendezvous.

    `host` is a numeric address, `port` 0 means any free one. `others` are accepted like the
    token: secrets of nodes that do not know it yet. `on_lease_expired(key)` is called on the
    server's thread and must not block. `routes(app)` may add routes to the application; `posts`
    answers those that are sent very often, by path (see `fast_path`). `first_revision`: see
    `KVStore`.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        token: str,
        others: Collection[str] = (),
        on_lease_expired: Callable[[str], None] | None = None,
        routes: Callable[[web.Application], None] | None = None,
        posts: Mapping[str, Post] | None = None,
        first_revision: int = 0,
    ) -> None:
        if not token:
            raise ValueError("a rendezvous server needs a token (rendezvous.auth.make_token)")
        self._host, self._wanted_port, self._tokens = host, port, (token, *others)
        self._on_lease_expired, self._routes = on_lease_expired, routes
        self._posts = dict(posts or {})
        self._first_revision = first_revision
        self._port: int | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: StoreService | None = None
        self._stop: asyncio.Event | None = None

    # ---- life ----------------------------------------------------------------------------

    def start(self) -> "RendezvousServer":
        """Listen and serve; return self. Raises AddressError if it cannot listen."""
        if self._thread is not None:
            raise RuntimeError("a rendezvous server starts once")
        _allow_many_connections()
        listener = _listen(self._host, self._wanted_port)
        self._port = listener.getsockname()[1]
        up: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(listener, up), name="rendezvous", daemon=True
        )
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
        thread, loop, stop = self._thread, self._loop, self._stop
        if thread is None or loop is None or stop is None or not thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # the loop has just closed by itself
            loop.call_soon_threadsafe(stop.set)
        if thread is threading.current_thread():
            return
        thread.join(START_S)
        if thread.is_alive():
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
        """Its `http://host:port`, with loopback in place of a wildcard address."""
        address = ipaddress.ip_address(self._host)
        if address.is_unspecified:
            address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"http://{host}:{self.port}"

    # ---- the driver's own access ---------------------------------------------------------

    def apply(self, operations: Sequence[Operation], timeout: float = 10.0) -> tuple[Result, ...]:
        """Carry out a batch from another thread; return its results.

        Raises RendezvousError after `timeout` seconds (the batch is given up then), StoppedError
        if the server is not running.
        """
        service, loop = self._running()
        if threading.current_thread() is self._thread:
            raise RuntimeError("apply() would wait for its own thread; await carry_out() here")
        call = asyncio.run_coroutine_threadsafe(service.carry_out(operations), loop)
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
        service, loop = self._running()
        loop.call_soon_threadsafe(service.post, tuple(operations))

    async def carry_out(self, operations: Sequence[Operation]) -> tuple[Result, ...]:
        """Return the results of a batch, for handlers that run on the server's loop."""
        service, _ = self._running()
        return await service.carry_out(operations)

    def _running(self) -> tuple[StoreService, asyncio.AbstractEventLoop]:
        if self._service is None or self._loop is None or self._loop.is_closed():
            raise StoppedError("the rendezvous server is not running; start() it first")
        return self._service, self._loop

    # ---- the thread ----------------------------------------------------------------------

    def _run(self, listener: socket.socket, up: concurrent.futures.Future[None]) -> None:
        loop = self._loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve(listener, up))
        except Exception as error:
            if up.done():
                log.exception("rendezvous server on %s ended by an error", self.url)
            else:
                up.set_exception(error)
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=LINGER_S))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(_turn())  # transports that were closed free their sockets
            loop.close()
            listener.close()

    async def _serve(self, listener: socket.socket, up: concurrent.futures.Future[None]) -> None:
        self._stop = asyncio.Event()
        self._service = StoreService(self._on_lease_expired, self._first_revision)
        runner, fast_path = await self._set_up(self._service)
        loop, server = asyncio.get_running_loop(), None
        try:
            server = await loop.create_server(fast_path.connection, sock=listener, backlog=BACKLOG)
            up.set_result(None)
            await self._stop.wait()
            # Accept no more connections, and let those being accepted arrive: one that finds its
            # server closed fails an assertion in asyncio and never frees its socket.
            loop.remove_reader(listener)
            await _turn()
        finally:
            if server is not None:
                server.close()
            self._service.close()
            await runner.cleanup()
            fast_path.close()

    async def _set_up(self, service: StoreService) -> tuple[web.AppRunner, FastPath]:
        """Return aiohttp with all routes, and the fast path in front of it."""
        encode_reply, repeats, posts_once = ReplyEncoder(), Repeats(service), PostsOnce()
        app = web.Application(
            middlewares=[guard(*self._tokens), posts_once.middleware()],
            client_max_size=MAX_BODY_BYTES,
        )
        KVRoutes(service, repeats, encode_reply).add_to(app)
        if self._routes is not None:
            self._routes(app)
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,  # the wait of a client that goes away ends
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=LINGER_S,
        )
        await runner.setup()
        assert runner.server is not None  # noqa: S101 - it is set up
        fast_path = FastPath(
            service=service,
            repeats=repeats,
            encode_reply=encode_reply,
            posts_once=posts_once,
            posts=self._posts,
            tokens=self._tokens,
            general=runner.server,
        )
        return runner, fast_path


async def _turn() -> None:
    """Let the loop run its callbacks, and those that they schedule."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _allow_many_connections() -> None:
    """Raise the soft limit of open files, often 1024: every client holds a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise AddressError with advice if that is impossible."""
    try:
        family = socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6
    except ValueError:
        raise AddressError(
            f"cannot listen on {host!r}: not a numeric address; "
            "give the address of an interface, or 0.0.0.0 for all"
        ) from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        hint = {
            errno.EADDRINUSE: "another program listens there; choose another port, or 0 for any",
            errno.EACCES: "ports below 1024 need privileges; choose a higher one",
            errno.EADDRNOTAVAIL: "no interface of this machine has that address",
        }.get(error.errno or 0, "choose another address or port")
        raise AddressError(f"cannot listen on {host}:{port}: {error.strerror}; {hint}") from error
    return listener
