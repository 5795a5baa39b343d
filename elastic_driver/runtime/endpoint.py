"""The address at which agents and workers find their driver, and what they read there first."""

import errno
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from elastic_driver import contract
from elastic_driver.errors import ClusterError
from elastic_driver.words.orders import DriverTerm, JobSpec, encode
from rendezvous.errors import AddressError
from rendezvous.server import RendezvousServer
from rendezvous.wire import Operation, Set

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
