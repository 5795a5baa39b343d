"""The world as Horovod's scripts see it: `init`, `shutdown`, ranks and sizes, what is built."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch.distributed as dist

from elastic_driver.horovod.common import process_sets as sets
from elastic_driver.horovod.common import util
from elastic_driver.horovod.common.exceptions import HorovodUsageError, NotInYetError
from elastic_driver.horovod.engine import running
from elastic_driver.horovod.engine.world import EngineWorld
from elastic_driver.worker import current
from elastic_driver.worker.world import session


class Reduction(IntEnum):
    """The operations of `allreduce` and `reducescatter`, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


def init(comm: Any = None, process_sets: Sequence[sets.ProcessSet] | str | None = None) -> None:
    """Join the job and start the engine; does nothing where that is done already.

    Args:
        comm: None, or the ranks of the world. MPI's communicators are not taken.
        process_sets: sets to add; all ranks give the same ones.
    """
    if is_initialized():
        return
    if comm:
        raise HorovodUsageError("hvd.init(comm=…) needs MPI; add a process set for some ranks")
    session.init()
    running.start(_world())
    sets.added_at_start(() if process_sets is None else process_sets)


def shutdown() -> None:
    """Leave the world; `init` joins it again."""
    running.stop()
    sets.forget()
    session.shutdown()


def is_initialized() -> bool:
    """Return whether this process is in a world."""
    return current.is_initialized()


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


def _check() -> None:
    if not current.is_initialized():
        raise NotInYetError("Horovod is not initialized; call hvd.init() first")


def _world() -> EngineWorld:
    """Return the world that this process has just joined."""
    member = session.membership()
    assert member is not None  # noqa: S101 - after `init`
    assert member.group is not None  # noqa: S101
    connections = member.group.connections

    def connect(ranks: Sequence[int]) -> Any:
        if current.size() == 1:
            return None
        # Without `use_local_synchronization`, which names groups by how many this rank is in.
        group = dist.new_group(list(ranks))
        return group if current.rank() in ranks else None

    return EngineWorld(current.rank(), current.size(), connect, connections.shut_reads)
