"""The process of a node check on a host: it has imported torch, and forks a child for each task.

An agent starts `python -m elastic_driver.worker.nodecheck.serve` for each device. Its environment
holds its first task, as for any worker; it reads each further task (`Assignment`) from the store.
Importing torch takes seconds, so the agent forks this process from one that has done it, where it
can. A fork takes milliseconds, and a child has device, threads and groups of its own, whatever
became of the last one. This process starts no thread, touches no device and joins no group, so that
it can fork.

A child that fails makes this process fail in the same way, and the agent reports its exit status
and last lines as for any worker. The agent ends it when the check is over.
"""

import ctypes
import importlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable

import msgspec

from elastic_driver import contract
from elastic_driver.errors import ClusterError
from elastic_driver.policies.nodecheck import messages
from elastic_driver.worker.nodecheck.task import choose_interface, run
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
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
    choose_interface(endpoint)

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
            run(client, worker, assignment, settings)

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


if __name__ == "__main__":
    main()
