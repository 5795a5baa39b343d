"""NCCL for the CUDA tensors of a round: what torch offers, and what it takes to survive a peer.

The calls and their pitfalls (docs/nccl.md says which of this was tried on a GPU):

- Torch makes its `ProcessGroupNCCL` with the group, without a word to the peers; they meet in
  `eager_connect_single_device`. Left to the first collective, that would happen on the training
  thread, where nothing can end it.
- A lost peer shows in torch's watchdog thread. Unless told otherwise that thread ends the process,
  or sleeps for a minute and holds a lock that every collective needs; see `_VARIABLES`.
- `abort()` on each backend ends what goes on. After that only `_abort_process_group()` lets torch
  forget the group: `destroy_process_group()` shuts down, which waits.

Chosen by `backends`, driven through `devices`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elastic_driver.errors import UsageError
from elastic_driver.worker.worker_log import say

# Read whenever a ProcessGroupNCCL is made, so setting them in `elastic.init()` is early enough.
_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # an error ends neither the process nor the group
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does a watchdog that waits for a device
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # nor does a watchdog that meets one
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no dumps, and no asking the store whether to dump
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else it sleeps four times as long on an error
}
# These make torch turn its own error handling on again.
_CONTRARY = {"TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
# What no other round would mend.
_MISUSE = ("ncclInvalidUsage", "ncclInvalidArgument", "invalid usage", "no GPUs found")


class Nccl:
    """NCCL between the devices of the workers, one device each."""

    backends = "cuda:nccl"

    def __init__(self, index: int) -> None:
        """`index`: this worker's device, as CUDA counts those that are visible."""
        self._device = torch.device("cuda", index)
        _leave_errors_to_us()

    def identity(self) -> str:
        """The device's own name, and the host's where NCCL is told one."""
        uuid = torch.cuda.get_device_properties(self._device).uuid
        return f"{os.environ.get('NCCL_HOSTID', '')}/{uuid}"

    def begin(self) -> None:
        """Choose the device: what the script allocates without naming one is there."""
        torch.cuda.set_device(self._device)

    def connect(self) -> None:
        """Make the communicator; raises `UsageError` where NCCL refuses the devices."""
        torch.cuda.set_device(self._device)  # of this thread
        backend = c10d._get_default_group()._get_backend(self._device)
        try:
            backend.eager_connect_single_device(self._device)
        except (RuntimeError, ValueError) as error:
            if any(sign in str(error) for sign in _MISUSE):
                raise UsageError(
                    f"NCCL refuses {self._device} of this worker: {_last_line(error)}; each worker "
                    "needs a GPU of its own (see CUDA_VISIBLE_DEVICES), or use backend='gloo'"
                ) from error
            raise

    def settle(self) -> None:
        """Wait for the stream that the optimizer is going to use."""
        torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        """Abort the communicators of this group and of all its subgroups, as torch does."""
        backends = self._of_all_groups()
        with _together(backends):
            for backend in backends:
                backend.abort()

    def forget(self) -> None:
        """Drop torch's groups without waiting for anything."""
        c10d._abort_process_group()

    def _of_all_groups(self) -> list[Any]:
        """The NCCL backends, newest group first."""
        world = c10d._world
        names = dict(world.pg_names)
        return [
            group._get_backend(self._device)
            for group in sorted(names, key=lambda group: names[group], reverse=True)
            if any(device.type == "cuda" for device in group._device_types)
        ]


def _leave_errors_to_us() -> None:
    """Set what keeps torch's watchdog from ending the process; say where that changes something."""
    for name, value in _VARIABLES.items():
        if os.environ.setdefault(name, value) != value:
            say(f"{name}={os.environ[name]} is for jobs that end with a lost peer; using {value}")
            os.environ[name] = value
    for name, value in _CONTRARY.items():
        if os.environ.get(name, "").upper() == value:
            say(f"{name}={value} makes torch end this worker when a peer is lost; unset it")


@contextmanager
def _together(backends: list[Any]) -> Iterator[None]:
    """Several communicators of one device must be aborted as one (pytorch's issue 119797)."""
    if not backends:
        yield
        return
    backends[0]._group_start()
    try:
        yield
    finally:
        backends[0]._group_end()


def _last_line(error: Exception) -> str:
    """NCCL says what is wrong at the end, after torch has said where."""
    return str(error).strip().splitlines()[-1]


def device_of(slot: int) -> int | None:
    """The visible device of the worker in this slot, or None: no GPU for it, or no NCCL in torch.

    A launcher that shows each worker one device has chosen already, and so has a script that has
    a device in use. Asks the driver how many there are; does not start CUDA.
    """
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return None
    if torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    devices = torch.cuda.device_count()
    if slot < devices:
        return slot
    return 0 if devices == 1 else None
