"""Where a driver is found: its address, its certificate, and a port that shows that it lives.

The server of a job speaks TLS, unless the user says --insecure: other users of this machine may
take its port when it has died. A certificate is made once for each run and kept in its folder; the
drivers that go on with the run use it again, because agents and workers know no other. With it, a
server on loopback answers plain requests, too (docs/security.md).

An agent looks for its driver at the address that it knows. A driver that goes on with the job may
be at another one: on another host, or because another program holds the port. So it tells each
agent of the job's books at the port where the agent answers probes. An agent that does not answer
is told again.

At the liveness port a driver proves that it lives (`elastic_driver.reachability`). The Brain asks,
and keeps the connection. The kernel holds it for a process that is stopped, too, and ends it with
the process, however that ends. Anybody may connect; who has not proved to be the Brain is sent away
soon, and keeps the Brain out no longer than that. Times are seconds.
"""

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from elastic_driver import contract
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.job.fleet import HostAgent
from elastic_driver.job.job import Job
from elastic_driver.reachability import DriverPresence, Presence, announce, reachable_url
from elastic_driver.settings import DriverOptions
from elastic_driver.token_roles import agent_token
from elastic_driver.words.orders import DriverTerm, JobSpec, encode
from rendezvous import tls
from rendezvous.auth import Credentials
from rendezvous.errors import AddressError
from rendezvous.server import RendezvousServer
from rendezvous.tls import ServerCertificate
from rendezvous.wire import Operation, Set


class Identity(NamedTuple):
    """The server's certificate, None for plain HTTP, and the second line of token files."""

    certificate: ServerCertificate | None = None
    known_by: str = ""
    also_plain: bool = False  # on loopback, plain requests are answered, too


def choose_identity(
    options: DriverOptions, made: ServerCertificate, former: Credentials | None
) -> Identity:
    """Return the identity of a driver's server; make a certificate if there has to be one.

    `made`: the place of the run's own certificate. `former`: what the agents of an earlier driver
    of the run know; the server stays as they know it. Raises UsageError, CertificateError or
    TokenError.
    """
    if former is not None and not former.fingerprint:
        return Identity()  # they speak plain HTTP
    identity = of_site(options)
    if former is None and options.insecure:
        return Identity()
    if identity is None:
        if former is None:
            tls.make_certificate(made)
        identity = Identity(made, made.fingerprint(), also_plain=True)
    known = [identity.known_by] if former is None else [identity.known_by, former.fingerprint]
    if len(set(known)) > 1 and not all(word.startswith(tls.CA) for word in known):
        raise UsageError(
            "cannot resume: the agents of this run know its driver by another certificate; "
            "give the --tls-cert, --tls-key and --tls-ca with which the run began"
        )
    return identity


def of_site(options: DriverOptions) -> Identity | None:
    """Return the identity with the user's own certificate; None: there is none.

    Raises UsageError for options that contradict each other, and CertificateError for a certificate
    that clients would refuse.
    """
    if options.insecure and (options.tls_cert or options.tls_ca):
        raise UsageError("--insecure and --tls-cert contradict each other; keep one of them")
    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together; give both")
    if options.tls_cert is None or options.tls_key is None:
        return None
    certificate = ServerCertificate(Path(options.tls_cert), Path(options.tls_key)).absolute()
    if options.tls_ca is None:
        known = certificate.fingerprint()
    else:
        name = options.given_host or certificate.name()
        known = tls.known_by_ca(Path(options.tls_ca), name)
    tls.check(certificate, known)
    return Identity(certificate, known)


AGAIN_S = 0.5


def all_hear(job: Job) -> bool:
    """Return whether each agent that is up can be called, as far as the job knows.

    One whose probe port this machine does not reach goes on looking at the address that it knows.
    """
    agents, unreached = job.fleet.agents.values(), job.suspicion.unreached
    return all(a.probe_port and a.host not in unreached for a in agents if a.is_up)


async def tell_agents(
    agents: Iterable[HostAgent], *, run_id: str, term: int, url: str, token: str, within: float
) -> None:
    """Tell these agents the URL of this driver; give up after `within` seconds.

    `token` is the driver's. Workers cannot speak in its name: they do not know their agent's token.
    """

    async def tell(agent: HostAgent) -> None:
        place = agent.address, agent.probe_port
        presence = Presence(agent_token(token, agent.host), agent.host, agent.incarnation)
        seen = reachable_url(url, *place)
        while not await announce(*place, presence, run_id=run_id, term=term, url=seen):
            await asyncio.sleep(AGAIN_S)

    async def tell_all() -> None:  # a task: it takes note of its end, also where that is cut short
        known = [tell(agent) for agent in agents if agent.is_up and agent.probe_port]
        await asyncio.gather(*known)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(tell_all(), within)


PORT_S = 1.0  # for the process of an earlier driver to be gone, and its port with it
_LOOK_AGAIN_S = 0.05


def first_documents(
    term: int, spec: JobSpec, keys: Mapping[str, bytes], url: str
) -> list[Operation]:
    """Return the operations that come before those of any client; `keys`: those of users."""
    driver = DriverTerm(term, url)
    ours = [Set(contract.JOB_DRIVER, encode(driver)), Set(contract.JOB_SPEC, encode(spec))]
    return [*ours, *(Set(key, value) for key, value in keys.items())]


