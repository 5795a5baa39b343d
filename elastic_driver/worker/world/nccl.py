"""NCCL for CUDA tensors: what it needs beyond the calls that all accelerators have (`device`).

Pitfalls of torch's calls (docs/nccl.md lists what was tried on a GPU):

- Torch makes its `ProcessGroupNCCL` with the group, without contacting the peers; they connect in
  `eager_connect_single_device`. Left to the first collective, that would happen on the training
  thread, where nothing can end it.
- A lost peer shows in torch's watchdog thread. By default that thread ends the process, or sleeps
  for a minute and holds a lock that every collective needs; see `_VARIABLES`.
- `abort()` on each backend ends its work, and waits for the work of all others on the device: see
  `Accelerator.abort`. After that only `_abort_process_group()` makes torch drop
  the group: `destroy_process_group()` shuts down, which waits.

NCCL's proxy threads hold an abort up. A communicator has a thread that serves requests of its
host's ranks over TCP, and one for messages over a Unix socket. Both sleep in `poll()` for 500 ms at
a time. They look whether the communicator is aborted only when `poll()` returns, and the first one
goes back into it once more, so an abort of NCCL waits for them that long when the device has been
free for long (NCCL's `src/proxy.cc`, 2.28 to 2.30). `ProxyThreads` wakes them: a connection that is
closed at once, and an empty datagram, end that sleep. NCCL takes both for strangers, as it does
with a port scan. Of a connection that it accepts while it aborts, it forgets the descriptor:
`wake_until` closes those. This works on Linux only; elsewhere nothing is found, and an abort takes
its time. Times are seconds.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from elastic_driver.errors import UsageError
from elastic_driver.worker.current import say
from elastic_driver.worker.world.device import Accelerator
from elastic_driver.worker.world.gloo import open_sockets

KIND, BACKEND = "cuda", "nccl"
FIRST_SIZES = 1, 2**18, 2**22  # elements; NCCL chooses its ways by the size
ROOM_BYTES = 2**30  # outside of torch's cache; a communicator takes less
SPIN_S = 0.002  # before a wait for the device sleeps
# Torch reads them whenever it makes a ProcessGroupNCCL: `elastic.init()` is early enough.
_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # an error ends neither the process nor the group
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does a watchdog that waits for a device
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # nor does a watchdog that meets one
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no dumps, and no asking the store whether to dump
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else it sleeps four times as long on an error
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # else it asks the store ten times a second
    "TORCH_DIST_USE_NCCL2": "0",  # another backend, whose watchdog ends the process
}
# Defaults, with what another value may cost.
_DEFAULTS = {
    "NCCL_NVLS_ENABLE": ("0", "the loss of a peer may end this worker, too, where GPUs use NVLink"),
}
# These make torch turn its own error handling on again.
_CONFLICTING = {"TORCH_NCCL_DESYNC_DEBUG": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
# Errors that would occur in every other round, too.
_MISUSE = ("ncclInvalidUsage", "ncclInvalidArgument", "invalid usage", "no GPUs found")


class Nccl(Accelerator):
    """NCCL between the workers' GPUs."""

    def __init__(self, index: int) -> None:
        """`index`: this worker's device among those that CUDA sees."""
        super().__init__(KIND, BACKEND, index)
        self._event: Any = None  # is reused
        self._threads = ProxyThreads()  # of this round's communicator; none yet
        # Keep torch's watchdog from ending the process.
        for name, value in _VARIABLES.items():
            if (found := os.environ.setdefault(name, value)) != value:
                say(f"{name}={found} is for jobs that end with a lost peer; using {value}")
                os.environ[name] = value
        for name, (value, cost) in _DEFAULTS.items():
            if (found := os.environ.setdefault(name, value)) != value:
                say(f"{name}={found}, which is not our default of {value}: {cost}")
        for name, value in _CONFLICTING.items():
            if os.environ.get(name, "").upper() == value:
                say(f"{name}={value} makes torch end this worker when a peer is lost; unset it")

    def identity(self) -> str:
        """See `Accelerator.identity`; a GPU has a name of its own."""
        uuid = self._module.get_device_properties(self._device).uuid
        return f"{os.environ.get('NCCL_HOSTID', '')}/{uuid}"

    def begin(self) -> None:
        """See `Accelerator.begin`. Makes room for NCCL, which cannot use what torch keeps."""
        super().begin()
        kept = self._module.memory_reserved(self._device)  # 0 as long as the device is not open
        if kept and self._module.mem_get_info(self._device)[0] < ROOM_BYTES:
            self._module.empty_cache()

    def connect(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """See `Accelerator.connect`. Raises `UsageError` where NCCL refuses the devices."""
        self._threads = ProxyThreads()
        try:
            super().connect(is_over)
            self._threads.finish()
        except (RuntimeError, ValueError) as error:
            if any(text in str(error) for text in _MISUSE):
                reason = str(error).strip().splitlines()[-1]  # NCCL's own words come last
                raise UsageError(
                    f"NCCL refuses {self._device} of this worker: {reason}; each worker "
                    "needs a GPU of its own (see CUDA_VISIBLE_DEVICES), or use backend='gloo'"
                ) from error
            raise

    def _use_first(self, backend: Any) -> None:
        """See `Accelerator._use_first`: NCCL connects rings and trees in their first collective.

        On the training thread a peer that dies meanwhile would leave that inside of NCCL, whose
        memory an abort frees.
        """
        values = [torch.zeros(size, device=self._device) for size in FIRST_SIZES]
        for each in values:
            backend.allreduce([each])
            backend.broadcast([each])
        self._module.synchronize(self._device)

    def abort(self) -> None:
        """See `Accelerator.abort`."""
        ended = threading.Event()
        wake = partial(self._threads.wake_until, ended)
        threading.Thread(target=wake, name="elastic-wake-nccl", daemon=True).start()
        try:
            super().abort()
        finally:
            ended.set()

    def settle(self) -> None:
        """See `Accelerator.settle`; a thread that waits longer than `SPIN_S` sleeps.

        CUDA's own waits keep a core busy. Those that sleep end up to 0.3 ms late.
        """
        if self._module.is_current_stream_capturing():  # a wait would make the capture void
            return
        if self._event is None:
            self._event = self._module.Event(blocking=True)
        event = self._event
        event.record(self._module.current_stream(self._device))
        until = time.perf_counter() + SPIN_S
        while not event.query():
            if time.perf_counter() >= until:
                event.synchronize()
                return
            time.sleep(0)  # for this process' other threads


# ---- NCCL's proxy threads --------------------------------------------------------------

FIRST_S, EVERY_S = 0.02, 0.02  # an abort tells the threads at once; none of them needs two calls
AT_MOST = 50  # calls; an abort that takes longer does not wait for these threads
Address = tuple[socket.AddressFamily, socket.SocketKind, Any]  # the last is Python's


class ProxyThreads:
    """The sockets on which the threads of one communicator wait: those that appeared with it."""

    def __init__(self) -> None:
        self._before = frozenset(inode for inode, _ in open_sockets())
        self._addresses: dict[int, Address] = {}  # by inode
        self._calls: set[tuple[Any, Any]] = set()  # to which address, and from where

    def finish(self) -> None:
        """Find the sockets that were made since this object."""
        for inode, descriptor in open_sockets():
            if inode not in self._before:
                with contextlib.suppress(OSError):  # closed meanwhile
                    self._note(inode, descriptor)

    def wake_until(self, ended: threading.Event) -> None:
        """Wake the threads again and again, until `ended`."""
        pause = FIRST_S
        for _ in range(AT_MOST):
            if ended.wait(pause):
                break
            pause = EVERY_S
            for inode, _ in open_sockets():
                if inode in self._addresses:  # else its number may be another program's by now
                    self._knock(*self._addresses[inode])
        ended.wait()  # until then NCCL may close them itself
        self._close_forgotten()

    def _note(self, inode: int, descriptor: int) -> None:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            datagrams = found.family == socket.AF_UNIX and found.type == socket.SOCK_DGRAM
            listens = found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            )
            if (datagrams or listens) and (name := found.getsockname()):
                self._addresses[inode] = found.family, found.type, name

    def _knock(self, family: socket.AddressFamily, kind: socket.SocketKind, address: Any) -> None:
        """Make a socket of this process readable."""
        with contextlib.suppress(OSError), socket.socket(family, kind) as caller:
            caller.setblocking(False)
            if kind == socket.SOCK_DGRAM:
                caller.sendto(b"", address)
            else:
                caller.connect_ex(address)
                self._calls.add((address, caller.getsockname()))

    def _close_forgotten(self) -> None:
        """Close the other ends of our calls that are still open."""
        for _, descriptor in open_sockets():
            with contextlib.suppress(OSError):  # closed meanwhile, or no connection
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    ends = found.getsockname(), found.getpeername()
                if ends in self._calls:
                    os.close(descriptor)
        self._calls.clear()
