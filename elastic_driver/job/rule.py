"""A rule: a part of the job that decides. Every chapter above `rounds` consists of rules."""

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_driver.job.capacity import Capacity
from elastic_driver.job.fleet import Effects, Fleet
from elastic_driver.job.hosts import Hosts
from elastic_driver.job.outcome import Outcome
from elastic_driver.job.rounds import Rounds
from elastic_driver.job.workers import Workers
from elastic_driver.kernel.wait import Wait
from elastic_driver.settings import Settings


@dataclass(slots=True)
class Rule:
    """A part of the job that decides; it reads these parts, and writes only its own fields."""

    settings: Settings
    effects: Effects
    hosts: Hosts
    fleet: Fleet
    workers: Workers
    capacity: Capacity
    outcome: Outcome
    rounds: Rounds

    def advance(self, now: float) -> Iterable[Wait]:
        """Draw the consequences of the present state; called again until nothing changes.

        Return what the rule waits for: it is called again when the first of these waits is over.
        """
        return ()

    def is_needed(self, host: str) -> bool:
        """Return whether the other usable hosts are too few for the job to go on without it.

        An elastic job goes on with `min_np` workers, a plain one with the number wanted.
        """
        wanted, need = self.capacity.wanted, self.capacity.least
        if wanted is not None and not self.outcome.elastic:
            need = max(need, wanted)
        return self.hosts.slots_without(host) < need
