"""The number of workers that the job aims at, and the slots that it may use. Memory is bytes.

`Capacity` has the number. A user's figure (`elasticctl scale`, `elasticctl apply`) outranks what
`--auto-scale` proposes, until the user releases it. Rounds that are closed for a request do not
count towards `--reset-limit`.

`Inventory` has the slots of each host that discovery found or the Brain granted, `Limits` how many
of them the role may use. A plan may limit the workers of each host by number, and by
the processors and the memory that each worker needs. Agents report what their host has; until then
only the number counts. After a worker has run out of memory, a host gets no more workers than there
is memory for. Two limits are wishes, which do not keep a job from having the fewest workers that it
needs: those of hosts whose processors are too few, and of the memory that similar jobs took.
"""

from dataclasses import dataclass

from msgspec import structs

from elastic_driver.arithmetic import lowered
from elastic_driver.job import units
from elastic_driver.job.events import HostsGranted, SizeProposed, takes
from elastic_driver.job.fleet import Effects
from elastic_driver.kernel.tables import saved
from elastic_driver.settings import Settings
from elastic_driver.words import counted
from elastic_driver.words import log_events as log
from elastic_driver.words import wire_events as ev


@dataclass(slots=True)
class Inventory:
    """The slots of hosts, found or granted, their processors and memory, and their other names."""

    found: tuple[tuple[str, int], ...] = saved(())  # hosts with their slots
    newest_grant: int = saved(0)  # of the Brain; 0: there was none
    began: float = saved(0.0)  # the run's beginning as the Brain knows it
    receipt: str = saved("")  # of the newest grant
    too_small: tuple[str, int] | None = saved(None)  # see `HostsGranted`
    equipment: dict[str, tuple[int, int]] = saved(factory=dict)  # processors, memory
    machines: dict[str, str] = saved(factory=dict)  # host → machine, as agents say
    same: dict[str, str] = saved(factory=dict)  # another name of a host → the host

    def record_discovered(self, hosts: tuple[tuple[str, int], ...]) -> None:
        """Record the hosts there are; raises `StaleEvent` if the Brain says that."""
        if self.newest_grant:
            raise ev.StaleEvent("hosts were discovered, but the Brain grants those of this job")
        self.found = hosts

    def record_granted(self, grant: HostsGranted) -> None:
        """Record the slots of a grant; raises `StaleEvent` if a newer one was carried out."""
        if grant.number <= self.newest_grant:
            raise ev.StaleEvent(
                f"grant {grant.number} is stale: grant {self.newest_grant} was carried out"
            )
        self.newest_grant, self.found, self.began = grant.number, grant.hosts, grant.began
        self.too_small, self.receipt = grant.too_small, grant.receipt

    def forget_too_small(self) -> None:
        """Forget which host of the Brain's has too little memory, as the need is known better."""
        self.too_small = None

    def record_equipment(self, host: str, cpus: int, memory: int) -> bool:
        """Record what an agent has said of its host, 0: it does not know; return if it changed."""
        changed = self.equipment.get(host, (cpus, memory)) != (cpus, memory)
        self.equipment[host] = cpus, memory
        return changed

    def record_machine(self, host: str, machine: str) -> list[str]:
        """Record the machine of a host; return its other names, as far as agents have said."""
        if self.machines.get(host, machine) != machine:  # it is another machine now
            self.same = {name: kept for name, kept in self.same.items() if kept != host}
        self.machines[host] = machine
        return [name for name, its in self.machines.items() if its == machine and name != host]

    def merge(self, name: str, kept: str) -> None:
        """Merge two names of one machine: the host `kept` gets the slots of both."""
        self.same = {n: kept if k == name else k for n, k in self.same.items() if n != kept}
        self.same[name] = kept

    def slots(self) -> dict[str, int]:
        """Return the slots that were found, by host."""
        slots: dict[str, int] = {}
        for name, found in self.found:
            host = self.same.get(name, name)
            slots[host] = slots.get(host, 0) + found
        return slots


