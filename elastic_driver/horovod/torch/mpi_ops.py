"""Horovod's operations on torch tensors.

Each has an asynchronous form, which returns a handle for `poll` and `synchronize`. A name makes
calls of several ranks one operation; without a name, the order of the calls does. Gradients flow
through the forms that wait and do not work in place.
"""

from elastic_driver.errors import UsageError
from elastic_driver.horovod.common import basics as _basics  # noqa: F401 - a name of Horovod's
from elastic_driver.horovod.common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from elastic_driver.horovod.common.exceptions import HorovodInternalError, HorovodUsageError
from elastic_driver.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from elastic_driver.horovod.engine.operation_log import Timeline
from elastic_driver.horovod.torch.handles import begin, engine_now, poll, synchronize
from elastic_driver.horovod.torch.movements import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from elastic_driver.horovod.torch.reductions import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def join(device: int = -1) -> int:
    """Wait until all ranks have called this; return the rank that called it last.

    Meanwhile this rank takes part in the allreduces of the others, with nothing: zeros for a sum
    or an average. So a rank that has fewer batches than others need not hold them up. `device` is
    not needed.
    """
    last = synchronize(begin("join", [], "join", global_process_set, int, gather=False))
    engine_now().count_names_anew()
    return int(last)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called this."""
    synchronize(begin("barrier", [], None, process_set, int, gather=False))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline to a file on rank 0 from now on, in place of the present one.

    Args:
        file_path: a file in the format of Chrome's tracing.
        mark_cycles: whether it shows when operations are handed out.

    Raises ValueError where the file cannot be written.
    """
    engine = engine_now()
    if engine.world.rank != 0:
        return
    engine.stop_timeline()  # it may write to the same file
    try:
        engine.start_timeline(Timeline(file_path, mark_cycles))
    except UsageError as error:
        raise HorovodUsageError(str(error)) from error


def stop_timeline() -> None:
    """End the timeline, so that its file is complete."""
    engine_now().stop_timeline()
