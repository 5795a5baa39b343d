"""A host that is about to go: what its agent makes of the signals that announce it.

Batch systems and clouds send SIGTERM before they take a machine away, Slurm also what
`--signal` names. The first such signal is passed on to the driver, which has the workers leave at
a step boundary and then lets this agent go. What has not left shortly before the time is over is
stopped. Owned by the agent; all on its loop. Times are seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from elastic_driver.core.events import HostLeaving
from elastic_driver.core.rules.notices import time_to_leave

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
ANNOUNCING = (signal.SIGTERM, *NOTICES)


def spare_workers() -> None:
    """Between a worker's fork and its exec: have it overlook the notices that are the agent's.

    Slurm sends a step's signals to all its processes, and by default a worker would die of them.
    A script that handles these signals itself goes on to do so.
    """
    if "SLURM_STEP_ID" in os.environ:
        for number in NOTICES:
            signal.signal(number, signal.SIG_IGN)


class Leaving:
    """Announces the host's end to the driver once, and sees that it is kept.

    Args:
        host: this host.
        incarnation: the agent's.
        notice: how long after the signal the host may go, more than 0.
        tell: takes the event for the driver.
        end: ends the agent: the signal's number, why, and the workers' grace.
        say: tells people a sentence.
    """

    def __init__(
        self,
        host: str,
        incarnation: int,
        notice: float,
        *,
        tell: Callable[[HostLeaving], None],
        end: Callable[[int, str, float], None],
        say: Callable[[str], None],
    ) -> None:
        self._host, self._incarnation, self._notice = host, incarnation, notice
        self._tell, self._end, self._say = tell, end, say
        self._timer: asyncio.TimerHandle | None = None

    def takes(self, number: signal.Signals) -> bool:
        """Whether a signal is, or repeats, an announcement; the agent ends for any other.

        A SIGTERM behind an announcement is no repetition: it is meant as usual.
        """
        if number not in ANNOUNCING:
            return False
        if self._timer is not None:
            return number != signal.SIGTERM
        patience = time_to_leave(self._notice)
        grace = self._notice - patience
        reason = f"its agent got {number.name}"
        self._tell(HostLeaving(self._host, self._incarnation, self._notice, reason))
        self._say(f"got {number.name}: leaving this host within {self._notice:g} s")
        late = f"got {number.name}, and workers were still here {patience:g} s later"
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(patience, self._end, number, late, grace)
        return True

    def over(self) -> None:
        """The agent ends; nothing more is to be watched."""
        if self._timer is not None:
            self._timer.cancel()
