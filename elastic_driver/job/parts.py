"""The parts of a job: tables of what is known, and the rules that decide; what each takes in.

Each part owns its state and alone writes it; other parts read it, or call methods of its owner
(tests/job/test_ownership.py). The fields of a part that have no default name the parts it needs.

The name of an attribute is the name of the part's table in snapshots: to rename one would lose the
state of an older driver's job.

Hosts, what they have (`inventory`), agents, evidence, checks, the memory and the end (`ending`)
belong to the job. All other parts are of the one role that a job has now: its workers, rounds,
placement, budget, target size, losses, stalls, and the order in which they leave.
"""

from dataclasses import MISSING, fields, is_dataclass
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, TypeVar, get_type_hints

import msgspec

from elastic_driver.job.adoption import Adoption
from elastic_driver.job.boundary import Boundary, Differences
from elastic_driver.job.capacity import Capacity, Inventory, Limits
from elastic_driver.job.events import EventBatch, Taken, Tick, Turn
from elastic_driver.job.fleet import Effects, Fleet
from elastic_driver.job.hangs import Hangs, Stacks, Waits
from elastic_driver.job.hosts import Hosts
from elastic_driver.job.leaving import Drains, Notices
from elastic_driver.job.lost_hosts import Agents, Suspicion, Unanswered, Unreachable
from elastic_driver.job.membership import Membership
from elastic_driver.job.outcome import Budget, Ending, Outcome
from elastic_driver.job.placement import Placement, Spares
from elastic_driver.job.plain import Plain
from elastic_driver.job.preemption import FinalCheckpoint, Preemption
from elastic_driver.job.reports import Reports
from elastic_driver.job.rounds import Rounds
from elastic_driver.job.supply import Discovered, Memory, Rechecks
from elastic_driver.job.workers import Workers
from elastic_driver.kernel.machine import kinds
from elastic_driver.kernel.tables import Snapshots, Tables, table, values
from elastic_driver.settings import Settings
from elastic_driver.words.tf_config import TfLayout
from elastic_driver.words.wire_events import Event, WorkerReport

Part = TypeVar("Part")
Made = TypeVar("Made", bound="JobParts")


# What belongs to the job, and not to its role, has tables of its own since version 2.
_MOVED_IN_2 = {
    "ending": ("outcome", ("departure", "end")),
    "inventory": (
        "limits",
        ("found", "newest_grant", "began", "receipt", "too_small", "equipment", "machines", "same"),
    ),
}


def _to_2(tables: Tables) -> None:
    for new, (old, names) in _MOVED_IN_2.items():
        earlier = tables.get(old, {})
        tables[new] = {name: earlier.pop(name) for name in names if name in earlier}


class JobParts(Snapshots):
    """Every part of one job, in an order in which each needs only parts above it.

    `found`: the tables of a snapshot, by the names of the parts; a part that has none begins anew.
    """

    hosts: Hosts
    inventory: Inventory
    limits: Limits
    fleet: Fleet
    workers: Workers
    effects: Effects
    capacity: Capacity
    budget: Budget
    ending: Ending
    outcome: Outcome
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
    final_checkpoint: FinalCheckpoint
    preemption: Preemption
    plain: Plain
    membership: Membership
    waits: Waits
    adoption: Adoption

    VERSION = 2
    UPGRADES: ClassVar = {1: _to_2}

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


# ---- who takes in an event -------------------------------------------------------------------


class Taker(NamedTuple):
    """A method of a part that takes in an event, with its parameters beside `self`."""

    part: str
    method: str
    parameters: tuple[str, ...]


def _takers() -> dict[tuple[type[Event], bool], list[Taker]]:
    """Return, by the kind of event and whether a spare sent it, who takes it in, in order.

    Raises `TypeError` for a kind of event that is for no part, or for two.
    """
    found: dict[tuple[type[Event], bool], list[tuple[Turn, Taker]]] = {}
    for part, kind in PARTS.items():
        for name, method in vars(kind).items():
            taken: Taken | None = getattr(method, "taken", None)
            if taken is None:
                continue
            needed = method.__code__.co_argcount - len(method.__defaults__ or ())
            taker = Taker(part, name, method.__code__.co_varnames[1:needed])
            for event in taken.kinds:
                found.setdefault((event, taken.spare), []).append((taken.turn, taker))
    found[Tick, False] = []  # only time has passed: the rules draw the consequences
    for event in kinds(Event):
        owners = sum(turn is Turn.OWNER for turn, _ in found.get((event, False), ()))
        if owners != 1 and event not in (Tick, EventBatch):
            raise TypeError(f"{owners} parts take in {event.__name__}; it is for one")
    in_turn = {k: [t for _, t in sorted(v, key=itemgetter(0))] for k, v in found.items()}
    reports = ((event, takers) for (event, _), takers in in_turn.items())
    # What spares report is taken in like that of other workers where nothing else is said.
    of_spares = {(event, True): t for event, t in reports if issubclass(event, WorkerReport)}
    return of_spares | in_turn


TAKERS = _takers()
