"""One timer on the event loop for whoever has many deadlines: it rings when the next one is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

RENEWAL_S = 1.0  # for renewals that wait in socket buffers to be read
_HELD_UP_S = 0.5  # a timer this late means that the loop itself stood still


class Alarm:
    """Calls `ring(now, stood_still)` on the loop, in the loop's time, once for each time it is set.

    `stood_still` is 0 as a rule, else the seconds for which the loop stood still (SIGSTOP,
    overload). Those who hold leases did not, and their renewals have had no chance to be read: put
    their leases off by as much, and `RENEWAL_S`.
    """

    def __init__(self, ring: Callable[[float, float], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, deadline: float | None) -> None:
        """Ring no later than `deadline`; None: nothing is due. Called on the loop.

        A timer that is set already and earlier stays: whoever it wakes for nothing sets it anew.
        """
        if deadline is None or (self._timer is not None and self._timer.when() <= deadline):
            return
        self.off()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._due, deadline)

    def off(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self, planned: float) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        late = now - planned
        self._ring(now, late if late > _HELD_UP_S else 0.0)
