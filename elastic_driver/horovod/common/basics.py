"""The world as Horovod's scripts see it: `init`, `shutdown`, ranks and sizes, what is built."""

import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch.distributed as dist

from elastic_driver import contract
from elastic_driver.horovod.common import process_sets as sets
from elastic_driver.horovod.common import util
from elastic_driver.horovod.common.exceptions import HorovodUsageError, NotInYetError
from elastic_driver.horovod.engine import lifecycle as running
from elastic_driver.horovod.engine.lifecycle import exchange_timeout
from elastic_driver.horovod.engine.operation import EngineWorld
from elastic_driver.worker import current
from elastic_driver.worker.world import session
from elastic_driver.worker.world.groups import add_companion, remove_companion


class Reduction(IntEnum):
    """The operations of `allreduce` and `reducescatter`, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


def init(comm: Any = None, process_sets: Sequence[sets.ProcessSet] | str | None = None) -> None:
    """Meet the other processes and start the engine; does nothing where that is done already.

    Args:
        comm: None, or the ranks of the world. MPI's communicators are not taken.
        process_sets: sets to add; all ranks give the same ones.
    """
    if is_initialized():
        return
    if comm:
        raise HorovodUsageError("hvd.init(comm=…) needs MPI; add a process set for some ranks")
    _engine.given = () if process_sets is None else process_sets
    add_companion(_engine)
    if session.membership() is None and os.environ.get(contract.NEWCOMER):
        # The others train. They are not held up while this process loads its data.
        session.expect_round()
        running.await_run()
        return
    session.meet_as_started()
    _engine.start()


def shutdown() -> None:
    """End the engine in good order with the other ranks; `init` starts it again.

    Nobody counts this as a failure or a change of the world.
    """
    remove_companion(_engine)
    _engine.stop(broken=False)
    session.leave_initial()


def is_initialized() -> bool:
    """Return whether `init` was called, and not `shutdown` since."""
    return running.current() is not None or running.awaits_run()


def enter_job() -> None:
    """Leave the world of `init`, if that is one, and start the engine in each one that follows."""
    add_companion(_engine)
    running.stop()


def size() -> int:
    """Return the number of processes in the world."""
    _check()
    return current.size()


def local_size() -> int:
    """Return the number of this world's processes on this host."""
    _check()
    return current.local_size()


def cross_size() -> int:
    """Return the number of hosts that have a process with this local rank."""
    _check()
    return current.cross_size()


def rank() -> int:
    """Return this process's rank in the world."""
    _check()
    return current.rank()


def local_rank() -> int:
    """Return the rank among the processes of this host."""
    _check()
    return current.local_rank()


def cross_rank() -> int:
    """Return the index of this host among those that have a process with this local rank."""
    _check()
    return current.cross_rank()


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of processes."""
    _check()
    return current.size() == current.local_size() * current.cross_size()


def mpi_threads_supported() -> bool:
    """Return False: there is no MPI."""
    _check()
    return False


def mpi_enabled() -> bool:
    """Return False: there is no MPI."""
    return False


def gloo_enabled() -> bool:
    """Return True: gloo carries tensors of the CPU."""
    return True


def mpi_built() -> bool:
    """Return False: there is no MPI."""
    return util.mpi_built()


def gloo_built() -> bool:
    """Return True: gloo carries tensors of the CPU."""
    return util.gloo_built()


def nccl_built() -> int:
    """Return NCCL's version as a number, 22005 for 2.20.5; 0 where this torch has no NCCL."""
    return util.nccl_built()


def ddl_built() -> bool:
    """Return False: there is no DDL."""
    return util.ddl_built()


def ccl_built() -> bool:
    """Return False: there is no oneCCL."""
    return util.ccl_built()


def cuda_built() -> bool:
    """Return whether this torch was built for CUDA."""
    return util.cuda_built()


def rocm_built() -> bool:
    """Return whether this torch was built for ROCm."""
    return util.rocm_built()


_get_process_set_ids_and_ranks = sets.get_process_set_ids_and_ranks  # as in Horovod


def _check() -> None:
    if not is_initialized():
        raise NotInYetError("Horovod is not initialized; call hvd.init() first")


class _EngineInWorld:
    """The engine and the process sets, in each world that this process joins.

    `given`: the process sets of `init`.
    """

    given: Sequence[sets.ProcessSet] | str = ()

    def start(self) -> None:
        """See `Companion.start`; a set is left out where its ranks are not there."""
        running.start(_world())
        there, size = self.given, current.size()
        if session.is_in_job() and not isinstance(there, str):
            there = [each for each in there if each.ranks and each.ranks[-1] < size]
        sets.added_at_start(there)

    def stop(self, *, broken: bool) -> None:
        """See `Companion.stop`."""
        if broken:
            running.abandon("the world is left")
        running.stop()
        sets.forget()


_engine = _EngineInWorld()


def _world() -> EngineWorld:
    """Return the world that this process has just joined."""
    member = session.membership()
    assert member is not None  # noqa: S101 - after `init`
    assert member.group is not None  # noqa: S101
    connections, timeout = member.group.connections, exchange_timeout()

    def connect(ranks: Sequence[int]) -> Any:
        if current.size() == 1:
            return None
        # Without `use_local_synchronization`, which names groups by how many this rank is in.
        group = dist.new_group(list(ranks), timeout)
        return group if current.rank() in ranks else None

    return EngineWorld(current.rank(), current.size(), connect, connections.shut_reads)
