"""Process groups: the groups that there are, their backends, and gloo's constructor."""

from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import OpType  # type: ignore[attr-defined] # it has no types
from torch.distributed import ProcessGroupGloo, Store
from torch.distributed import distributed_c10d as c10d

_POINT_TO_POINT = frozenset(map(int, (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)))
# group → (names of its backends, store); the same dictionary as long as torch is loaded.
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


def counter_of(group: Any, device: torch.device) -> Callable[[], int]:
    """Return what counts the collectives of a backend; a call raises RuntimeError if it cannot."""
    count: Callable[[], int] = group._get_backend(device)._get_sequence_number_for_group
    return count


def is_point_to_point(work: dist.Work) -> bool:
    """Return whether an operation is a send or a receive, and no collective."""
    return work._get_op_type() in _POINT_TO_POINT


def forget_all() -> None:
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
