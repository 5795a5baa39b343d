"""A lock for each machine, so that hosts which share one do not measure at the same time.

Containers, or several names of one machine, are hosts of their own and share processors. If all of
them measured at once, each would time the others. So a process holds the lock of its machine while
it times something; the lock is a key of the check's store, and one kernel is one machine. On
machines of their own this costs a request. A process that dies loses the lock with its lease.
A process waits at most `PATIENCE_S` and then measures anyway: a time that is too long is measured
again beside a fast node before it counts. Times are seconds.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from rendezvous.client import RendezvousClient
from rendezvous.wire import Append, Compared, CompareSet, Written

PATIENCE_S = 12.0
LEASE_S = 30.0  # of a lock: longer than any measurement on a CPU
_POLL_S = 0.5  # a lease that expires does not wake a process that waits for the key
HOSTS = "checks/machines/"  # the key of a machine's hosts, without its id
_FREE = b""


def this_machine() -> str:
    """Return an id that all processes on one kernel share; "" where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def this_stack() -> str:
    """Return an id that all processes on one network stack share; "" where there is none.

    Containers and network namespaces of one machine have stacks of their own, and links between
    them. Names of one machine share one: their traffic never leaves it.
    """
    try:
        return f"{this_machine()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def register_host(client: RendezvousClient, machine: str, host: str) -> None:
    """Record that a host is on this machine."""
    client.one(Append(HOSTS + machine, f"{host}\n".encode()), Written)


def is_shared(client: RendezvousClient, machine: str) -> bool:
    """Return whether more than one host has registered on this machine."""
    entry = client.get(HOSTS + machine)
    return machine != "" and entry is not None and len(set(entry.value.splitlines())) > 1


def lock_key(machine: str) -> str:
    """Return the key that holds the name of the worker with the lock; empty: no worker has it."""
    return f"checks/machine_locks/{machine}"


@contextlib.contextmanager
def lock(client: RendezvousClient, worker: str, machines: Iterable[str]) -> Iterator[None]:
    """Hold the locks of these machines, always taken in the same order, so no process deadlocks."""
    until = time.monotonic() + PATIENCE_S
    with contextlib.ExitStack() as held:
        for key in [lock_key(machine) for machine in sorted(set(machines)) if machine]:
            if _take(client, key, worker, until):
                held.callback(client.set, key, _FREE)
        yield


def _take(client: RendezvousClient, key: str, worker: str, until: float) -> bool:
    """Wait for the lock; return whether it came in time."""
    while True:
        entry = client.get(key)
        if entry is None or entry.value == _FREE:
            expected = None if entry is None else _FREE
            if client.one(CompareSet(key, expected, worker.encode()), Compared).swapped:
                client.set(key, worker.encode(), LEASE_S)
                return True
        elif (left := until - time.monotonic()) > 0:
            client.get(key, min(left, _POLL_S), entry.revision)
        else:
            return False
