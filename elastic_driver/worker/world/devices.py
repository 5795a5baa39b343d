"""The half of a process group that carries the tensors of an accelerator, and when it is cut off.

Every round has a gloo group: it connects the processes, moves state and CPU tensors, and breaks in
place (`groups`). Where the training asks for NCCL, torch's process group has a second half for
CUDA tensors, and what differs from gloo is the same for any such backend:

- The processor runs ahead. What a collective brings is there only when the device has *settled*;
  one that is cut off leaves garbage behind, which the device would go on computing with. So the
  training thread settles before the optimizer touches the parameters, and finds out there.
- A lost peer ends nothing by itself: the device waits until this half is *cut off*. That takes up
  to a second and wakes the training thread, so it is done from a thread of its own.
- Nobody may build the next group while somebody is still in the old one: READY is said last.

`Device` is what a backend has to provide, `DeviceHalf` keeps the order of these steps. `membership`
uses them; times are seconds.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from elastic_driver.errors import WorldBrokenError

CONNECT_S = 120.0  # for the peers to meet; an abandoned connection lives as long as it likes
CUT_OFF_S = 20.0  # more than any cut-off takes; a worker that needs longer is of no use


class Device(Protocol):
    """What a backend for an accelerator's tensors can do; one object for all rounds."""

    backends: str  # as torch wants it for `init_process_group`: "cuda:nccl"

    def identity(self) -> str:
        """A name that no other worker's device has, wherever it is."""

    def begin(self) -> None:
        """Torch is about to make this round's group; on the training thread."""

    def connect(self) -> None:
        """Meet the peers in the group torch has made; may block, so on a thread of its own.

        Raises `UsageError` for what no other round would mend.
        """

    def settle(self) -> None:
        """Wait until the device has done all that it was asked for; on the training thread."""

    def abort(self) -> None:
        """End everything that goes on in the group, and free it; from any thread, returns soon."""

    def forget(self) -> None:
        """Let torch drop the group that was aborted; on the training thread."""


class DeviceHalf:
    """One round's half of the group; thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._reason: str | None = None  # why it was cut off
        self._until = 0.0  # when that is to have been done
        self._ended = threading.Event()
        self._error: str | None = None  # what came of it instead

    def connect(self) -> None:
        """Meet the peers; see `Device.connect`."""
        self._device.connect()

    @property
    def is_cut_off(self) -> bool:
        """Whether `cut_off` was called: nothing that comes out of the device counts any more."""
        return self._reason is not None

    def settle(self) -> None:
        """Return when what the device was asked for is done.

        Raises `WorldBrokenError` where it was cut short: what it has written is garbage then.
        """
        self._device.settle()
        if self._reason is not None:
            raise WorldBrokenError(f"the group was left while the device worked: {self._reason}")

    def cut_off(self, reason: str) -> None:
        """Begin to end whatever goes on; returns at once, the first call counts. Any thread."""
        with self._lock:
            if self._reason is not None:
                return
            self._until = time.monotonic() + CUT_OFF_S
            self._reason = reason  # before anything ends, so that nobody takes garbage for sums
        threading.Thread(target=self._abort, name="elastic-cut-off", daemon=True).start()

    def trouble(self) -> str | None:
        """Why this process can be in no other group, or None: the cut-off fails, or takes for ever.

        Any thread; for the training thread may wait for the device, which waits for the cut-off.
        """
        if self._error is not None:
            return f"its device's group could not be ended: {self._error}"
        late = self._reason is not None and time.monotonic() >= self._until
        if late and not self._ended.is_set():
            return f"its device's group was not ended within {CUT_OFF_S:g} s"
        return None

    def wait_until_cut_off(self) -> None:
        """Return when the device writes nothing any more, or `trouble` is there.

        For the training thread, after `cut_off`.
        """
        while not self._ended.is_set() and self.trouble() is None:
            self._ended.wait(max(0.0, self._until - time.monotonic()))
        if self.trouble() is None:
            self._device.settle()

    def forget(self) -> None:
        """Let torch drop the group, once it is cut off."""
        self._device.forget()

    def _abort(self) -> None:
        try:
            self._device.abort()
        except Exception as error:  # for those who wait
            self._error = str(error).partition("\n")[0]
        self._ended.set()