def ports_to_try(
    given: int, before: int, others: Sequence[int], *, resumed: bool, all_hear: bool
) -> tuple[int, ...]:
    """Return the ports for a driver's server, in the order to try them.

    Args:
        given: the port that the user names; 0: none.
        before: the port of the last driver of this run on this host; 0: there was none.
        others: the ports for what has none of its own; 0: any.
        resumed: this driver goes on with a job.
        all_hear: each agent of the job can be called, so that it finds this driver at any port.
    """
    if not resumed:
        return (given,) if given else tuple(others)
    if before and not all_hear:
        return (before,)
    return tuple(dict.fromkeys((*(port for port in (given, before) if port), *others)))


def await_port(host: str, port: int) -> bool:
    """Return whether a port is free, perhaps after a moment; `host` is a numeric address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    until = time.monotonic() + PORT_S
    while port:
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                break  # the server says it
            if time.monotonic() > until:
                return False
        else:
            break
        time.sleep(_LOOK_AGAIN_S)
    return True


def listen(
    server: RendezvousServer, ports: Sequence[int], run_id: str, say: Callable[[str], None] | None
) -> None:
    """Start the server at the first of these ports that is free.

    `say` shows a line about another port to the user of a driver that goes on with a job; None: it
    begins. Raises RendezvousError if it cannot start, and ClusterError if agents of an earlier
    driver cannot be called and their port is in use.
    """
    try:
        server.start()
    except AddressError as error:
        if say is None:
            raise
        here = f"agents of run {run_id} that cannot be called look for their driver there"
        raise ClusterError(f"cannot resume: {error}; {here}") from error
    if say is not None and ports[0] not in (0, server.port):
        say(
            f"another program holds port {ports[0]}, so the driver of run {run_id} listens at "
            f"{server.url} now; its agents and workers are told; nodes that join later, and "
            "whoever was given the old address, need this one"
        )


LINE_S = 2.0  # for the question to arrive
MOST = 64  # connections without one; one more, and the oldest has to go
KEPT = 4  # connections with one: the newest stay
END_S = 2.0  # for the thread to end
_LINE = 200  # bytes; a question is shorter


class LivenessPort:
    """The port, at the address by which this machine reaches another one.

    `address` is HOST:PORT with a numeric host, "" until `open` has succeeded. One thread serves it.
    """

    def __init__(self, towards: str, port: int, token: str, ports: Sequence[int] = (0,)) -> None:
        """Open nothing.

        `towards`, `port`: the other machine's name or address, and any port. `token`: the job's.
        `ports`: those to listen at, of which the first free one is taken; 0: any.
        """
        self._towards, self._port, self._token, self._ports = towards, port, token, ports
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._up = threading.Event()
        self.address = ""

    def open(self, began: float) -> None:
        """Open the port, if that was not possible before; asks a name server.

        `began`: of the run, as its reports say it.
        """
        if self._thread is not None:
            return
        with contextlib.suppress(OSError):  # there is no way to it now
            family, kind, _, _, target = socket.getaddrinfo(
                self._towards, self._port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as unsent:  # nothing is sent by `connect`
                unsent.connect(target)
                own = unsent.getsockname()[0]
            listener = self._listen(own, family)
            host = f"[{own}]" if ":" in own else own
            self.address = f"{host}:{listener.getsockname()[1]}"
            presence = DriverPresence(self._token, began, self.address)
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._serve(listener, _Lines(presence))),
                name="liveness",
                daemon=True,
            )
            self._thread.start()

    def _listen(self, own: str, family: int) -> socket.socket:
        """Return a socket that listens at the first free port; OSError if none is free."""
        for port in self._ports:
            with contextlib.suppress(OSError):  # another program listens there
                return socket.create_server((own, port), family=family, backlog=MOST)
        raise OSError("no port is free")

    async def _serve(self, listener: socket.socket, lines: "_Lines") -> None:
        self._loop = asyncio.get_running_loop()
        server = await self._loop.create_server(lambda: _Line(lines), sock=listener, backlog=MOST)
        self._up.set()
        await self._stop.wait()
        server.close()
        lines.close()
        await asyncio.sleep(0)  # so that they are closed

    def close(self) -> None:
        """Close the port and all connections. May be called again."""
        if self._thread is None:
            return
        if self._up.wait(END_S) and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it was closed before
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(END_S)
        self.address = ""


class _Lines:
    """All connections, the oldest first; and who the driver is."""

    def __init__(self, presence: DriverPresence) -> None:
        self.presence = presence
        self.unproved = dict[asyncio.Transport, None]()
        self.kept = dict[asyncio.Transport, None]()

    def close(self) -> None:
        for connection in (*self.unproved, *self.kept):
            connection.abort()


def _add(connection: asyncio.Transport, to: dict[asyncio.Transport, None], most: int) -> None:
    if len(to) >= most:
        oldest = next(iter(to))
        del to[oldest]
        oldest.abort()
    to[connection] = None


class _Line(asyncio.Protocol):
    """One connection: a question, its answer, then nothing until one side has ended."""

    def __init__(self, lines: _Lines) -> None:
        self._lines, self._data, self._answered = lines, b"", False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _add(self._transport, self._lines.unproved, MOST)
        self._patience = asyncio.get_running_loop().call_later(LINE_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._data += data
        line, end, rest = self._data.partition(b"\n")
        answer = self._lines.presence.answer(line) if end and not rest else None
        if self._answered or len(self._data) > _LINE or (end and answer is None):
            self._transport.abort()
        elif answer is not None:
            self._patience.cancel()
            self._answered, self._data = True, b""
            self._lines.unproved.pop(self._transport, None)
            _add(self._transport, self._lines.kept, KEPT)
            self._transport.write(answer)

    def connection_lost(self, _error: Exception | None) -> None:
        self._lines.unproved.pop(self._transport, None)
        self._lines.kept.pop(self._transport, None)
        self._patience.cancel()
