"""Hosts that come, go and change their size, checks of them, and the memory that they have.

`Discovered` records the hosts of discovery and of the Brain's grants, and the slots that plans and
memory leave of them.

In jobs that began with a node check, `Rechecks` has hosts checked before they get workers, while
the others train. A host that comes later, comes back, or has been in cool-down is *held*: it gets
no workers until it has passed a check. Held hosts are checked together, and with one good host that
has no workers, if there is one; the hosts that train are not disturbed. The results of the first
check count as usual here too, so that a host checked alone can be found slow. A host that fails is
put in cool-down, and is checked again after it. If the hosts join by themselves, none was checked
before the job. Then the first check waits until enough hosts for the job are there, and the job
ends if too few of them pass and no others may join. An agent that is lost for the first time is
started again in place without a check, as its workers would otherwise wait for it.

A worker that ran out of memory (`Memory`) is started again where half as much again as its peak is
idle. That may be another host; then its own one keeps the workers that it has. If all workers of a
host ran out together, one of them is started again there, and has the memory alone. No host is put
in cool-down for it. The job ends if fewer workers than it needs have the memory. If a GPU's memory
was short, hosts are no larger or smaller for it: the worker is started again as after any other
failure, and the budget of restarts ends a job that fails again and again. The Brain may have larger
hosts. Its job waits for them for `--elastic-timeout`, unless the Brain says that it has none.

Memory is bytes, times are monotonic seconds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_driver.errors import ExitCode
from elastic_driver.job import units
from elastic_driver.job.capacity import Inventory, Limits
from elastic_driver.job.decisions import CheckHosts
from elastic_driver.job.events import (
    DiscoveryFailed,
    HostResult,
    HostsChecked,
    HostsDiscovered,
    HostsGranted,
    HostsMeasured,
    HostStarved,
    MemoryExpected,
    SizeProposed,
    Turn,
    takes,
)
from elastic_driver.job.hosts import Host
from elastic_driver.job.outcome import Cause
from elastic_driver.job.rounds import COMPLETE, Rule
from elastic_driver.job.workers import ACTIVE, STARTING, Worker
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import log_events as log
from elastic_driver.words import wire_events as ev
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.findings import Failure

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
        usable = (host for host in self.hosts.known.values() if self.hosts.is_usable(host.name))
        partner = next((host for host in usable if not self.workers.on_host(host.name)), None)
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

    @takes(HostsChecked)
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
                cooldown = self.hosts.record_failed_check(host, now, f"node check: {result.reason}")
                self.effects.announce(host_log.HostBlacklisted(), cooldown, name)
            elif held:  # the others were its partners
                self.effects.announce(host_log.HostChecked(), result.reason, name)
        if self._starts_the_job(1):
            self.rounds.wait_again(now)
            self._end_if_too_few(failed)

    def _starts_the_job(self, checks: int) -> bool:
        """Return whether the hosts of the job's start are checked, and `checks` have begun.

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
        known = self.hosts.known.values()
        most = self.settings.max_hosts
        slots = sum(host.slots for host in known)
        wanted = self.capacity.wanted
        return (most is not None and len(known) >= most) or (wanted is not None and slots >= wanted)

    def _end_if_too_few(self, failed: list[str]) -> None:
        """End the job if too few hosts passed its first check, and no others are to come."""
        left = [*filter(lambda h: self.hosts.is_usable(h.name), self.hosts.known.values())]
        left += self.hosts.held()
        if failed and self._all_there() and not self._enough(left):
            what = (
                f"{len(failed)} of {counted(len(self.hosts.known), 'host')} failed the node check"
            )
            few = f"{len(left)} left, too few to start: repair the others, or lower --nnodes"
            self.ending.finish(ExitCode.UNAVAILABLE, f"{what} ({'; '.join(failed)}); {few}")


# ---- the hosts that there are ------------------------------------------------------------


