"""The private names of torch that this project uses: all of them, and only here.

A private name may change with any release of torch. Each gets here a name of ours, by which all
other modules call it, and `tests/worker/test_torch_seams.py` has a test for each one, which says
what is expected of it.

What happens if a release drops a name is one of three things:

- A name marked "at import" is looked up when this module is imported. Training does not begin; the
  error has the name.
- A name without a mark is looked up where it is used. The call raises AttributeError, ImportError
  or KeyError with the name.
- A name marked "else: …" is asked for, or put in place of torch's. Training goes on, with less: as
  the mark says.

One name is not only here: "torch._dynamo" is also in `features/checks/driver.py`. A driver has no
torch; it tells agents to import that module early, for a node check that trains a model. Else: an
agent says that it cannot.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined] # it has no types
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.amp import GradScaler
from torch.distributed import ProcessGroupGloo, Store
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

# The releases with which this module was run; docs/testing.md says with which tests. `setup.cfg`
# allows these, and what lies between them.
RUN_ON = ("2.13.0", "2.14.1")


# ---- tensors ------------------------------------------------------------------------------------

# At import. Each takes a list of tensors, and changes them in place in one call.
copy_all = torch._foreach_copy_  # from a list of others
add_all = torch._foreach_add_  # a list of others, or a number
multiply_all = torch._foreach_mul_
divide_all = torch._foreach_div_

version_of = attrgetter("_version")  # grows with each change in place; RuntimeError: it has none
viewed_by = attrgetter("_base")  # the tensor of which this one is a view; None: of none

# At import.
flatten = _flatten_dense_tensors  # tensors of one type → one vector
unflatten = _unflatten_dense_tensors  # (vector, tensors) → views of it in their shapes


def buckets(tensors: Sequence[Tensor], size: int) -> list[list[int]]:
    """Return the indices of tensors in each bucket of about `size` bytes, as DDP makes them."""
    found, _ = dist._compute_bucket_assignment_by_size(list(tensors), [size])
    return list(found)


def coordinates(sparse: Tensor) -> Tensor:
    """Return the indices of a sparse tensor, some perhaps twice; shape (dimensions, values)."""
    return sparse._indices()


def entries(sparse: Tensor) -> Tensor:
    """Return the values of a sparse tensor, in the order of `coordinates`."""
    return sparse._values()


# ---- modules ------------------------------------------------------------------------------------

# What a module holds itself, without its submodules. A scripted module has objects of its own in
# place of these dictionaries.
parameters_of = attrgetter("_parameters")  # name → parameter or None
buffers_of = attrgetter("_buffers")  # name → tensor or None
children_of = attrgetter("_modules")  # name → module or None
unsaved_buffers_of = attrgetter("_non_persistent_buffers_set")  # names that no state_dict has

WithStatistics = _NormBase  # at import; the base of batch and instance normalisations


class BatchNorm(_BatchNorm):  # type: ignore[misc] # at import
    """Batch normalisation of inputs with two dimensions or more."""

    def check_shape(self, batch: Tensor) -> None:
        """Raise ValueError for an input with fewer; torch's `forward` calls it, too."""
        if batch.dim() < 2:
            raise ValueError(f"expected two dimensions or more, found {batch.dim()}")

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        self.check_shape(input)


class OpenDataParallel(DistributedDataParallel):  # type: ignore[misc] # torch has no types here
    """DistributedDataParallel with methods for what it keeps to itself."""

    def broadcast_tensors(self, tensors: Sequence[Tensor], bucket_bytes: int, source: int) -> None:
        """Give all ranks the tensors of one of them; DDP calls it for the buffers of the model.

        It waits in C++. A subclass may do it in another way. Else: DDP does not ask the subclass,
        and a rank that waits for the buffers of a lost peer waits for gloo's timeout.
        """
        super()._distributed_broadcast_coalesced(tensors, bucket_bytes, source)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        self.broadcast_tensors(tensors, buffer_size, authoritative_rank)

    def check_hook(self, hook: Callable[..., Any]) -> None:
        """Raise what torch raises for an object that is no communication hook."""
        self._check_comm_hook(hook)

    @property
    def divides_by_first_size(self) -> bool:
        """Whether a mean in `join()` is over all ranks, also those without data; asked in it."""
        return bool(self._divide_by_initial_world_size)


