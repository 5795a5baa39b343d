"""The parts of a job: tables of what is known, and the rules that decide.

Each part owns its state and alone writes it; other parts read it, or call methods of its owner
(tests/core/test_ownership.py). The fields of a part that have no default name the parts it needs.
"""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import msgspec

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
from elastic_driver.core.tf_config import TfLayout
from elastic_driver.kernel.tables import Snapshots, Tables, table, values
from elastic_driver.settings import Settings

Part = TypeVar("Part")
Made = TypeVar("Made", bound="JobParts")


class JobParts(Snapshots):
    """Every part of one job, in an order in which each needs only parts above it.

    `found`: the tables of a snapshot, by the names of the parts; a part that has none begins anew.
    """

    hosts: HostManager
    limits: HostLimits
    fleet: Fleet
    workers: WorkerStateRegistry
    effects: Effects
    capacity: Capacity
    budget: Budget
    outcome: JobOutcome
    rounds: Rounds
    boundary: Boundary
    rechecks: Rechecks
    differences: Differences
    discovered: Discovered
    reports: Reports
    memory: Memory
    stacks: Stacks
    hangs: Hangs
    drains: Drains
    notices: Notices
    placement: Placement
    spares: Spares
    unreachable: Unreachable
    unanswered: Unanswered
    agents: Agents
    suspicion: Suspicion
    final_checkpoint: FinalSaves
    preemption: Preemption
    plain: Plain
    membership: Membership
    waits: Waits
    adoption: Adoption

    def __init__(self, settings: Settings, found: Tables | None = None) -> None:
        self.settings, self.roles = settings, settings.tf_roles
        found = found or {}
        self.tf = None if self.roles is None else self._make(TfLayout, found.get("tf", {}))
        for name, kind in PARTS.items():
            setattr(self, name, self._make(kind, found.get(name, {})))

    def _make(self, part: type[Part], found: Tables) -> Part:
        """Create a part with the parts that it needs, and the state in its table."""
        needed = (f.name for f in fields(part) if f.default is f.default_factory is MISSING)  # type: ignore[arg-type]
        return part(**{name: getattr(self, name) for name in needed}, **values(part, found))

    def tables(self) -> Tables:
        """See `Snapshots.tables`."""
        parts = {name: getattr(self, name) for name in PARTS}
        if self.tf is not None:
            parts["tf"] = self.tf
        found = {name: table(part) for name, part in parts.items()}
        found = {name: state for name, state in found.items() if state}
        return {"settings": self.settings, **found}

    @classmethod
    def from_tables(cls: type[Made], found: Tables) -> Made:
        """See `Snapshots.from_tables`."""
        return cls(msgspec.convert(found["settings"], Settings), found)


PARTS: dict[str, Any] = {
    name: kind for name, kind in get_type_hints(JobParts).items() if is_dataclass(kind)
}