@dataclass(slots=True)
class Discovered(Rule):
    """Records and announces the hosts that discovery reports; holds those to be checked."""

    inventory: Inventory
    limits: Limits

    @takes(HostsDiscovered)
    def on_hosts(self, event: HostsDiscovered, now: float) -> None:
        """Record the hosts there are now, and announce what has changed."""
        self.inventory.record_discovered(event.hosts)
        new = [host for host in self.settings.refused_hosts if not self.hosts.has_had(host[0])]
        self._take_in("discovery no longer reports it")
        for host, reason in new:
            if self.hosts.count_refusal(host, now, reason):
                self.effects.announce(host_log.HostRefused(told=True), reason, host)

    @takes(HostsGranted)
    def on_granted(self, event: HostsGranted) -> None:
        """Use the slots of a grant from now on; raises `StaleEvent` for one that is not newer."""
        self.inventory.record_granted(event)
        slots = sum(slots for _, slots in event.hosts)
        what = f"{counted(slots, 'slot')}: {event.reason}"
        self.effects.announce(host_log.HostsGranted(number=event.number, slots=slots), what)
        if self._take_in(f"grant {event.number} leaves it no slots"):
            self.capacity.note_hosts_limited()

    @takes(ev.AgentReady, ev.AgentReturned, turn=Turn.AFTER)
    def on_agent_up(self, event: ev.AgentUp) -> None:
        """Record what a host has; a plan may leave it fewer slots for that."""
        if self.inventory.record_equipment(event.host, event.cpus, event.memory):
            self.limits.forget_host(event.host)
        if self.settings.one_host_per_machine:
            self._note_machine(event.host, event.machine_id)
        if self.limits.memory_need:
            self.limit_memory()
        elif self.limits.plan is not None:
            self._take_in(f"no worker of plan {self.limits.plan.number} fits there")
        elif self.limits.expected and self._take_in(TOO_SMALL):
            self.capacity.note_hosts_limited()

    def _note_machine(self, host: str, machine: str) -> None:
        """Make two names of a machine one host with the slots of both: the first, or that at work.

        Only agents that are up now say so for certain.
        """
        before, known = self.inventory.same, self.hosts.known
        others = self.inventory.record_machine(host, machine)
        if self.inventory.same != before:
            self._take_in("it has no slots of its own")
        twins = [name for name in others if name in known and self.fleet.is_up(name)]
        if machine and twins and host in known:
            kept, other = sorted((host, twins[0]), key=lambda name: known[name].position)
            if self.workers.on_host(other) and not self.workers.on_host(kept):
                kept, other = other, kept
            self.inventory.merge(other, kept)
            keep = "--separate-names keeps them apart"
            self._take_in(f"it is the same machine as {kept}, which has its slots, too; {keep}")

    def limit_memory(self) -> None:
        """Leave hosts the slots for which they have the memory."""
        self._take_in(TOO_SMALL)

    @takes(MemoryExpected)
    def on_memory_expected(self, event: MemoryExpected) -> None:
        """Leave hosts the slots for which they probably have the memory."""
        if self.limits.expected != event.need:
            self.limits.set_expected_memory(event.need)
            self.effects.announce(host_log.MemoryExpected(need=event.need), event.reason)
            if self._take_in(TOO_SMALL):
                self.capacity.note_hosts_limited()

    @takes(ev.PlanApplied)
    def on_plan_applied(self, event: ev.PlanApplied) -> None:
        """Carry out a plan; raises `StaleEvent` for one that cannot be."""
        left = sum(slots for _, slots in self.limits.slots(event, self.capacity.least))
        self.capacity.on_plan_applied(event, left)
        wanted = self.capacity.wanted
        self.effects.announce(log.PlanApplied(number=event.number, wanted=wanted), str(event))
        self._limit(event)

    @takes(ev.ScaleRequested, turn=Turn.AFTER)
    def on_target_set(self, event: ev.ScaleRequested) -> None:
        """Use the hosts as the new target needs them; None releases the plan, too."""
        if event.num_proc is None:
            self.limits.forget_starved()
            self._limit(None)
        else:
            self._take_in(TOO_SMALL)  # the user's number outranks wishes

    @takes(HostStarved)
    def on_host_starved(self, event: HostStarved) -> None:
        """Leave a host fewer slots; raises `StaleEvent` where that cannot be, or is old.

        The Brain knows where other slots are, so the next grant does it in its jobs.
        """
        host = self.hosts.known.get(event.host)
        all_slots = self.hosts.known.values()
        has_brain, least = self.inventory.newest_grant > 0, self.capacity.least
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
        self.limits.set_starved(event.host, event.workers)
        if has_brain:
            return
        wanted = self.capacity.wanted
        if wanted is not None and wanted > left:
            fewer = f"{event.host} gets {counted(event.workers, 'worker')} at most"
            self.capacity.on_size_proposed(SizeProposed(left, fewer))
        self._take_in("its workers would wait for its processors")
        self.capacity.note_hosts_limited()

    def _limit(self, plan: ev.PlanApplied | None) -> None:
        self.limits.set_plan(plan)
        number = self.capacity.newest_plan
        if self._take_in(f"no worker of plan {number} fits there"):
            self.capacity.note_hosts_limited()

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

    @takes(DiscoveryFailed)
    def on_failed(self, event: DiscoveryFailed, now: float) -> None:
        """Announce that discovery failed; the known hosts stay."""
        stay = counted(len(self.hosts.known), "known host stays", "known hosts stay")
        kept = f"{event.reason}; the {stay}"
        self.effects.announce(host_log.DiscoveryFailed(), kept)

    def advance(self, now: float) -> Iterable[Wait]:
        """End the cool-downs and pauses that are over."""
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


