"""What the database keeps of a whole job, and of nodes, beside their figures over time. Pure.

Times are unix seconds, memory is in bytes.
"""

from collections.abc import Iterable
from typing import NamedTuple

from elastic_driver.brain.algorithm import SpeedAt
from elastic_driver.brain.documents import Kind

FRESH_S = 30.0  # a node's figures that are older place nothing
CLOSE = 0.95  # a size this near to the fastest one is as good


class Record(NamedTuple):
    """One job: what it trains, within which limits, how fast it was, and how it has ended.

    `micro_batches`: into which a step of a fixed batch is divided. `memory`: the most that one of
    its workers had. `ended` and `exit_code` are None while it runs, and for ever if its driver was
    killed.
    """

    kind: Kind
    least: int = 1
    most: int | None = None
    micro_batches: int | None = None
    memory: int | None = None
    speeds: tuple[SpeedAt, ...] = ()
    ended: float | None = None
    exit_code: int | None = None

    def rate(self, speed: SpeedAt) -> float:
        """Return the work per second at a measured size: batches, or those of all workers."""
        return work_of(speed.size, self.micro_batches) / speed.step_time

    @property
    def best(self) -> int | None:
        """The smallest size that was within 5 % of the fastest one; None: none was measured."""
        if not self.speeds:
            return None
        fastest = max(self.rate(speed) for speed in self.speeds)
        return min(each.size for each in self.speeds if self.rate(each) >= CLOSE * fastest)


class Node(NamedTuple):
    """One machine at the time `seen`; None: not known.

    `slots` are all of them, `idle` those that nobody uses. `cpu` is the part of its processors that
    is in use.
    """

    name: str
    seen: float
    slots: int | None = None
    idle: int | None = None
    cpu: float | None = None
    memory_free: int | None = None
    memory_total: int | None = None


def work_of(size: int, micro_batches: int | None) -> float:
    """Return the batches of one step: without a fixed batch, each worker brings its own."""
    return 1.0 if micro_batches is not None else float(size)


def in_order(speeds: Iterable[SpeedAt]) -> tuple[SpeedAt, ...]:
    """Return speeds by size, then by hosts."""
    return tuple(sorted(speeds, key=lambda speed: (speed.size, speed.hosts)))
