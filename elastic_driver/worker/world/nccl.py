"""NCCL for the CUDA tensors of a round: the choice of the backend, torch's calls, the orderly end.

Gloo is always there: it connects the processes, carries CPU tensors, the state and the agreement of
every round, and breaks in place (`groups`). NCCL carries CUDA tensors beside it, in a second half
of torch's process group: where the script asks for it or, if the script asks for nothing, in rounds
in which every worker has a GPU of its own. That half differs from gloo in three ways:

- The processor runs ahead: the result of a collective is there only when the device has *settled*.
  A collective that is cut off leaves garbage, with which the device would go on computing. So the
  training thread settles before the optimizer touches the parameters, and gets an error there.
- A lost peer ends nothing by itself: the device waits until this half is *cut off*. That takes up
  to a second and wakes the training thread, so it runs on a thread of its own.
- No worker may build the next group while another is still in the old one: READY comes last.

`DeviceHalf` keeps the order of these steps. Times are seconds.

Pitfalls of torch's calls (docs/nccl.md lists what was tried on a GPU):

- Torch makes its `ProcessGroupNCCL` with the group, without contacting the peers; they connect in
  `eager_connect_single_device`. Left to the first collective, that would happen on the training
  thread, where nothing can end it.
- A lost peer shows in torch's watchdog thread. By default that thread ends the process, or sleeps
  for a minute and holds a lock that every collective needs; see `_VARIABLES`.
- `abort()` on each backend ends its work. After that only `_abort_process_group()` makes torch drop
  the group: `destroy_process_group()` shuts down, which waits.
"""

import math
import os
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from elastic_driver.errors import UsageError, WorldBrokenError
from elastic_driver.worker.worker_log import say

