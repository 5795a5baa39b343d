"""The figures of hosts for the Brain, from the database into which `elasticbrain monitor` writes.

A thread reads them; a database that is away costs the figures, and never holds the Brain up. A
figure that cannot be counts as not known. Times are unix seconds.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from elastic_driver.brain.algorithm import HostView
from elastic_driver.brain.documents import MOST_HOSTS
from elastic_driver.brain.messages import HostsMeasured

LOOK_S = 5.0  # between two looks into the database
MOST_COUNT = 2**53  # slots or bytes


class HostFigures:
    """Reads the newest figures again and again, and posts them; what fails is told once."""

    def __init__(
        self, database: Any, post: Callable[[HostsMeasured], None], say: Callable[[str], None]
    ) -> None:
        """Start nothing. `post` and `say` are called in this object's thread."""
        self._database, self._post, self._say = database, post, say
        self._stopping, self._failing = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="host-figures", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread, and wait for it up to `timeout` seconds."""
        self._stopping.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._post(HostsMeasured(self._read()))
            self._stopping.wait(LOOK_S)
        self._database.close()

    def _read(self) -> tuple[HostView, ...]:
        from elastic_driver.brain.store.failures import described  # noqa: PLC0415 - the extra

        try:
            nodes = self._database.nodes(time.time())
        except Exception as error:  # of any kind of database: it may come back
            if not self._failing:
                self._failing = True
                self._say(f"--stats-db cannot be read ({described(error)}); it is tried again")
            return ()
        if self._failing:
            self._failing = False
            self._say("--stats-db is read again")
        return tuple(map(host_view, nodes[:MOST_HOSTS]))


def host_view(node: Any) -> HostView:
    """Return what is known of a machine, by its `Node`."""
    cpu = node.cpu
    return HostView(
        name=node.name,
        slots=_count(node.slots) or 0,
        cpu=cpu if isinstance(cpu, float) and 0.0 <= cpu <= 1.0 else None,
        memory_free=_count(node.memory_free),
        idle=_count(node.idle),
    )


def _count(found: Any) -> int | None:
    return found if isinstance(found, int) and 0 <= found <= MOST_COUNT else None