# ---- memory ------------------------------------------------------------------------------

FACTOR = 1.5  # of the largest peak, which has to be idle for one more worker


@dataclass(slots=True)
class Memory(Rule):
    """Decides which hosts have the memory for more workers."""

    inventory: Inventory
    limits: Limits
    discovered: Discovered
    idle: dict[str, int] = saved(factory=dict)  # by host, as agents measured it last
    # Of the last worker that ran out, until the job trains again.
    failure: Failure | None = saved(None)
    peak: int | None = saved(None)  # of that worker
    _since: float = saved(0.0, name="since")  # when it ran out
    _round: int = saved(0, name="round")  # the newest round that the job cannot go on with for it
    # Host → workers ever started then.
    _ran_out: dict[str, int] = saved(factory=dict, name="ran_out")
    # Hosts of several, until the job trains again.
    _shared: set[str] = saved(factory=set, name="shared")

    @takes(HostsMeasured)
    def on_hosts_measured(self, event: HostsMeasured, now: float) -> None:
        """Record the idle memory of hosts."""
        self.idle = dict(event.idle)

    @takes(ev.WorkerExited, turn=Turn.AFTER)
    def on_exited(self, worker: Worker, event: ev.WorkerExited, now: float) -> None:
        """Record the end of a worker that ran out of memory, if it counts as a failure."""
        found, losses = event.out_of_memory, self.outcome.losses
        counts = losses and losses[-1].cause is Cause.MEMORY
        if found is None or not counts or losses[-1].failure.worker != worker.id:
            return
        peak = "not known" if found.peak is None else in_words(found.peak)
        if found.of_device:
            what = "the memory of its GPU was too small; give it a smaller batch or another GPU"
            self.effects.announce(worker_log.OutOfMemory(peak=found.peak), what, worker)
            return
        self.failure, self.peak, self._since = losses[-1].failure, found.peak, now
        self._round = self.rounds.current.number if losses[-1].member else 0
        if found.idle is not None:
            self.idle[worker.host] = found.idle
        if self._there(worker.host):
            self._shared.add(worker.host)
        need = max(self.limits.memory_need, int(FACTOR * (found.peak or 0)))
        self.limits.set_memory_need(need, self._rooms(worker, need))
        self._ran_out.setdefault(worker.host, self.workers.started)
        most = self.limits.room[worker.host]
        what = f"its peak was {peak}; {worker.host} has the memory for {counted(most, 'worker')}"
        self.effects.announce(worker_log.OutOfMemory(peak=found.peak, room=most), what, worker)
        self.discovered.limit_memory()

    def _rooms(self, ran_out: Worker, need: int) -> dict[str, int]:
        """Return the most workers of each host whose memory is known.

        A host keeps those that it has; one that had several keeps one, though all of them ran out
        together. On the host of the worker that `ran_out` there is room for others if so much is
        idle, but not if that is how this worker came there.
        """
        own = ran_out.host
        before = self._ran_out.get(ran_out.host)
        again = before is not None and ran_out.number > before
        rooms: dict[str, int] = {}
        equipped = (host for host, (_, memory) in self.inventory.equipment.items() if memory)
        for host in dict.fromkeys((*self.idle, *equipped, own)):
            there = self._there(host)
            room = max(len(there), 1 if host in self._shared else 0)
            if need and not (host == own and again):
                room = max(room, self._room(host, need, there))
            elif host != own:
                continue
            if host in self._ran_out and (host != own or again):
                room = min(room, self.limits.room.get(host, room))
            rooms[host] = room
        return rooms

    def _there(self, host: str) -> list[Worker]:
        """Return the workers of a host that are to stay."""
        return [w for w in self.workers.in_slots(host) if w.state in ACTIVE and not w.leaving]

    def _room(self, host: str, need: int, there: list[Worker]) -> int:
        """Return how many workers a host has the memory for, at least those that are there.

        What is idle includes the memory that workers which are starting will take.
        """
        idle = self.idle.get(host)
        if idle is None:  # no sample yet: all of its memory counts
            return max(len(there), self.inventory.equipment.get(host, (0, 0))[1] // need)
        starting = sum(worker.state is STARTING for worker in there)
        return len(there) + max(0, idle // need - starting)

    def advance(self, now: float) -> Iterable[Wait]:
        """End the job if the hosts have the memory for fewer workers than it needs.

        Once the job trains again, it waits for hosts as it always does.
        """
        failure, current, least = self.failure, self.rounds.current, self.capacity.least
        if failure is None or self.outcome.finishing:
            return
        slots = [n for _, n in self.limits.slots(self.limits.plan, least) if n > 0]
        if sum(slots) >= least and len(slots) >= units.width(self.settings):
            if current.state is COMPLETE and current.number > self._round:
                self.failure = None
                self._shared.clear()
        elif (wait := self._wait_for_grant()).is_over(now):
            self.outcome.finish_with(failure, self._why_it_ends(failure))
        else:
            yield wait

    def _wait_for_grant(self) -> Wait:
        """Return the wait for a grant with larger hosts; it is over if no Brain can help."""
        if not self.inventory.newest_grant or self.inventory.too_small:
            return Wait(-math.inf)
        why = "the Brain is to grant a host with the memory for a worker"
        return Wait(self._since + self.settings.elastic_timeout, why)

    def _why_it_ends(self, failure: Failure) -> str:
        """Return why the job ends: what its worker needed, and the largest host."""
        need = self.limits.memory_need
        who = f"rank {failure.rank} on host {failure.host} ran out of memory"
        hint = "use hosts with more memory, fewer workers (--min-np), or a smaller batch"
        if not need:
            return f"{who}, and no other host has a free slot; {hint}"
        largest_there = self.inventory.too_small or ("", 0)
        known = dict([largest_there] if largest_there[0] else [])
        known |= {host: memory for host, (_, memory) in self.inventory.equipment.items() if memory}
        known |= self.idle
        largest = max(known, key=known.__getitem__, default=failure.host)
        least = in_words(need)
        has = in_words(known.get(largest, 0))
        at = f"{who} at {in_words(self.peak or 0)}"
        if known.get(largest, 0) >= need:
            hint = "is the memory of a process limited (ulimit -v)?"
            return f"{at}, again, though {largest} has {has} idle; {hint}"
        return f"{at}, and no host has {least} idle: the largest, {largest}, has {has}; {hint}"


def in_words(size: int) -> str:
    """Return a size in bytes as people read it."""
    return f"{size / 2**20:.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:.0f} GiB"