@dataclass(slots=True)
class Limits:
    """The most slots of each host for the role, by a plan, the memory and the processors."""

    inventory: Inventory
    plan: ev.PlanApplied | None = saved(None)
    memory_need: int = saved(0)  # of one more worker; 0: not known
    room: dict[str, int] = saved(factory=dict)  # the most workers that have the memory
    expected: int = saved(0)  # the memory of a worker, as similar jobs say; 0: not known
    fewer: dict[str, int] = saved(factory=dict)  # the most that do not wait for processors

    def forget_host(self, host: str) -> None:
        """Forget what was learned of a host: it is another machine now."""
        self.room.pop(host, None)
        self.fewer.pop(host, None)

    def set_plan(self, plan: ev.PlanApplied | None) -> None:
        """Set the user's plan; None removes it."""
        self.plan = plan

    def set_memory_need(self, need: int, room: dict[str, int]) -> None:
        """Set the memory that one more worker needs, and the most workers of each host."""
        self.memory_need = need
        self.room = room
        self.inventory.forget_too_small()

    def set_expected_memory(self, need: int) -> None:
        """Set the memory that a worker probably needs; 0: that is not known."""
        self.expected = need

    def memory_room(self) -> dict[str, int]:
        """Return the most workers that have the memory, of each host of which that is known."""
        return self._room_for(self.memory_need) | self.room

    def _room_for(self, need: int) -> dict[str, int]:
        """Return the most workers that need so much memory, by host; 0: that is not known."""
        if not need:
            return {}
        return {
            host: memory // need for host, (_, memory) in self.inventory.equipment.items() if memory
        }

    def set_starved(self, host: str, most: int) -> None:
        """Set the most workers of a host whose processors are too few for more."""
        self.fewer[host] = most

    def forget_starved(self) -> None:
        """Forget for which hosts the processors were too few."""
        self.fewer = {}

    def slots(self, plan: ev.PlanApplied | None, least: int) -> tuple[tuple[str, int], ...]:
        """Return the hosts with the slots that this plan leaves them.

        `least`: where wishes would leave fewer slots, they are passed over.
        """
        expected = {} if self.memory_need else self._room_for(self.expected)
        firm = lowered(self.inventory.slots(), self.memory_room(), self._planned(plan))
        found = lowered(firm, self.fewer, expected)
        return tuple((found if sum(found.values()) >= least else firm).items())

    def planned(self) -> dict[str, int]:
        """Return the most workers that the present plan allows, of each host that it limits."""
        return self._planned(self.plan)

    def _planned(self, plan: ev.PlanApplied | None) -> dict[str, int]:
        found: dict[str, int] = {}
        if plan is None:
            return found
        for host in dict.fromkeys((*self.inventory.slots(), *self.inventory.equipment)):
            cpus, memory = self.inventory.equipment.get(host, (0, 0))
            bounds = [] if plan.slots_per_host is None else [plan.slots_per_host]
            if plan.cpu_per_worker is not None and cpus:
                bounds.append(int(cpus / plan.cpu_per_worker))
            if plan.memory_per_worker is not None and memory:
                bounds.append(memory // plan.memory_per_worker)
            if bounds:
                found[host] = min(bounds)
        return found


# ---- the number of workers ---------------------------------------------------------------


@dataclass(slots=True)
class Capacity:
    """The number of workers that rounds aim at, and a mark that something has changed.

    A rule that changes slots, agents, workers or the number wanted calls `note_change`. `placement`
    and `membership` then look at all workers once, because that is O(workers).
    """

    settings: Settings
    effects: Effects
    target: int | None = saved(None)  # a user's wish; None: there is none
    plan: ev.PlanApplied | None = saved(None)  # of a user, until it is released
    newest_plan: int = saved(0)  # its number; 0: there was none
    proposed: int | None = saved(None)  # what --auto-scale has found so far; None: start_np
    requested: bool = saved(False)  # a change is under way that somebody asked for
    changed: bool = saved(True)  # leavers and agents are out of date
    placement_due: bool = saved(False)  # there may be slots for more workers
    spares_due: bool = saved(False)  # spares may be missing, or too many
    slots_to_refill: list[tuple[str, int]] = saved(factory=list)  # before all others
    unfit: dict[str, str] = saved(factory=dict)  # hosts whose workers do not fit, and why

    @property
    def wanted(self) -> int | None:
        """The number of workers wanted; None: as many as there are slots."""
        if self.target is not None:
            return self.target
        if self.settings.auto_scale:
            size = self.settings.start_np if self.proposed is None else self.proposed
            return self._within_limits(size)
        return self.most

    @property
    def least(self) -> int:
        """The fewest workers that the job trains with; a plan cannot go below --min-np."""
        planned = None if self.plan is None else self.plan.min
        return self._at_least(planned)

    @property
    def most(self) -> int | None:
        """The most workers the job may have; None: as many as there are slots.

        A plan cannot go beyond --max-np.
        """
        planned, most = None if self.plan is None else self.plan.max, self.settings.max_np
        if planned is None or most is None:
            return most if planned is None else planned
        return min(planned, most)

    def _at_least(self, planned: int | None) -> int:
        least, most = self.settings.min_np, self.settings.max_np
        if planned is None:
            return least
        return max(least, planned if most is None else min(planned, most))

    def at_most_wanted(self, need: int) -> int:
        """Return `need`, or the number wanted if that is less."""
        return need if self.wanted is None else min(need, self.wanted)

    @takes(ev.ScaleRequested)
    def on_scale_requested(self, event: ev.ScaleRequested) -> None:
        """Aim at another number of workers, within the limits; it outranks that of a plan."""
        asked, before = event.num_proc, self.wanted
        if asked is None:
            self.target = self.plan = None
            what = "the number of workers is left to the job again"
        else:
            if self.plan is not None:
                self.plan = structs.replace(self.plan, workers=None, min=None, max=None)
            self.target = self._within_limits(asked)
            what = in_words(self.target)
            if self.target != asked:
                what += f", as {asked} is beyond the limits"
        self._request(before)
        self.effects.announce(log.ScaleRequested(wanted=self.wanted), what)

    def on_plan_applied(self, event: ev.PlanApplied, slots: int) -> None:
        """Aim at the numbers of a plan; `slots`: how many it leaves.

        Raises `StaleEvent` for one that is not newer than all before, or leaves too few.
        """
        if event.number <= self.newest_plan:
            raise ev.StaleEvent(
                f"plan {event.number} is stale: plan {self.newest_plan} was carried out"
            )
        least = self._at_least(event.min)
        if slots < least and (event.min or event.limits_hosts):
            left = counted(slots, "slot")
            raise ev.StaleEvent(f"plan {event.number} leaves {left}, fewer than the {least} needed")
        before = self.wanted
        self.plan, self.newest_plan = event, event.number
        self.target = None if event.workers is None else self._within_limits(event.workers)
        self._request(before)

    @takes(SizeProposed)
    def on_size_proposed(self, event: SizeProposed) -> None:
        """Aim at the number of workers that `--auto-scale` proposes, unless a user has chosen."""
        before, self.proposed = self.wanted, self._within_limits(event.num_proc)
        if self.wanted == before:
            return
        self._request(before)
        what = f"{in_words(self.proposed)}: {event.reason}"
        self.effects.announce(log.SizeProposed(wanted=self.proposed), what)

    def _request(self, before: int | None) -> None:
        self.changed = True
        self.unfit.clear()  # the user may have mended the script
        self.requested = self.requested or self.wanted != before

    def note_hosts_limited(self) -> None:
        """Record that a plan has changed the slots of hosts."""
        self.changed = self.requested = True

    def mark_request_settled(self) -> None:
        """Record that the job has the number of workers that was asked for, or cannot now."""
        self.requested = False

    def _within_limits(self, size: int) -> int:
        least = max(size, self.least, units.width(self.settings))
        return least if self.most is None else min(least, self.most)

    def note_change(self, vacated: tuple[str, int] | None = None) -> None:
        """Mark leavers, agents and free slots as out of date; `vacated` is refilled first."""
        self.changed = True
        if vacated is not None:
            self.slots_to_refill.append(vacated)

    def mark_unfit(self, host: str, why: str) -> None:
        """Start no more workers on a host: one there could not take over the state."""
        self.unfit[host], self.changed = why, True

    def begin_anew(self) -> None:
        """Record that no worker lives: new ones have no state to take over."""
        self.unfit.clear()

    def mark_settled(self, *, placing: bool) -> None:
        """Record that leavers and agents are up to date; `placing`: workers may be started."""
        self.changed, self.placement_due, self.spares_due = False, placing, True

    def begin_placing(self) -> None:
        """Record that the free slots are filled now."""
        self.placement_due = False

    def mark_spares_settled(self) -> None:
        """Record that the spares are as they have to be."""
        self.spares_due = False

    def mark_placed(self) -> None:
        """Record that workers were started in the free slots."""
        self.slots_to_refill.clear()


def in_words(workers: int) -> str:
    """Return a number of workers as people read it."""
    return counted(workers, "worker")
