"""The second half of a round's process group: an accelerator's collectives, and their orderly end.

Gloo is always there: it connects the processes, carries CPU tensors, the state and the agreement of
every round, and breaks in place (`groups`). The accelerator's own library carries its tensors, in a
second half of torch's process group: where the script asks for it or, if the script asks for
nothing, in rounds in which every worker has a device of its own (`groups`). That half differs from
gloo in three ways:

- The processor runs ahead: the result of a collective is there only when the device has *settled*.
  A collective that is cut off leaves garbage, with which the device would go on computing. So the
  training thread settles before the optimizer touches the parameters, and gets an error there.
- A lost peer ends nothing by itself: the device waits until this half is *cut off*. That takes up
  to a second and wakes the training thread, so it runs on a thread of its own.
- No worker may build the next group while another is still in the old one: READY comes last.

`DeviceHalf` keeps the order of these steps, `Accelerator` makes the calls with the names that torch
has for every device (`torch.accelerator`); `nccl` knows more about its own. Times are seconds.
"""

import contextlib
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from elastic_driver.contract import VISIBLE_DEVICES
from elastic_driver.errors import WorldBrokenError
from elastic_driver.worker import torch_seams

CUT_OFF_S = 20.0  # longer than any cut-off takes; a worker that needs more has to end


class Accelerator:
    """Collectives between the workers' devices, one device each; one object for all rounds."""

    def __init__(self, kind: str, backend: str, index: int) -> None:
        """Name the device.

        Args:
            kind: torch's name of the type of device, such as "xpu".
            backend: torch's name of its collectives, such as "xccl".
            index: of this worker's device among those that it sees.
        """
        self.backends = f"{kind}:{backend}"  # as `init_process_group` takes it
        self._device = torch.device(kind, index)
        self._module = torch.get_device_module(kind)
        self._opening: threading.Thread | None = None

    def open(self) -> None:
        """Begin to open the device, on a thread of its own; `connect` waits for that.

        It takes 0.2 to 0.5 s on a GPU, for which the other members of a newcomer's round need not
        wait then.
        """
        self._opening = threading.Thread(target=self._open, name="elastic-open-device", daemon=True)
        self._opening.start()

    def _open(self) -> None:
        with contextlib.suppress(RuntimeError):  # `connect` meets it again
            self._module.set_device(self._device)
            torch.empty(1, device=self._device)

    def identity(self) -> str:
        """Return a name that no other worker's device has, on any host."""
        seen = [os.environ.get(name, "") for name in VISIBLE_DEVICES]
        return "/".join((platform.node(), *seen, str(self._device)))

    def begin(self) -> None:
        """Select the device before torch makes this round's group; on the training thread.

        The script's allocations that name no device go there, too.
        """
        self._module.set_device(self._device)

    def connect(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Connect to the peers; may block for ever, so it runs on a thread of its own.

        `is_over`: whether the round was given up meanwhile. What has been connected is aborted
        then: whoever gave the round up could not, and would never be rid of it.
        """
        if self._opening is not None:
            self._opening.join()
        self._module.set_device(self._device)  # of this thread
        backend = torch_seams.backend_for(torch_seams.default_group(), self._device)
        try:
            backend.eager_connect_single_device(self._device)  # if the backend can do that
            self._use_first(backend)
        finally:
            if is_over():
                backend.abort()

    def _use_first(self, backend: Any) -> None:
        """Carry out the first collectives of a group, if they connect anything; the same thread."""

    def settle(self) -> None:
        """Wait for the stream that the optimizer is going to use; on the training thread."""
        self._module.current_stream(self._device).synchronize()

    def synchronize(self) -> None:
        """Wait for all streams of the device; on the training thread."""
        self._module.synchronize(self._device)

    def abort(self) -> None:
        """Abort the communicators of all groups and subgroups; any thread.

        All at the same time: an abort frees memory, which waits for the whole device, also for the
        work of a communicator whose own abort has not begun (pytorch#119797).
        """
        errors: list[Exception] = []

        def abort(backend: Any) -> None:
            try:
                backend.abort()
            except Exception as error:  # raised below
                errors.append(error)

        threads = [
            threading.Thread(target=abort, args=(backend,), name="elastic-abort", daemon=True)
            for backend in self._backends()
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + CUT_OFF_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if errors:
            raise errors[0]
        if late := sum(thread.is_alive() for thread in threads):
            raise TimeoutError(
                f"{late} of {len(threads)} communicators were not aborted within {CUT_OFF_S:g} s"
            )

    def _backends(self) -> list[Any]:
        kind = self._device.type
        return [
            torch_seams.backend_for(group, self._device)
            for group in list(torch_seams.groups)
            if any(device.type == kind for device in torch_seams.device_types(group))
        ]

    def forget(self) -> None:
        """Make torch drop the aborted groups without waiting; on the training thread."""
        torch_seams.forget_groups()


class DeviceHalf:
    """The half of one round's group that carries the accelerator's tensors; thread-safe."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device
        self.reason: str | None = None  # of the cut-off, once it has begun
        self._lock = threading.Lock()
        self._deadline = math.inf  # of the cut-off
        self._ended = threading.Event()
        self._error: str | None = None  # why the cut-off failed

    def connect(self) -> None:
        """Connect the device to those of the peers; see `Accelerator.connect`."""
        self.device.connect(lambda: self.reason is not None)

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

    def is_ending(self) -> bool:
        """Return whether the cut-off has begun and not ended, nor failed; any thread."""
        return self.reason is not None and not self._ended.is_set()

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
            self.device.synchronize()  # work that a failed step left on other streams writes, too
