"""Workers that run out of memory: where others may be started, and when no host is large enough.

A worker that ran out of memory is started again where half as much again as its peak is idle. That
may be another host; then its own one keeps the workers that it has. If all workers of a host ran
out together, one of them is started again there, and has the memory alone. No host is put in
cool-down for it. The job ends if fewer workers than it needs have the memory. If a GPU's memory was
short, hosts are no larger or smaller for it: the worker is started again as after any other
failure, and the budget of restarts ends a job that fails again and again.

The Brain may have larger hosts. Its job waits for them for `--elastic-timeout`, unless the Brain
says that it has none. Memory is bytes, times are monotonic seconds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from elastic_driver.core import events as ev
from elastic_driver.core.driver_events import HostsMeasured
from elastic_driver.core.rules import units
from elastic_driver.core.rules.discovered import Discovered
from elastic_driver.core.rules.host_limits import HostLimits
from elastic_driver.core.rules.outcome import Cause
from elastic_driver.core.rules.rounds import COMPLETE, Rule
from elastic_driver.core.rules.workers import ACTIVE, STARTING, Worker
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.findings import Failure

FACTOR = 1.5  # of the largest peak, which has to be idle for one more worker


@dataclass(slots=True)
class Memory(Rule):
    """Decides which hosts have the memory for more workers."""

    limits: HostLimits
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

    def on_hosts_measured(self, event: HostsMeasured, now: float) -> None:
        """Record the idle memory of hosts."""
        self.idle = dict(event.idle)

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
        self.limits.short_of_memory(need, self._rooms(worker, need))
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
        own, before = ran_out.host, self._ran_out.get(ran_out.host)
        again = before is not None and ran_out.number > before
        rooms: dict[str, int] = {}
        equipped = (host for host, (_, memory) in self.limits.equipment.items() if memory)
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
            return max(len(there), self.limits.equipment.get(host, (0, 0))[1] // need)
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
        if not self.limits.newest_grant or self.limits.too_small:
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
        largest_there = self.limits.too_small or ("", 0)
        known = dict([largest_there] if largest_there[0] else [])
        known |= {host: memory for host, (_, memory) in self.limits.equipment.items() if memory}
        known |= self.idle
        largest = max(known, key=known.__getitem__, default=failure.host)
        least, has = in_words(need), in_words(known.get(largest, 0))
        at = f"{who} at {in_words(self.peak or 0)}"
        if known.get(largest, 0) >= need:
            hint = "is the memory of a process limited (ulimit -v)?"
            return f"{at}, again, though {largest} has {has} idle; {hint}"
        return f"{at}, and no host has {least} idle: the largest, {largest}, has {has}; {hint}"


def in_words(size: int) -> str:
    """Return a size in bytes as people read it."""
    return f"{size / 2**20:.0f} MiB" if size < 10 * 2**30 else f"{size / 2**30:.0f} GiB"
