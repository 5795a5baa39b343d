"""The address at which agents and workers find their driver, its certificate, and what they read.

The server of a job speaks TLS, unless the user says --insecure: other users of this machine may
take its port when it has died. A certificate is made once for each run and kept in its folder; the
drivers that go on with the run use it again, because agents and workers know no other. With it, a
server on loopback answers plain requests, too (docs/security.md).

An agent looks for its driver at the address that it knows. A driver that goes on with the job may
be at another one: on another host, or because another program holds the port. So it tells each
agent of the job's books at the port where the agent answers probes. An agent that does not answer
is told again. Times are seconds.
"""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from elastic_driver import contract
from elastic_driver.errors import ClusterError, UsageError
from elastic_driver.job.fleet import HostAgent
from elastic_driver.job.job import Job
from elastic_driver.reachability import Presence, announce, reachable_url
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
