"""`elastic.init()` and `elastic.shutdown()`: the one membership of this process.

Scripts call `init` themselves or leave it to `@elastic.run`. What was started is stopped when the
script ends, and forgotten in forked children, which must neither beat nor hold on to the
connections of the training process. Torch is imported here, by way of `membership`.
"""

from __future__ import annotations

import atexit
import os

from elastic_driver.core.state_version import StateVersion
from elastic_driver.worker import context, current
from elastic_driver.worker.context import use_scratch
from elastic_driver.worker.worker_log import say
from elastic_driver.worker.world.backends import choose
from elastic_driver.worker.world.membership import JobMembership


class _Session:
    """The one mutable cell of this module."""

    membership: JobMembership | None = None
    exits: bool = False  # whether the hooks for exit and fork are in place


def init(backend: str | None = None) -> None:
    """Join the job: wait for the first round with this process, and build its process group.

    Does nothing when this process is in a world already. Without `elasticrun` the process becomes
    a world of one, so that a script can be tried with plain `python`.

    Args:
        backend: as for torch's `init_process_group`: "gloo", or "nccl" for CUDA tensors (gloo then
            carries CPU tensors, as with "cpu:gloo,cuda:nccl"). None: NCCL in every round in
            which each worker has a GPU of its own, else gloo.

    Raises:
        UsageError: for an unknown backend, NCCL without a GPU, or an environment that is none of a
            worker.
        RendezvousError: where the rendezvous cannot be reached or refuses this worker.
    """
    member = start(backend)
    if member.group is None:
        member.report_ready(StateVersion(), "started")
        member.join(StateVersion())


def start(backend: str | None = None) -> JobMembership:
    """The membership of this process, started if it was not; does not wait for a round.

    `backend` counts for the call that starts it.
    """
    if _Session.membership is None:
        born = context.from_environment()
        if born is None:
            say("not started by elasticrun: training in this process alone, as a world of one")
        elif born.scratch:
            use_scratch(born.scratch)
        member = JobMembership(born, choose(backend, born.slot if born is not None else 0))
        member.start()
        _Session.membership = member
        if not _Session.exits:
            atexit.register(shutdown)
            os.register_at_fork(after_in_child=_forget_in_child)
            _Session.exits = True
    return _Session.membership


def membership() -> JobMembership | None:
    """The membership of this process, or None before `init()` and after `shutdown()`."""
    return _Session.membership


def shutdown() -> None:
    """Leave the world and stop beating. Called at exit; harmless to call twice."""
    member, _Session.membership = _Session.membership, None
    if member is not None:
        member.stop()


def _forget_in_child() -> None:
    member, _Session.membership = _Session.membership, None
    if member is not None:
        member.forget_in_child()
    current.forget()
