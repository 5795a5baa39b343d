"""The process of a node check on a host: it has imported torch, and forks a child for each task.

An agent starts `python -m elastic_driver.features.checks.worker.task_process` for each device. Its
environment holds its first task, as for any worker; it reads each further task (`Assignment`) from
the store. Importing torch takes seconds, so the agent forks this process from a process that has
imported it, where it can. A fork takes milliseconds, and a child has a device, threads and groups
of its own, whatever the last child has left behind. This process starts no thread, touches no
device and joins no group, so that it can fork.

A child meets the other processes of its task through the job's rendezvous, measures with them and
writes one `TaskResult`. A child that fails makes this process fail in the same way, and the agent
reports its exit status and last lines as for any worker. The agent ends it when the check is over.

Hosts that share a machine must not measure at the same time. Containers, or several names of one
machine, are hosts of their own and share processors: each would time the others. So a child holds
the lock of its machine while it times something; the lock is a key of the check's store, and one
kernel is one machine. On machines of their own this costs a request. A process that dies loses the
lock with its lease. A process waits at most `PATIENCE_S` and then measures anyway: a time that is
too long is measured again beside a fast node before it counts. Times are seconds.
"""

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import torch.distributed as dist

from elastic_driver import contract
from elastic_driver.contract import EVENTS_PATH
from elastic_driver.errors import ClusterError
from elastic_driver.features.checks import messages
from elastic_driver.features.checks.worker.measure import NodeCheckTask, use_device
from elastic_driver.words.wire_events import WorkerReady
from elastic_driver.worker.torch_seams import import_compiler
from rendezvous.auth import read_credentials
from rendezvous.client import RendezvousClient
from rendezvous.torch_store import HTTPStore
from rendezvous.wire import Append, Compared, CompareSet, Written

_WAIT_S = 60.0  # of one request for the next task; then it is repeated
_PR_SET_PDEATHSIG = 1
PATIENCE_S = 12.0  # the longest wait for a lock
LEASE_S = 30.0  # of a lock: longer than any measurement on a CPU
_POLL_S = 0.5  # a lease that expires does not wake a process that waits for the key
HOSTS = "checks/machines/"  # the key of a machine's hosts, without its id
_FREE = b""
_FORK = multiprocessing.get_context("fork")


def main() -> None:
    """Run tasks until the agent ends this process; exit as the first child that fails."""
    env = os.environ
    worker, endpoint = env[contract.WORKER_ID], env[contract.RENDEZVOUS]
    token, fingerprint = read_credentials(env[contract.TOKEN_FILE])
    client = RendezvousClient(endpoint, token, fingerprint=fingerprint)
    entry = client.get(messages.TASK_SETTINGS)
    if entry is None:
        raise ClusterError("no node check is going on at this rendezvous")
    settings = msgspec.json.decode(entry.value, type=messages.TaskSettings)
    if settings.model:
        import_compiler()  # before any measurement
    names = {"task": contract.ROUND, "rank": "RANK", "size": "WORLD_SIZE", "node": "GROUP_RANK"}
    part = messages.Assignment(**{field: int(env[name]) for field, name in names.items()})
    for number in itertools.count(1):
        client.close()  # no connection is open at a fork
        code = in_child(partial(_run, client, worker, part, settings))
        if code < 0:  # end as the child did
            os.kill(os.getpid(), -code)
        if code:
            raise SystemExit(abs(code))
        client.post_json(EVENTS_PATH, msgspec.json.encode(messages.TaskEnded(worker, part.task)))
        key = messages.assignment_key(worker, number)
        while (entry := client.get(key, wait=_WAIT_S)) is None:
            pass  # as long as the check lasts; the agent ends this process
        part = msgspec.json.decode(entry.value, type=messages.Assignment)


def in_child(work: Callable[[], object]) -> int:
    """Call `work` in a forked process; return its exit status, or minus the signal that ended it.

    The child dies with this process.
    """
    parent = os.getpid()

    def run_in_child() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            work()

    child = _FORK.Process(target=run_in_child)
    child.start()
    child.join()
    return child.exitcode or 0


def _run(
    client: RendezvousClient, worker: str, own: messages.Assignment, settings: messages.TaskSettings
) -> None:
    """Meet the other processes of this task, measure with them, write the result."""
    task, rank, size = own.task, own.rank, own.size
    timeout = timedelta(seconds=settings.timeout)
    store = HTTPStore(client, contract.round_prefix(task), timeout)
    machine, stack = this_machine(), this_stack()
    place = messages.Place(node=own.node, machine=machine, stack=stack)
    store.set(f"places/{rank}", msgspec.json.encode(place))
    found = store.multi_get([f"places/{peer}" for peer in range(size)])
    places = [msgspec.json.decode(value, type=messages.Place) for value in found]
    backend = dist.get_default_backend_for_device(use_device())  # NCCL uses it from the start
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        register_host(client, machine, contract.host_of_worker(worker))
        ready = WorkerReady(worker, task, -1, clean=True, reason="ready to measure")
        client.post_json(EVENTS_PATH, msgspec.json.encode(ready))
        store.wait(["go"])  # `messages.go_key`: `features.checks.tasks` lets all begin at once
        shared = is_shared(client, machine)
        lock = partial(lock_machines, client, worker)
        result = NodeCheckTask(settings, rank, places, lock=lock, shared=shared).measure()
        client.set(messages.result_key(task, worker), msgspec.json.encode(result))
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        dist.destroy_process_group()
        store.close()


# ---- locks -------------------------------------------------------------------------------


def this_machine() -> str:
    """Return an id that all processes on one kernel share; "" where there is none."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text("ascii").strip() if file.exists() else ""


def this_stack() -> str:
    """Return an id that all processes on one network stack share; "" where there is none.

    Containers and network namespaces of one machine have stacks of their own, and links between
    them. Names of one machine share one: their traffic never leaves it.
    """
    stack = Path("/proc/self/ns/net")
    return f"{this_machine()}/{stack.stat().st_ino}" if stack.exists() else ""


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
def lock_machines(client: RendezvousClient, worker: str, machines: Iterable[str]) -> Iterator[None]:
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


if __name__ == "__main__":
    main()
