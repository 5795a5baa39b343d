"""The slots that a plan, and the memory of hosts, leave of those found or granted by the Brain.

A plan may limit the workers of each host by number, and by the processors and the memory that each
worker needs. Agents report what their host has; until then only the number counts. After a worker
has run out of memory, a host gets no more workers than there is memory for. Memory is bytes.

Two limits are wishes, which do not keep a job from having the fewest workers that it needs: those
of hosts whose processors are too few, and of the memory that similar jobs took.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from elastic_driver.core import events as ev
from elastic_driver.core.driver_events import HostsGranted
from elastic_driver.kernel.tables import saved


@dataclass(slots=True)
class HostLimits:
    """Knows the hosts that discovery found, what they have, and the plan that limits them."""

    found: tuple[tuple[str, int], ...] = saved(())  # hosts with their slots
    newest_grant: int = saved(0)  # of the Brain; 0: there was none
    began: float = saved(0.0)  # the run's beginning as the Brain knows it
    receipt: str = saved("")  # of the newest grant
    plan: ev.PlanApplied | None = saved(None)
    equipment: dict[str, tuple[int, int]] = saved(factory=dict)  # processors, memory
    memory_need: int = saved(0)  # of one more worker; 0: not known
    room: dict[str, int] = saved(factory=dict)  # the most workers that have the memory
    expected: int = saved(0)  # the memory of a worker, as similar jobs say; 0: not known
    too_small: tuple[str, int] | None = saved(None)  # see `HostsGranted`
    fewer: dict[str, int] = saved(factory=dict)  # the most that do not wait for processors
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

    def record_equipment(self, host: str, cpus: int, memory: int) -> None:
        """Record what an agent has said of its host; 0: it does not know."""
        if self.equipment.get(host, (cpus, memory)) != (cpus, memory):
            self.room.pop(host, None)  # it is another machine now
            self.fewer.pop(host, None)
        self.equipment[host] = cpus, memory

    def on_machine(self, host: str, machine: str) -> list[str]:
        """Record the machine of a host; return its other names, as far as agents have said."""
        if self.machines.get(host, machine) != machine:  # it is another machine now
            self.same = {name: kept for name, kept in self.same.items() if kept != host}
        self.machines[host] = machine
        return [name for name, its in self.machines.items() if its == machine and name != host]

    def merge(self, name: str, kept: str) -> None:
        """Let a host stand for another name of its machine, and have the slots of both."""
        self.same = {n: kept if k == name else k for n, k in self.same.items() if n != kept}
        self.same[name] = kept

    def _merged(self) -> dict[str, int]:
        """Return the slots that were found, by host."""
        slots: dict[str, int] = {}
        for name, found in self.found:
            host = self.same.get(name, name)
            slots[host] = slots.get(host, 0) + found
        return slots

    def limit(self, plan: ev.PlanApplied | None) -> None:
        """Let this plan hold; None: none."""
        self.plan = plan

    def short_of_memory(self, need: int, room: dict[str, int]) -> None:
        """Let one more worker need so much memory, and these hosts have room for so many."""
        self.memory_need, self.room, self.too_small = need, room, None

    def expect(self, need: int) -> None:
        """Let a worker probably need so much memory; 0: that is not known."""
        self.expected = need

    def memory_room(self) -> dict[str, int]:
        """Return the most workers that have the memory, of each host of which that is known."""
        if not (need := self.memory_need):
            return dict(self.room)
        equipped = {host: memory for host, (_, memory) in self.equipment.items() if memory}
        return {host: memory // need for host, memory in equipped.items()} | self.room

    def limit_starved(self, host: str, most: int) -> None:
        """Let a host have at most so many workers, because they wait for its processors."""
        self.fewer[host] = most

    def forget_starved(self) -> None:
        """Let hosts have as many workers again as before they were starved."""
        self.fewer = {}

    def slots(self, plan: ev.PlanApplied | None, least: int) -> tuple[tuple[str, int], ...]:
        """Return the hosts with the slots that this plan leaves them.

        `least`: where wishes would leave fewer slots, they are passed over.
        """
        firm = {
            host: min(self._bounds(host, slots, plan)) for host, slots in self._merged().items()
        }
        found = {host: min((slots, *self._wishes(host))) for host, slots in firm.items()}
        return tuple((found if sum(found.values()) >= least else firm).items())

    def _wishes(self, host: str) -> Iterator[int]:
        if host in self.fewer:
            yield self.fewer[host]
        memory = self.equipment.get(host, (0, 0))[1]
        if self.expected and memory and not self.memory_need:
            yield memory // self.expected

    def planned(self) -> dict[str, int]:
        """Return the most workers that the present plan allows, of each host that it limits."""
        known = dict.fromkeys((*self._merged(), *self.equipment))
        found = {host: [*self._planned(host, self.plan)] for host in known}
        return {host: min(bounds) for host, bounds in found.items() if bounds}

    def _bounds(self, host: str, slots: int, plan: ev.PlanApplied | None) -> Iterator[int]:
        yield slots
        memory = self.equipment.get(host, (0, 0))[1]
        if host in self.room:
            yield self.room[host]
        elif self.memory_need and memory:
            yield memory // self.memory_need
        yield from self._planned(host, plan)

    def _planned(self, host: str, plan: ev.PlanApplied | None) -> Iterator[int]:
        if plan is None:
            return
        cpus, memory = self.equipment.get(host, (0, 0))
        if plan.slots_per_host is not None:
            yield plan.slots_per_host
        if plan.cpu_per_worker is not None and cpus:
            yield int(cpus / plan.cpu_per_worker)
        if plan.memory_per_worker is not None and memory:
            yield memory // plan.memory_per_worker
