"""The process of a node check on a host: has imported torch, and forks a child for each task.

An agent starts it as `python -m elastic_driver.worker.nodecheck.serve`, one for each device. Its
first
task stands in its environment, as for any worker; while its host goes on to further rounds, it
reads each next task (`Assignment`) from the store. Importing torch takes seconds, so the agent has
this process forked from one that has done it, where it can. A fork takes milliseconds, and a child
has device, threads and groups of its own, whatever became of the last one. This process starts no
thread, touches no device and joins no group, so that it can fork.

A child that fails is this process's failure: it ends in the same way, and the agent reports exit
status and last words as it does of any worker. It is ended by the agent when the check is over.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial

import msgspec

from elastic_driver import contract
from elastic_driver.errors import ClusterError
from elastic_driver.policies.nodecheck.messages import (
    TASK_SETTINGS,
    Assignment,
    TaskEnded,
    TaskSettings,
    assignment_key,
)
from elastic_driver.worker.nodecheck.task import choose_interface, run
from rendezvous.auth import read_token_file
from rendezvous.client import RendezvousClient
from rendezvous.wire import EVENTS_PATH

# What DistributedDataParallel imports as it is made: more than a second, better spent before
# anybody measures.
_FOR_THE_MODEL = "torch._dynamo"
_WAIT_S = 60.0  # of one request for the next task; then it is asked again
_PR_SET_PDEATHSIG = 1

Connect = Callable[[], RendezvousClient]


def main() -> None:
    """Run tasks until the agent ends us; leaves with the status of the first that fails."""
    env = os.environ
    worker, endpoint = env[contract.WORKER_ID], env[contract.RENDEZVOUS]
    token = read_token_file(env[contract.TOKEN_FILE])
    choose_interface(endpoint)

    def connect() -> RendezvousClient:  # no connection is open while we fork
        return RendezvousClient(endpoint, token)

    settings = _read_settings(connect)
    if settings.model:
        importlib.import_module(_FOR_THE_MODEL)
    assignment = Assignment(
        task=int(env[contract.ROUND]),
        rank=int(env["RANK"]),
        size=int(env["WORLD_SIZE"]),
        node=int(env["GROUP_RANK"]),
    )
    number = 0
    while True:
        code = in_a_child(partial(_play, connect, worker, assignment, settings))
        if code:
            end_like(code)
        number += 1
        with connect() as client:
            ended = msgspec.json.encode(TaskEnded(worker, assignment.task))
            client.post_json(EVENTS_PATH, ended)
            assignment = _next(client, assignment_key(worker, number))


def in_a_child(work: Callable[[], object]) -> int:
    """Do some work in a forked process; 0, its exit status, or minus the signal that ended it."""
    sys.stdout.flush()
    sys.stderr.flush()
    ours = os.getpid()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == ours:
            work()
            code = 0
    except BaseException:  # as the interpreter would end with it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what our parent would do at its end is not ours to do


def end_like(code: int) -> None:
    """End as the child did."""
    if code < 0:
        os.kill(os.getpid(), -code)
    raise SystemExit(abs(code))


def _read_settings(connect: Connect) -> TaskSettings:
    with connect() as client:
        entry = client.get(TASK_SETTINGS)
    if entry is None:
        raise ClusterError("no node check is going on at this rendezvous")
    return msgspec.json.decode(entry.value, type=TaskSettings)


def _next(client: RendezvousClient, key: str) -> Assignment:
    """Wait for the next task: for as long as the check lasts, since it ends us, and not we it."""
    while True:
        entry = client.get(key, wait=_WAIT_S)
        if entry is not None:
            return msgspec.json.decode(entry.value, type=Assignment)


def _play(connect: Connect, worker: str, assignment: Assignment, settings: TaskSettings) -> None:
    with connect() as client:
        run(client, worker, assignment, settings)


if __name__ == "__main__":
    main()
