"""Hosts that come, go, change their size or come out of their cool-down, and checks of them.

Hosts are checked before they get workers, while the others train, in jobs that began with a node
check. A host that comes later, comes back, or has been in cool-down is *held*: it gets no workers
until it has passed a check. Held hosts are checked together, and with one good host that has no
workers, if there is one; the hosts that train are not disturbed. The results of the first check
count as usual here too, so that a host checked alone can be found slow. A host that fails is put in
cool-down, and is checked again after it.

If the hosts join by themselves, none was checked before the job. Then the first check waits until
enough hosts for the job are there, and the job ends if too few of them pass and no others may join.

An agent that is lost for the first time is started again in place without a check, as its workers
would otherwise wait for it. Times are monotonic seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_driver.core import events as ev
from elastic_driver.core.decisions import CheckHosts
from elastic_driver.core.driver_events import (
    DiscoveryFailed,
    HostResult,
    HostsChecked,
    HostsDiscovered,
    HostsGranted,
    HostStarved,
    MemoryExpected,
    SizeProposed,
)
from elastic_driver.core.rules import units
from elastic_driver.core.rules.host_limits import HostLimits
from elastic_driver.core.rules.hosts import Host
from elastic_driver.core.rules.rounds import Rule
from elastic_driver.errors import ExitCode
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import log_events as log

TOO_SMALL = "it has too little memory for a worker"
GATHER_S = 2.0  # for more hosts to join before the first check, once there are enough


@dataclass(slots=True)
class Rechecks(Rule):
    """Starts the checks of the hosts that are held."""

    # Host → position; being checked.
    _checking: dict[str, int] = saved(factory=dict, name="checking")
    _checks: int = saved(0, name="checks")  # begun so far
    # Since when hosts have waited for a check.
    _held_since: float | None = saved(None, name="held_since")

    def advance(self, now: float) -> Iterable[Wait]:
        """Start a check of the held hosts, unless one is going on."""
        held = self.hosts.held()
        if self._checking and self._starts_the_job(1):
            self.rounds.wait_again(now)  # the time of the check is not the time of the start
        if not held or self._checking or self.outcome.first_success is not None:
            return
        wait = self.settings.last_call  # hosts often come several at a time
        if self._starts_the_job(0):
            if not self._enough(held):
                self._held_since = None
                return
            wait = 0.0 if self._all_there() else GATHER_S
        if self._held_since is None:
            self._held_since = now
        if now < self._held_since + wait:
            yield Wait(self._held_since + wait)
            return
        known, workers = self.hosts.known.values(), self.workers.on_host
        idle = (host for host in known if self.hosts.usable(host.name) and not workers(host.name))
        partner = next(idle, None)
        hosts = held if partner is None else (*held, partner)
        beside = "" if partner is None else f", beside {partner.name}"
        reason = f"{', '.join(f'{host.name}: {host.check}' for host in held)}{beside}"
        self.effects.announce(host_log.HostCheckStarted(), reason)
        self._held_since = None
        self._checks += 1
        self._checking = {host.name: host.position for host in hosts}
        self._check(reason)

    def resume(self) -> None:
        """Begin the check again that ended with an earlier driver, with the hosts that are left."""
        known = self.hosts.known
        left = {name: at for name, at in self._checking.items() if name in known}
        self._checking = {name: at for name, at in left.items() if known[name].position == at}
        if self._checking:
            self._check("the check ended with the driver that began it")

    def _check(self, reason: str) -> None:
        slots = tuple((name, self.hosts.known[name].slots) for name in self._checking)
        self.effects.decide(CheckHosts(slots, reason, self._checks))

    def on_hosts_checked(self, event: HostsChecked, now: float) -> None:
        """Release the hosts that passed, put the others in cool-down.

        An answer to another check is late or repeated. A host that has been away since the check
        began (its position changed) is held again, and its result does not count.
        """
        if event.number != self._checks or not self._checking:
            return
        began, self._checking = self._checking, {}
        self.capacity.note_change()
        failed: list[str] = []
        results = {result.host: result for result in event.results}
        for name, position in began.items():
            host = self.hosts.known.get(name)
            if host is None or host.position != position:
                continue
            held = self.hosts.release(host)
            result = results.get(name) or HostResult(name, False, "it has no result")
            if not result.passed:
                failed.append(f"{name} {result.reason}")
                cooldown = self.hosts.check_failed(host, now, f"node check: {result.reason}")
                self.effects.announce(host_log.HostBlacklisted(), cooldown, name)
            elif held:  # the others were its partners
                self.effects.announce(host_log.HostChecked(), result.reason, name)
        if self._starts_the_job(1):
            self.rounds.wait_again(now)
            self._end_if_too_few(failed)

    def _starts_the_job(self, checks: int) -> bool:
        """Return whether the hosts of the job's start are checked, and so many checks have begun.

        Otherwise they were checked before the job, or there are no checks.
        """
        return self.settings.checked_hosts == () and self._checks == checks

    def _enough(self, hosts: Iterable[Host]) -> bool:
        """Return whether the job can start with these hosts."""
        slots, settings = [host.slots for host in hosts], self.settings
        least = settings.start_np if settings.start_min_np is None else settings.start_min_np
        return len(slots) >= units.width(settings) and sum(slots) >= least

    def _all_there(self) -> bool:
        """Return whether no further host would be used."""
        known, most = self.hosts.known.values(), self.settings.max_hosts
        slots, wanted = sum(host.slots for host in known), self.capacity.wanted
        return (most is not None and len(known) >= most) or (wanted is not None and slots >= wanted)

    def _end_if_too_few(self, failed: list[str]) -> None:
        """End the job if too few hosts passed its first check, and no others are to come."""
        left = [*filter(lambda h: self.hosts.usable(h.name), self.hosts.known.values())]
        left += self.hosts.held()
        if failed and self._all_there() and not self._enough(left):
            what = (
                f"{len(failed)} of {counted(len(self.hosts.known), 'host')} failed the node check"
            )
            few = f"{len(left)} left, too few to start: repair the others, or lower --nnodes"
            self.outcome.finish(ExitCode.UNAVAILABLE, f"{what} ({'; '.join(failed)}); {few}")


@dataclass(slots=True)
class Discovered(Rule):
    """Records and announces the hosts that discovery reports; holds those to be checked."""

    limits: HostLimits

    def on_hosts(self, event: HostsDiscovered, now: float) -> None:
        """Record the hosts there are now, and announce what has changed."""
        self.limits.record_discovered(event.hosts)
        new = [host for host in self.settings.refused_hosts if not self.hosts.has_had(host[0])]
        self._take_in("discovery no longer reports it")
        for host, reason in new:
            if self.hosts.count_refusal(host, now, reason):
                self.effects.announce(host_log.HostRefused(told=True), reason, host)

    def on_granted(self, event: HostsGranted) -> None:
        """Use the slots of a grant from now on; raises `StaleEvent` for one that is not newer."""
        self.limits.record_granted(event)
        slots = sum(slots for _, slots in event.hosts)
        what = f"{counted(slots, 'slot')}: {event.reason}"
        self.effects.announce(host_log.HostsGranted(number=event.number, slots=slots), what)
        if self._take_in(f"grant {event.number} leaves it no slots"):
            self.capacity.hosts_limited()

    def on_agent_up(self, event: ev.AgentUp) -> None:
        """Record what a host has; a plan may leave it fewer slots for that."""
        self.limits.record_equipment(event.host, event.cpus, event.memory)
        if self.settings.one_host_per_machine:
            self._note_machine(event.host, event.machine_id)
        if self.limits.memory_need:
            self.limit_memory()
        elif self.limits.plan is not None:
            self._take_in(f"no worker of plan {self.limits.plan.number} fits there")
        elif self.limits.expected and self._take_in(TOO_SMALL):
            self.capacity.hosts_limited()

    def _note_machine(self, host: str, machine: str) -> None:
        """Make two names of a machine one host with the slots of both: the first, or that at work.

        Only agents that are up now say so for certain.
        """
        before, known = self.limits.same, self.hosts.known
        others = self.limits.on_machine(host, machine)
        if self.limits.same != before:
            self._take_in("it has no slots of its own")
        twins = [name for name in others if name in known and self.fleet.is_up(name)]
        if machine and twins and host in known:
            kept, other = sorted((host, twins[0]), key=lambda name: known[name].position)
            if self.workers.on_host(other) and not self.workers.on_host(kept):
                kept, other = other, kept
            self.limits.merge(other, kept)
            keep = "--separate-names keeps them apart"
            self._take_in(f"it is the same machine as {kept}, which has its slots, too; {keep}")

    def limit_memory(self) -> None:
        """Leave hosts the slots for which they have the memory."""
        self._take_in(TOO_SMALL)

    def on_memory_expected(self, event: MemoryExpected) -> None:
        """Leave hosts the slots for which they probably have the memory."""
        if self.limits.expected != event.need:
            self.limits.expect(event.need)
            self.effects.announce(host_log.MemoryExpected(need=event.need), event.reason)
            if self._take_in(TOO_SMALL):
                self.capacity.hosts_limited()

    def on_plan_applied(self, event: ev.PlanApplied) -> None:
        """Carry out a plan; raises `StaleEvent` for one that cannot be."""
        left = sum(slots for _, slots in self.limits.slots(event, self.capacity.least))
        self.capacity.on_plan_applied(event, left)
        wanted = self.capacity.wanted
        self.effects.announce(log.PlanApplied(number=event.number, wanted=wanted), str(event))
        self._limit(event)

    def on_scale_requested(self, event: ev.ScaleRequested) -> None:
        """Aim at another number of workers; None releases the plan, too."""
        self.capacity.on_scale_requested(event)
        if event.num_proc is None:
            self.limits.forget_starved()
            self._limit(None)
        else:
            self._take_in(TOO_SMALL)  # the user's number outranks wishes

    def on_host_starved(self, event: HostStarved) -> None:
        """Leave a host fewer slots; raises `StaleEvent` where that cannot be, or is old.

        The Brain knows where other slots are, so the next grant does it in its jobs.
        """
        host, all_slots = self.hosts.known.get(event.host), self.hosts.known.values()
        has_brain, least = self.limits.newest_grant > 0, self.capacity.least
        if not (self.settings.auto_scale or has_brain) or self.capacity.target is not None:
            raise ev.StaleEvent("neither --auto-scale nor the Brain decides the size of this job")
        if host is None or not 0 < event.workers < host.slots:
            slots = counted(event.workers, "slot")
            raise ev.StaleEvent(f"{event.host} has not more than {slots} any more")
        if self.limits.fewer.get(event.host) == event.workers:
            raise ev.StaleEvent(f"it is known that {event.host} can do with {event.workers} only")
        left = sum(each.slots for each in all_slots) - host.slots + event.workers
        if left < least and not has_brain:
            slots = counted(left, "slot")
            raise ev.StaleEvent(f"{slots} would be left, the job needs {least}")
        self.effects.announce(host_log.HostStarved(slots=event.workers), event.reason, event.host)
        self.limits.limit_starved(event.host, event.workers)
        if has_brain:
            return
        wanted = self.capacity.wanted
        if wanted is not None and wanted > left:
            fewer = f"{event.host} gets {counted(event.workers, 'worker')} at most"
            self.capacity.on_size_proposed(SizeProposed(left, fewer))
        self._take_in("its workers would wait for its processors")
        self.capacity.hosts_limited()

    def _limit(self, plan: ev.PlanApplied | None) -> None:
        self.limits.limit(plan)
        number = self.capacity.newest_plan
        if self._take_in(f"no worker of plan {number} fits there"):
            self.capacity.hosts_limited()

    def _take_in(self, why_removed: str) -> bool:
        """Record the slots there are now, announce changes, and return whether there are any."""
        least = max(self.capacity.least, self.capacity.target or 0)
        changes = self.hosts.record_discovered(self.limits.slots(self.limits.plan, least))
        if not any(changes):
            return False
        self.capacity.note_change()
        for host, slots in changes.added:
            self.effects.announce(
                host_log.HostDiscovered(slots=slots), counted(slots, "slot"), host
            )
            if self.hosts.known[host].returned:
                self.hold(host, "it has been away")
            elif host not in (self.settings.checked_hosts or ()):
                self.hold(host, "it was not there before")
        for host in changes.removed:
            self.effects.announce(host_log.HostRemoved(), why_removed, host)
        for host, before, slots in changes.resized:
            what = f"{counted(slots, 'slot')}, it had {before}"
            self.effects.announce(host_log.HostDiscovered(slots=slots), what, host)
        return True

    def hold(self, host: str, reason: str) -> None:
        """Keep a host from being used until it was checked, in jobs that check hosts."""
        if self.settings.checked_hosts is not None:
            self.hosts.hold(host, reason)

    def on_failed(self, event: DiscoveryFailed, now: float) -> None:
        """Announce that discovery failed; the known hosts stay."""
        stay = counted(len(self.hosts.known), "known host stays", "known hosts stay")
        kept = f"{event.reason}; the {stay}"
        self.effects.announce(host_log.DiscoveryFailed(), kept)

    def advance(self, now: float) -> Iterable[Wait]:
        """Let hosts be used again after their cool-down."""
        for host in self.hosts.resurrect(now):
            over = "its cool-down is over"
            if not self.hosts.known[host].refusals:  # else nothing has changed
                self.effects.announce(host_log.HostResurrected(), over, host)
            self.hold(host, over)
            self.capacity.note_change()
        if self.hosts.end_pauses(now):
            self.capacity.note_change()
        while self.hosts.can_recall and self.is_needed("") and (recalled := self.hosts.recall()):
            needed = "its cool-down ends early: the hosts that are left are too few"
            self.effects.announce(host_log.HostResurrected(), needed, recalled)
            self.capacity.note_change()
        next_end = self.hosts.next_resurrection()
        if next_end is not None:
            yield Wait(next_end)
