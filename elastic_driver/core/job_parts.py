"""The parts of a job: tables of what is known, and the rules that decide.

Each part owns its state and alone writes it; other parts read it, or call methods of its owner
(tests/core/test_ownership.py). The fields of a part that have no default name the parts it needs.
"""

from dataclasses import MISSING, fields
from typing import TypeVar

from elastic_driver.core.rules.adoption import Adoption
from elastic_driver.core.rules.agents import Agents
from elastic_driver.core.rules.boundary import Boundary
from elastic_driver.core.rules.capacity import Capacity
from elastic_driver.core.rules.differences import Differences
from elastic_driver.core.rules.discovered import Discovered, Rechecks
from elastic_driver.core.rules.drain import Drains
from elastic_driver.core.rules.effects import Effects
from elastic_driver.core.rules.fleet import Fleet
from elastic_driver.core.rules.hangs import Hangs, Stacks
from elastic_driver.core.rules.host_limits import HostLimits
from elastic_driver.core.rules.hosts import HostManager
from elastic_driver.core.rules.membership import Membership
from elastic_driver.core.rules.memory import Memory
from elastic_driver.core.rules.notices import Notices
from elastic_driver.core.rules.outcome import Budget, JobOutcome
from elastic_driver.core.rules.placement import Placement
from elastic_driver.core.rules.plain import Plain
from elastic_driver.core.rules.preemption import FinalSaves, Preemption
from elastic_driver.core.rules.reports import Reports
from elastic_driver.core.rules.rounds import Rounds
from elastic_driver.core.rules.spares import Spares
from elastic_driver.core.rules.suspicion import Suspicion
from elastic_driver.core.rules.unanswered import Unanswered
from elastic_driver.core.rules.unreachable import Unreachable
from elastic_driver.core.rules.waits import Waits
from elastic_driver.core.rules.workers import WorkerStateRegistry
from elastic_driver.core.snapshots import Restorable
from elastic_driver.core.tf_config import TfLayout
from elastic_driver.settings import Settings

Part = TypeVar("Part")


class JobParts(Restorable):
    """Every part of one job; each needs only parts above it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tf = None if settings.tf_roles is None else TfLayout(settings.tf_roles)
        self.hosts = HostManager(settings)
        self.limits = HostLimits()
        self.fleet = Fleet()
        self.workers = WorkerStateRegistry()
        self.effects = self._make(Effects)
        self.capacity = self._make(Capacity)
        self.budget = Budget(settings)
        self.outcome = self._make(JobOutcome)
        self.rounds = self._make(Rounds)
        self.boundary = self._make(Boundary)
        self.rechecks = self._make(Rechecks)
        self.differences = self._make(Differences)
        self.discovered = self._make(Discovered)
        self.reports = self._make(Reports)
        self.memory = self._make(Memory)
        self.stacks = self._make(Stacks)
        self.hangs = self._make(Hangs)
        self.drains = self._make(Drains)
        self.notices = self._make(Notices)
        self.placement = self._make(Placement)
        self.spares = self._make(Spares)
        self.unreachable = self._make(Unreachable)
        self.unanswered = self._make(Unanswered)
        self.agents = self._make(Agents)
        self.suspicion = self._make(Suspicion)
        self.final_checkpoint = self._make(FinalSaves)
        self.preemption = self._make(Preemption)
        self.plain = self._make(Plain)
        self.membership = self._make(Membership)
        self.waits = self._make(Waits)
        self.adoption = self._make(Adoption)

    def _make(self, part: type[Part]) -> Part:
        """Create a part with the parts that it needs."""
        needed = (f.name for f in fields(part) if f.default is f.default_factory is MISSING)  # type: ignore[arg-type]
        return part(**{name: getattr(self, name) for name in needed})
