"""The address at which agents and workers find their driver, and what they read there first."""

import time
from collections.abc import Mapping

from elastic_driver import contract
from elastic_driver.core.documents import DriverTerm, encode
from elastic_driver.core.job_spec import JobSpec
from elastic_driver.errors import ClusterError
from rendezvous.errors import AddressError
from rendezvous.server import RendezvousServer
from rendezvous.wire import Operation, Set

PORT_S = 5.0  # for the port of an earlier driver to become free
_LOOK_AGAIN_S = 0.1


def first_documents(
    term: int, spec: JobSpec, keys: Mapping[str, bytes], url: str
) -> list[Operation]:
    """Return the operations that come before those of any client; `keys`: those of users."""
    driver = DriverTerm(term, url)
    ours = [Set(contract.JOB_DRIVER, encode(driver)), Set(contract.JOB_SPEC, encode(spec))]
    return [*ours, *(Set(key, value) for key, value in keys.items())]


def listen(server: RendezvousServer, run_id: str, *, again: bool) -> None:
    """Start the server; `again`: the agents of an earlier driver look for it at its port.

    Raises RendezvousError if it cannot start, and ClusterError if that port stays in use.
    """
    until = time.monotonic() + PORT_S
    while True:
        try:
            server.start()
            return
        except AddressError as error:
            if not again:
                raise
            if time.monotonic() > until:
                here = f"the workers of run {run_id} look for their driver there"
                raise ClusterError(f"cannot resume: {error}; {here}") from error
        time.sleep(_LOOK_AGAIN_S)
