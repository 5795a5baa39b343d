"""The base of every rule: the settings, and the tables of hosts, agents, workers and rounds."""

from dataclasses import dataclass

from elastic_driver.core.rules.effects import Effects
from elastic_driver.core.rules.fleet import Fleet
from elastic_driver.core.rules.hosts import HostManager
from elastic_driver.core.rules.outcome import JobOutcome
from elastic_driver.core.rules.rounds import Capacity, Rounds
from elastic_driver.core.rules.workers import WorkerStateRegistry
from elastic_driver.settings import Settings


@dataclass(slots=True)
class Rule:
    """A part of the job that decides; reads these, and writes only its own fields."""

    settings: Settings
    effects: Effects
    hosts: HostManager
    fleet: Fleet
    workers: WorkerStateRegistry
    capacity: Capacity
    outcome: JobOutcome
    rounds: Rounds

    def advance(self, now: float) -> None:
        """Do what follows from the present state; called again until nothing changes."""