_GLOO_ONLY = ({"gloo"}, {"cpu:gloo"}, {"cpu:gloo", "cuda:gloo"})
_WITH_NCCL = ({"nccl"}, {"cuda:nccl"}, {"cpu:gloo", "cuda:nccl"})
# Torch reads them whenever it makes a ProcessGroupNCCL: `elastic.init()` is early enough.
_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # an error ends neither the process nor the group
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does a watchdog that waits for a device
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # nor does a watchdog that meets one
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no dumps, and no asking the store whether to dump
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else it sleeps four times as long on an error
}
# These make torch turn its own error handling on again.
_CONFLICTING = {"TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
CUT_OFF_S = 20.0  # longer than any cut-off takes; a worker that needs more has to end
# Errors that would occur in every other round, too.
_MISUSE = ("ncclInvalidUsage", "ncclInvalidArgument", "invalid usage", "no GPUs found")


class Nccl:
    """NCCL between the workers' devices, one device each; one object for all rounds."""

    backends = "cuda:nccl"  # as `init_process_group` takes it

    def __init__(self, index: int) -> None:
        """`index`: this worker's device among those that CUDA sees."""
        self._device = torch.device("cuda", index)
        # Keep torch's watchdog from ending the process.
        for name, value in _VARIABLES.items():
            if (found := os.environ.setdefault(name, value)) != value:
                say(f"{name}={found} is for jobs that end with a lost peer; using {value}")
                os.environ[name] = value
        for name, value in _CONFLICTING.items():
            if os.environ.get(name, "").upper() == value:
                say(f"{name}={value} makes torch end this worker when a peer is lost; unset it")

    def identity(self) -> str:
        """Return a name that no other worker's device has, on any host."""
        uuid = torch.cuda.get_device_properties(self._device).uuid
        return f"{os.environ.get('NCCL_HOSTID', '')}/{uuid}"

    def begin(self) -> None:
        """Select the device before torch makes this round's group; on the training thread.

        The script's allocations that name no device go there, too.
        """
        torch.cuda.set_device(self._device)

    def connect(self) -> None:
        """Connect to the peers; may block for ever, so it runs on a thread of its own.

        Raises `UsageError` where NCCL refuses the devices.
        """
        torch.cuda.set_device(self._device)  # of this thread
        backend = c10d._get_default_group()._get_backend(self._device)
        try:
            backend.eager_connect_single_device(self._device)
        except (RuntimeError, ValueError) as error:
            if any(text in str(error) for text in _MISUSE):
                reason = str(error).strip().splitlines()[-1]  # NCCL's own words come last
                raise UsageError(
                    f"NCCL refuses {self._device} of this worker: {reason}; each worker "
                    "needs a GPU of its own (see CUDA_VISIBLE_DEVICES), or use backend='gloo'"
                ) from error
            raise

    def settle(self) -> None:
        """Wait for the stream that the optimizer is going to use; on the training thread."""
        torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        """Abort the communicators of all groups and subgroups, as torch does; any thread."""
        names = dict(c10d._world.pg_names)
        newest_first = sorted(names, key=lambda group: names[group], reverse=True)
        backends = [
            group._get_backend(self._device)
            for group in newest_first
            if any(device.type == "cuda" for device in group._device_types)
        ]
        if not backends:
            return
        backends[0]._group_start()  # several of one device must be aborted as one: pytorch#119797
        try:
            for backend in backends:
                backend.abort()
        finally:
            backends[0]._group_end()

    def forget(self) -> None:
        """Make torch drop the aborted groups without waiting; on the training thread."""
        c10d._abort_process_group()


class DeviceHalf:
    """The half of one round's group that carries CUDA tensors; thread-safe."""

    def __init__(self, device: Nccl) -> None:
        self.device = device
        self.reason: str | None = None  # of the cut-off, once it has begun
        self._lock = threading.Lock()
        self._deadline = math.inf  # of the cut-off
        self._ended = threading.Event()
        self._error: str | None = None  # why the cut-off failed

    def settle(self) -> None:
        """Wait until the device has done its work; called on the training thread.

        Raises `WorldBrokenError` where it was cut off: its results are garbage then.
        """
        self.device.settle()
        if self.reason is not None:
            raise WorldBrokenError(f"the group was left while the device worked: {self.reason}")

    def cut_off(self, reason: str) -> None:
        """Begin to end all work of the group and return at once; the first call counts."""
        with self._lock:
            if self.reason is not None:
                return
            self._deadline = time.monotonic() + CUT_OFF_S
            self.reason = reason  # before anything ends: garbage must not count as a result

        def abort() -> None:
            try:
                self.device.abort()
            except Exception as error:  # `problem` returns it
                text = str(error).partition("\n")[0]
                self._error = f"its device's group could not be ended: {text}"
            self._ended.set()

        threading.Thread(target=abort, name="elastic-cut-off", daemon=True).start()

    def problem(self) -> str | None:
        """Return why this process can join no other group: the cut-off failed or is late.

        None if it can. Any thread: the training thread may wait for a device that waits for us.
        """
        if not self._ended.is_set() and time.monotonic() >= self._deadline:
            return f"its device's group was not ended within {CUT_OFF_S:g} s"
        return self._error

    def wait_until_cut_off(self) -> None:
        """After `cut_off`, wait until the device writes nothing any more, or there is a `problem`.

        Called on the training thread.
        """
        ended = self._ended.wait(max(0.0, self._deadline - time.monotonic()))
        if ended and self._error is None:
            self.device.settle()


@dataclass(frozen=True)
class BackendChoice:
    """The device half of this worker's groups; None: gloo carries everything.

    `by_vote`: the half exists only in rounds in which every worker votes with a device, because
    the script has not asked for it.
    """

    device: Nccl | None = None
    by_vote: bool = False


def choose_backend(backend: str | None, slot: int) -> BackendChoice:
    """Return the choice of the worker in this slot.

    `backend`: a name as torch's `init_process_group` takes it; None: not specified. Raises
    `UsageError` for an unknown name, and where it names NCCL and there is no GPU.
    """
    names = set((backend or "nccl").lower().replace(" ", "").split(","))
    if names in _GLOO_ONLY:
        return BackendChoice()
    if names not in _WITH_NCCL:
        known = "gloo, nccl, or cpu:gloo,cuda:nccl"
        raise UsageError(f"backend {backend!r} is not supported; use one of {known}")
    index = device_of(slot)
    if index is not None:
        return BackendChoice(Nccl(index), by_vote=backend is None)
    if backend is None:
        # Where torch has no NCCL at all, no worker of the job has it, and no vote is needed.
        return BackendChoice(by_vote=dist.is_nccl_available())
    if not dist.is_nccl_available():
        raise UsageError(f"backend {backend!r} needs a torch that is built with NCCL; use gloo")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    raise UsageError(
        f"backend {backend!r} needs a GPU for each worker, and slot {slot} has none{seen}; "
        "start no more workers on a host than it has GPUs, or use gloo"
    )


def device_of(slot: int) -> int | None:
    """Return the visible device of the worker in this slot; None without a GPU or NCCL.

    If the launcher shows each worker one device only, or the script uses a device already, it is
    that one. Reads the number of devices from NVIDIA's driver and does not start CUDA.
    """
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return None
    if torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    devices = torch.cuda.device_count()
    if slot < devices:
        return slot
    return 0 if devices == 1 else None
