"""What a monitor of the Brain is: it looks at machines, and says how busy they are.

A monitor is named by an entry point of the group `elastic_driver.monitors`, which is called with
`MonitorOptions` and returns a `Monitor`; it raises UsageError for options it cannot work with.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from elastic_driver.brain.store.records import Node


class MonitorOptions(NamedTuple):
    """The options of a monitor. `hosts` come with their slots; none: those that it finds.

    `slots` of a host that is not named. `port` of what is asked on each host, if it asks there.
    Other machines are asked over TLS, by the CA in the file `ca` ("": those of the system), or in
    plain if `insecure`.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    slots: int | None = None
    port: int | None = None
    ca: str = ""
    insecure: bool = False

    def slots_of(self, host: str, found: int | None = None) -> int | None:
        """Return the slots of a host: as named, else `slots`, else what was found there."""
        return dict(self.hosts).get(host, found if self.slots is None else self.slots)


class Monitor(Protocol):
    """Looks at machines, each few seconds."""

    def look(self, now: float) -> Sequence[Node]:
        """Return the figures of the machines that answer, seen now (unix seconds).

        It takes some seconds at most. Raises OSError or ValueError, with a phrase, if nothing can
        be learned.
        """
