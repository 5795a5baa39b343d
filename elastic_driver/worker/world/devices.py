"""The half of a process group that carries an accelerator's tensors, and its orderly end.

Every round has a gloo group: it connects the processes, moves state and CPU tensors, and breaks in
place (`groups`). Where the training uses NCCL, torch's process group has a second half for CUDA
tensors. It differs from gloo in three ways:

- The processor runs ahead: the result of a collective is there only when the device has *settled*.
  A collective that is cut off leaves garbage, with which the device would go on computing. So the
  training thread settles before the optimizer touches the parameters, and learns it there.
- A lost peer ends nothing by itself: the device waits until this half is *cut off*. That takes up
  to a second and wakes the training thread, so it runs on a thread of its own.
- Nobody may build the next group while somebody is still in the old one: READY comes last.

`DeviceHalf` keeps the order of these steps for the device, an `Nccl`. Times are seconds.
"""

from __future__ import annotations

import threading
import time

from elastic_driver.errors import WorldBrokenError
from elastic_driver.worker.world.nccl import Nccl

CUT_OFF_S = 20.0  # longer than any cut-off takes; a worker that needs more has to end


class DeviceHalf:
    """One round's half of the group; thread-safe."""

    def __init__(self, device: Nccl) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._reason: str | None = None  # of the cut-off, once it has begun
        self._deadline = 0.0  # of the cut-off
        self._ended = threading.Event()
        self._error: str | None = None  # why the cut-off failed

    @property
    def is_cut_off(self) -> bool:
        """Return whether `cut_off` was called: the device's results do not count any more."""
        return self._reason is not None

    def settle(self) -> None:
        """Wait until the device has done its work; called on the training thread.

        Raises `WorldBrokenError` where it was cut off: its results are garbage then.
        """
        self.device.settle()
        if self._reason is not None:
            raise WorldBrokenError(f"the group was left while the device worked: {self._reason}")

    def cut_off(self, reason: str) -> None:
        """Begin to end all work of the group and return at once; the first call counts."""
        with self._lock:
            if self._reason is not None:
                return
            self._deadline = time.monotonic() + CUT_OFF_S
            self._reason = reason  # before anything ends: nobody must take garbage for results
        threading.Thread(target=self._abort, name="elastic-cut-off", daemon=True).start()

    def problem(self) -> str | None:
        """Return why this process can join no other group: the cut-off failed or is late.

        None if it can. Any thread: the training thread may wait for a device that waits for us.
        """
        if self._error is not None:
            return f"its device's group could not be ended: {self._error}"
        late = self._reason is not None and time.monotonic() >= self._deadline
        if late and not self._ended.is_set():
            return f"its device's group was not ended within {CUT_OFF_S:g} s"
        return None

    def wait_until_cut_off(self) -> None:
        """After `cut_off`, wait until the device writes nothing any more, or there is a `problem`.

        Called on the training thread.
        """
        while not self._ended.is_set() and self.problem() is None:
            self._ended.wait(max(0.0, self._deadline - time.monotonic()))
        if self.problem() is None:
            self.device.settle()

    def _abort(self) -> None:
        try:
            self.device.abort()
        except Exception as error:  # `problem` returns it
            self._error = str(error).partition("\n")[0]
        self._ended.set()