def import_compiler() -> None:
    """Import what the constructor of DistributedDataParallel imports: it takes over a second."""
    importlib.import_module("torch._dynamo")


# ---- backward passes, optimizers and gradient scalers -------------------------------------------

# At import. Call a function once at the end of this backward pass; in the order of these requests.
when_backward_ends = torch.autograd.Variable._execution_engine.queue_callback

_number = getattr(torch._C, "_current_graph_task_id", None)


def number_of_pass() -> int:
    """Return the number of the backward pass that runs on this thread; −1: none does.

    Else: always −1, and nobody hears of an optimizer outside the state that is trained in the same
    passes.
    """
    return -1 if _number is None else int(_number())


def calls_hooks(optimizer: Optimizer) -> bool:
    """Return whether torch's constructor has made this optimizer, so that it has hooks to call.

    Else: for none, and the times of steps are not measured.
    """
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def scaler_state(scaler: GradScaler) -> dict[str, Any] | None:
    """Return what `state_dict()` does, with tensors on the device in place of numbers.

    It waits for no device. None: the scaler has not been used yet. Else: always None, and the
    caller asks for `state_dict()`, which waits.
    """
    scale = getattr(scaler, "_scale", None)
    tracker = getattr(scaler, "_growth_tracker", None)  # the steps since the scale has grown
    if scale is None or tracker is None:
        return None
    return {
        "scale": scale.clone(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": tracker.clone(),
    }


def scaler_steps(scaler: GradScaler) -> dict[int, dict[str, Any]]:
    """Return how far the step of each optimizer is, by its identity; a disabled scaler has none.

    Else: none, and a step that is rolled back after `unscale_` raises when it is done again.
    """
    found: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return found


def is_step_of_scaler(code: CodeType) -> bool:
    """Return whether this is the code with which an enabled scaler calls `optimizer.step()`.

    Else: no code is, and Horovod's optimizer does not refuse such a step where each rank would
    decide for itself whether to skip it.
    """
    return code.co_name == "_maybe_opt_step"


# ---- process groups -----------------------------------------------------------------------------

_POINT_TO_POINT = frozenset(map(int, (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)))
# At import. Group → (names of its backends, store); the same dictionary as long as torch is loaded.
groups = c10d._world.pg_map


def default_group() -> Any:
    """Return the group of all ranks; raises ValueError if there is none."""
    return c10d._get_default_group()


def backend_names(group: Any) -> str:
    """Return the names of a group's backends, as in "cpu:gloo,cuda:nccl"."""
    return str(groups[group][0])


def device_types(group: Any) -> Collection[torch.device]:
    """Return a device of each type that a group connects."""
    return list(group._device_types)


def backend_for(group: Any, device: torch.device) -> Any:
    """Return the backend of a group for tensors on `device`."""
    return group._get_backend(device)


def collective_counter(group: Any, device: torch.device) -> Callable[[], int]:
    """Return what counts the collectives of a backend; a call raises RuntimeError if it cannot."""
    count: Callable[[], int] = group._get_backend(device)._get_sequence_number_for_group
    return count


def is_point_to_point(work: dist.Work) -> bool:
    """Return whether an operation is a send or a receive, and no collective."""
    return work._get_op_type() in _POINT_TO_POINT


def forget_groups() -> None:
    """Make torch drop all groups, whose backends were aborted, without waiting for them."""
    c10d._abort_process_group()


def make_gloo(
    store: Store, rank: int, size: int, device: Any, *, connect: timedelta, collective: timedelta
) -> ProcessGroupGloo:
    """Return a gloo group over `store`; blocks until every peer is connected.

    `connect`, `collective`: the longest time until it is, and of a collective.
    """
    options = ProcessGroupGloo._Options()
    options._devices = [device]
    options._timeout = connect
    backend = ProcessGroupGloo(store, rank, size, options)
    set_timeout(backend, collective)
    return backend


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the longest time of a backend's collectives."""
    backend._set_default_timeout(timeout)


# ---- loaders: their iterators, and processes that load ------------------------------------------

LoaderIterator = _BaseDataLoaderIter  # at import
IteratorWithProcesses = _MultiProcessingDataLoaderIter  # at import
_CHECK = "_error_if_any_worker_fails"


class Prefetching(NamedTuple):
    """How an iterator with processes draws ahead of the loop."""

    batches: int
    in_order: bool
    persistent: bool


def is_loader_iterator(iterator: Any) -> bool:
    """Return whether an object is a loader's iterator that has its sampler.

    Else: none is, and a sampler takes the loop over it for one without a loader: the position
    within a pass is not known.
    """
    return isinstance(iterator, LoaderIterator) and hasattr(iterator, "_index_sampler")


def sampler_of(iterator: Any) -> Any:
    """Return the sampler, or batch sampler, from which an iterator draws."""
    return iterator._index_sampler


def drawing_of(fields: dict[str, Any]) -> Any:
    """Return the iterator over the sampler; `fields`: the `vars()` of a loader's iterator."""
    return fields["_sampler_iter"]


def prefetching(fields: dict[str, Any]) -> Prefetching | None:
    """Return how an iterator with these fields draws ahead; None: it has no processes.

    Else, without `_in_order`: batches are taken to come in order, as they did before that was an
    option.
    """
    if not (workers := fields["_num_workers"]):
        return None
    ahead = workers * fields["_prefetch_factor"]
    return Prefetching(ahead, fields.get("_in_order", True), fields["_persistent_workers"])


def batches_yielded(fields: dict[str, Any]) -> int:
    """Return the batches that an iterator with these fields has handed on.

    An iterator that is not complete yet has no such field, and has handed on 0. Else: always 0.
    """
    return int(fields.get("_num_yielded", 0))


def is_shut_down(iterator: Any) -> bool:
    """Return whether an iterator with processes has told them to end.

    One that is not complete yet has no such field. Else: none ever has.
    """
    return bool(getattr(iterator, "_shutdown", False))


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator that a loader with `persistent_workers` keeps; None: none."""
    return loader._iterator


def drop_iterator(loader: DataLoader[Any]) -> None:
    """Let a loader with `persistent_workers` begin with new processes."""
    loader._iterator = None


def processes_of(iterator: Any) -> Sequence[Any]:
    """Return the processes of an iterator that has some, as `multiprocessing` objects."""
    found: Sequence[Any] = iterator._workers
    return found


def code_of_wait() -> CodeType:
    """Return the code in which an iterator waits for data of its processes."""
    code: CodeType = IteratorWithProcesses._try_get_data.__code__
    return code


def check_of_ends() -> Callable[[], None] | None:
    """Return what torch calls upon SIGCHLD; it raises for a process that has failed.

    Torch's handler looks it up for each call. Else: None, and SIGTERM to all processes of a worker
    may raise its error anywhere in the script.
    """
    check: Callable[[], None] | None = getattr(signal_handling, _CHECK, None)
    return check


def replace_check_of_ends(check: Callable[[], None]) -> None:
    """Have torch call this function upon SIGCHLD."""
    setattr(signal_handling, _CHECK, check)


# ---- checkpoints that `torch.distributed.checkpoint` reads --------------------------------------


def place_in(file: str, start: int, length: int) -> Any:
    """Return the entry of an index that says where a chunk is: bytes `start` … of `file`.

    Importing `torch.distributed.checkpoint` takes seconds, so only this function does it.
    """
    filesystem = importlib.import_module("torch.distributed.checkpoint.filesystem")
    return filesystem._StorageInfo(file, start, length)
