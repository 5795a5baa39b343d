"""The process of a node check on a host: it has imported torch, and forks a child for each task.

An agent starts `python -m elastic_driver.worker.nodecheck.serve` for each device. Its environment
holds its first task, as for any worker; it reads each further task (`Assignment`) from the store.
Importing torch takes seconds, so the agent forks this process from one that has done it, where it
can. A fork takes milliseconds, and a child has device, threads and groups of its own, whatever
the last child has left behind. This process starts no thread, touches no device and joins no group,
so that it can fork.

A child meets the other processes of its task through the job's rendezvous, measures with them and
writes one `TaskResult`. A child that fails makes this process fail in the same way, and the agent
reports its exit status and last lines as for any worker. The agent ends it when the check is over.
"""

import ctypes
import importlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import msgspec
import psutil
import torch.distributed as dist

from elastic_driver import contract
from elastic_driver.core.events import WorkerReady
from elastic_driver.errors import ClusterError
from elastic_driver.policies.nodecheck import messages
from elastic_driver.worker.context import address_towards
from elastic_driver.worker.nodecheck import machine_lock
from elastic_driver.worker.nodecheck.task import NodeCheckTask, use_device
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.torch_store import HTTPStore
from rendezvous.wire import EVENTS_PATH

# DistributedDataParallel imports it: more than a second, better spent before any measurement.
_USED_BY_DDP = "torch._dynamo"
_WAIT_S = 60.0  # of one request for the next task; then it is repeated
_PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


def main() -> None:
    """Run tasks until the agent ends this process; exit as the first child that fails."""
    env = os.environ
    worker, endpoint = env[contract.WORKER_ID], env[contract.RENDEZVOUS]
    token = read_token_file(env[contract.TOKEN_FILE])
    _choose_interface(endpoint)

    def connect() -> RendezvousClient:  # no connection is open at a fork
        return RendezvousClient(endpoint, token)

    with connect() as client:
        entry = client.get(messages.TASK_SETTINGS)
    if entry is None:
        raise ClusterError("no node check is going on at this rendezvous")
    settings = msgspec.json.decode(entry.value, type=messages.TaskSettings)
    if settings.model:
        importlib.import_module(_USED_BY_DDP)
    names = {"task": contract.ROUND, "rank": "RANK", "size": "WORLD_SIZE", "node": "GROUP_RANK"}
    assignment = messages.Assignment(**{field: int(env[name]) for field, name in names.items()})

    def run_task() -> None:
        with connect() as client:
            _run(client, worker, assignment, settings)

    for number in itertools.count(1):
        code = in_child(run_task)
        if code < 0:  # end as the child did
            os.kill(os.getpid(), -code)
        if code:
            raise SystemExit(abs(code))
        with connect() as client:
            ended = msgspec.json.encode(messages.TaskEnded(worker, assignment.task))
            client.post_json(EVENTS_PATH, ended)
            key = messages.assignment_key(worker, number)
            while (entry := client.get(key, wait=_WAIT_S)) is None:
                pass  # as long as the check lasts; the agent ends this process
            assignment = msgspec.json.decode(entry.value, type=messages.Assignment)


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


def _choose_interface(endpoint: str) -> None:
    """Let gloo and NCCL use the interface that reaches the rendezvous, unless one is set."""
    address = address_towards(endpoint)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)
            return


def _run(
    client: RendezvousClient,
    worker: str,
    assignment: messages.Assignment,
    settings: messages.TaskSettings,
) -> None:
    """Meet the other processes of this task, measure with them, write the result."""
    task, rank, size = assignment.task, assignment.rank, assignment.size
    machine, stack = machine_lock.this_machine(), machine_lock.this_stack()
    own = messages.Place(node=assignment.node, machine=machine, stack=stack)
    client.set(messages.place_key(task, rank), msgspec.json.encode(own))
    within = f"within {settings.timeout:g} s"
    until, places = time.monotonic() + settings.timeout, []
    for peer in range(size):
        late = f"rank {peer} of the group did not come {within}"
        place = _await(client, messages.place_key(task, peer), until, late)
        places.append(msgspec.json.decode(place, type=messages.Place))
    timeout = timedelta(seconds=settings.timeout)
    store = HTTPStore(client, contract.round_prefix(task) + "torch/", timeout)
    backend = "nccl" if use_device().type == "cuda" else "gloo"  # and NCCL uses it from the start
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        machine_lock.register_host(client, machine, contract.host_of_worker(worker))
        ready = WorkerReady(worker, task, -1, clean=True, reason="ready to measure")
        client.post_json(EVENTS_PATH, msgspec.json.encode(ready))
        until = time.monotonic() + settings.timeout  # `policies.nodecheck.tasks` lets all begin
        late = f"the driver did not let it begin {within}"
        _await(client, messages.go_key(task), until, late)
        shared = machine_lock.is_shared(client, machine)
        lock = partial(machine_lock.lock, client, worker)
        result = NodeCheckTask(settings, rank, places, lock, shared=shared).measure()
        client.set(messages.result_key(task, worker), msgspec.json.encode(result))
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        dist.destroy_process_group()
        store.close()


def _await(client: RendezvousClient, key: str, until: float, late: str) -> bytes:
    """Return the value of a key once it is written.

    Raises `ClusterError` with the message `late` after the monotonic time `until`.
    """
    while (entry := client.get(key, wait=max(0.0, until - time.monotonic()))) is None:
        if time.monotonic() >= until:
            raise ClusterError(late)
    return entry.value


if __name__ == "__main__":
    main()
