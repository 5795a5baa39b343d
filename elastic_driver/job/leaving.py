"""Hosts and workers that leave in good order: on request, with a notice of their end, or slow.

A drained host is left like a host that discovery removed, at a step boundary and without a step
lost, but there is time: if other hosts have room, its workers train on until their replacements are
ready, so that the world need not shrink. The same holds for a single worker with a notice; its slot
is then free for the next worker.

With `--replace-slow`, a worker that computes slowly is drained, too: one at a time, only if all
workers that are wanted train, and only if another host has room and is not slow. Its replacement is
started there first. The host of a replaced worker is the last choice until a rank there has
recovered. There is a pause before workers of another host are replaced. If no other host has room,
nothing happens, and that is announced once. The watch over stragglers gives the verdict on a rank;
it is forgotten with its round.

A batch system or a service manager that ends a job sends a signal to all of its processes: to
`elasticrun`, the agents, the workers. They get it and report it in any order, on several machines
seconds apart. If each notice were acted upon at once, the world would shrink and form anew several
times before the last one is there, and what remains would train on with other batches. So an
elastic job trains on for `notice_spread` seconds after the first notice (less if there is little
time), starts nothing and forms no round meanwhile (`Notices`). As soon as all hosts have their
notice, or the job has one itself, nothing more is awaited. Times are monotonic seconds.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from elastic_driver.job import units
from elastic_driver.job.events import RankRecovered, RankSlow, takes
from elastic_driver.job.hosts import Drain
from elastic_driver.job.rounds import CLOSING, COMPLETE, Rule
from elastic_driver.job.workers import ACTIVE, READY, RUNNING, STOPPED, STOPPING, Worker
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import wire_events as ev
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.orders import time_to_leave

REPLACEMENT_SHARE = 0.5  # of a deadline; the rest is for the boundary and for ending processes
NO_REASON = "no reason was given"


class SlowVerdict(NamedTuple):
    """The verdict that a member computes slowly."""

    ratio: float  # its time over the usual one
    since: float


class Replacement(NamedTuple):
    """A slow worker that is drained, and the host on which its replacement is started."""

    worker: str
    target: str
    round: int  # the round in which it began
    after: int  # workers started before it
    drain: Drain


@dataclass(slots=True)
class Drains(Rule):
    """Records the hosts and workers that have to leave, and the reasons; see also `notices`."""

    replacement: Replacement | None = saved(None)
    _slow: dict[str, SlowVerdict] = saved(factory=dict, name="slow")
    _slow_in: int = saved(0, name="slow_in")  # the round of these members
    notices: dict[str, Drain] = saved(factory=dict)  # of single workers
    _replace_after: float = saved(0.0, name="replace_after")  # no replacement begins earlier
    # Slow hosts that no worker can leave.
    _without_room: set[str] = saved(factory=set, name="without_room")

    # ---- requests and notices ------------------------------------------------------------

    @takes(ev.DrainRequested)
    def on_requested(self, event: ev.DrainRequested, now: float) -> None:
        """Drain a host."""
        if not self.drain(event.host, self.drain_for(event, now)):
            raise ev.StaleEvent(f"host {event.host} is not there, or is drained already")

    def check_worker(self, event: ev.WorkerLeaving) -> None:
        """Raise `StaleEvent` for the notice of a worker that is not to leave because of it."""
        worker = self.workers.workers.get(event.worker)
        if worker is None or worker.state not in ACTIVE or not self.outcome.elastic:
            raise ev.StaleEvent(f"{event.worker} is gone or going, or has not taken part yet")
        if worker.id in self.notices:
            raise ev.StaleEvent(f"{event.worker} has said before that it has to go")

    def drain_worker(self, name: str, drain: Drain, deadline: float) -> None:
        """Drain a worker that has to leave in `deadline` seconds; its host stays."""
        worker = self.workers.workers.get(name)
        if worker is not None and worker.state in ACTIVE:
            self.notices[worker.id] = drain
            self.capacity.note_change()
            left = round(deadline, 3)
            self.effects.announce(worker_log.WorkerLeaving(deadline=left), drain.reason, worker)

    @takes(ev.DrainCancelled)
    def on_cancelled(self, event: ev.DrainCancelled, now: float) -> None:
        """Use the host again; workers that have not left yet stay."""
        if not self.hosts.undrain(event.host):
            raise ev.StaleEvent(f"host {event.host} is not drained")
        self.hosts.trust(event.host)  # the user may have repaired it, too
        self.capacity.note_change()
        self.effects.announce(host_log.DrainCancelled(), event.reason or NO_REASON, event.host)

    def drain_for(
        self, event: ev.DrainRequested | ev.HostLeaving | ev.WorkerLeaving, now: float
    ) -> Drain:
        """Return the drain that an event asks for; only a notice stops the workers in the end."""
        patience, deadline = self.settings.start_timeout, event.deadline
        leave_by = None
        if deadline is not None:
            patience = min(patience, deadline * REPLACEMENT_SHARE)
            if not isinstance(event, ev.DrainRequested):
                leave_by = now + time_to_leave(deadline)
        return Drain(event.reason or NO_REASON, now + patience, leave_by)

    def drain(self, host: str, drain: Drain) -> bool:
        """Drain a host; return False if it is not there, or if that is nothing new."""
        if not self.hosts.drain(host, drain):
            return False
        self.capacity.note_change()
        self.effects.announce(host_log.DrainRequested(), drain.reason, host)
        if host not in self.fleet.agents:
            self.effects.announce(
                host_log.HostDrained(), f"nothing ran there: {drain.reason}", host
            )
        return True

    # ---- questions -----------------------------------------------------------------------

    def of(self, worker: Worker) -> Drain | None:
        """Return the drain for which a worker has to leave: its host's, or its own."""
        drain = self.hosts.drain_of(worker.host) or self.notices.get(worker.id)
        if drain is None and self.replacement and self.replacement.worker == worker.id:
            return self.replacement.drain
        return drain

    def reason_for(self, worker: Worker) -> str:
        """Return why a worker has to leave; empty if it is not drained."""
        drain = self.of(worker)
        if drain is None:
            return ""
        if self.hosts.drain_of(worker.host) is not None:
            return f"host {worker.host} is drained: {drain.reason}"
        how = "has to go" if worker.id in self.notices else "is replaced"
        return f"{worker.id} {how}: {drain.reason}"

    # ---- slow workers --------------------------------------------------------------------

    @property
    def slow(self) -> dict[str, SlowVerdict]:
        """The slow members of the present round, by worker; the first one found comes first."""
        return self._slow if self._slow_in == self.rounds.current.number else {}

    def resume(self) -> None:
        """Forget who is slow: a driver that goes on measures anew."""
        self.slow.clear()

    @takes(RankSlow)
    def on_slow(self, event: RankSlow, now: float) -> None:
        """Record that a rank has become slow."""
        worker = self.workers.workers.get(event.worker)
        here = worker is not None and worker.state in (READY, RUNNING)
        if event.round != self.rounds.current.number or not here:
            raise ev.StaleEvent(f"{event.worker} was slow in round {event.round}, which is over")
        self._slow, self._slow_in = self.slow, event.round
        self._slow.setdefault(event.worker, SlowVerdict(event.ratio, now))

    @takes(RankRecovered)
    def on_recovered(self, event: RankRecovered, now: float) -> None:
        """Record that a rank is no longer slow: it stays, and its host counts like any other."""
        round_is_over = event.round != self.rounds.current.number
        if round_is_over or self.slow.pop(event.worker, None) is None:
            raise ev.StaleEvent(f"{event.worker} was not known to be slow in round {event.round}")
        worker = self.workers.workers.get(event.worker)
        if worker is None:
            return
        if self.replacement is not None and self.replacement.worker == worker.id:
            self._abandon(self.replacement, "it is no longer slow", now)
        if not any(other.id in self.slow for other in self._active_on(worker.host)):
            self.hosts.trust(worker.host)
            self._without_room.discard(worker.host)

    def advance(self, now: float) -> Iterable[Wait]:
        """Continue the replacement that goes on, or begin one."""
        if not self.settings.replace_slow or not self.outcome.elastic:
            return
        if self.replacement is not None:
            yield from self._continue(self.replacement, now)
        elif self.slow and self.rounds.current.state is COMPLETE and not self.outcome.finishing:
            yield from self._consider(now)

    def _continue(self, replacement: Replacement, now: float) -> Iterator[Wait]:
        """End the replacement if the successor has taken over, or if it can no longer succeed."""
        worker = self.workers.workers.get(replacement.worker)
        there = self._active_on(replacement.target)
        successor = next((w for w in there if w.number > replacement.after and not w.leaving), None)
        ready = successor is not None and successor.state in (READY, RUNNING)
        if worker and successor and ready and worker.state in (STOPPING, STOPPED):
            by = f"by {successor.id}: {replacement.drain.reason}"
            self.effects.announce(worker_log.WorkerReplaced(replacement=successor.id), by, worker)
            if not self._active_on(worker.host):  # else the next one may follow at once
                self._replace_after = now + self.settings.replace_pause
            self.replacement = None
            self.capacity.note_change()
            return
        why = self._why_hopeless(replacement, worker, successor)
        wait = Wait(math.inf if ready else replacement.drain.replace_until)
        if not why and wait.is_over(now):
            why = f"no replacement is ready within {self.settings.start_timeout:g} s"
        if why:
            self._abandon(replacement, why, now)
        else:
            yield wait

    def _why_hopeless(
        self, replacement: Replacement, worker: Worker | None, successor: Worker | None
    ) -> str:
        """Return why a replacement cannot succeed any more; empty if it can."""
        current = self.rounds.current
        broken = current.state is CLOSING and not current.at_boundary
        if worker is None or worker.state not in ACTIVE:
            return f"{replacement.worker} is gone"
        if self.outcome.finishing:
            return "the job is finishing"
        if current.number != replacement.round or broken:  # the slow worker's state is needed
            return "the world has changed for another reason"
        if not self._makes_a_world(worker, replacement.target):
            return "without it there are too few hosts"
        if successor is not None and successor.state in (READY, RUNNING):
            return ""
        if current.state is not COMPLETE:
            return "the world changes before its replacement is ready"
        if not self.hosts.is_usable(replacement.target):
            return f"host {replacement.target} cannot be used any more"
        if (self.capacity.wanted or 0) - self.workers.active() > (successor is None):
            return "more workers are wanted"
        return ""

    def _active_on(self, host: str) -> list[Worker]:
        return [worker for worker in self.workers.on_host(host) if worker.state in ACTIVE]

    def _abandon(self, replacement: Replacement, why: str, now: float) -> None:
        """Keep every worker; one that is too many then is stopped like any other."""
        worker = self.workers.workers.get(replacement.worker)
        self.effects.announce(worker_log.ReplacementAbandoned(), why, worker)
        if worker is not None:
            self.workers.mark_leaving(worker, "")
        self.replacement = None
        self.capacity.note_change()
        self._replace_after = now + self.settings.replace_pause

    def _consider(self, now: float) -> Iterator[Wait]:
        """Replace the rank that has been slow for longest, if it is time and there is room."""
        name, verdict = next(iter(self.slow.items()))
        worker = self.workers.workers.get(name)
        if worker is None or worker.state is not RUNNING or worker.leaving:
            return  # it leaves anyway; the end of the round forgets it
        judged = Wait(verdict.since + self.settings.slow_for)
        if not judged.is_over(now):
            yield judged
            return
        self.hosts.distrust(worker.host)
        pause = Wait(self._replace_after)
        if not pause.is_over(now):
            yield pause
            return
        target = self._room_elsewhere(worker, now)
        running = self.workers.count(RUNNING)
        wanted = self.capacity.wanted
        if target is not None and running == self.workers.active() == wanted:
            reason = f"it took {verdict.ratio:.1f} times the usual time on {worker.host}"
            drain = Drain(reason, now + self.settings.start_timeout)
            number, started = self.rounds.current.number, self.workers.started
            self.replacement = Replacement(name, target, number, started, drain)
            self.capacity.note_change()
            what = f"on {target}: {reason}"
            self.effects.announce(worker_log.ReplacementStarted(target=target), what, worker)
        elif target is None and worker.host not in self._without_room:
            self._without_room.add(worker.host)
            why = "no host that is not slow has a free slot (is --max-np below all slots?)"
            if self._last_change():
                why = "the reset limit leaves no change for that"
            self.effects.announce(worker_log.WorkerNotReplaced(), f"it is slow, but {why}", worker)

    def _room_elsewhere(self, worker: Worker, now: float) -> str | None:
        """Return the host that may take the worker's place."""
        if self.capacity.wanted is None or self._last_change():
            return None
        slow = {w.host for w in self.workers.having(READY, RUNNING) if w.id in self.slow}
        slow |= self.hosts.distrusted
        for name, host in self.hosts.known.items():
            unsafe = name not in self.fleet.agents and self.hosts.is_suspect(name, now)
            if name in slow or unsafe or not self.hosts.is_usable(name):
                continue
            if len(self.workers.in_slots(name)) < host.slots and self._makes_a_world(worker, name):
                return name
        return None

    def _last_change(self) -> bool:
        """Return whether the reset limit leaves one change at most, which a failure may need."""
        limit = self.settings.reset_limit
        return limit is not None and self.rounds.resets + 1 >= limit

    def _makes_a_world(self, worker: Worker, target: str) -> bool:
        """Return whether the workers that stay and the replacement are on whole units of hosts."""
        if not units.limited(self.settings):
            return True
        staying = [w for w in self.workers.having(*ACTIVE) if w is not worker and not w.leaving]
        hosts = tuple({target, *(w.host for w in staying)})
        return len(units.whole(hosts, self.settings)) == len(hosts)


# ---- notices -----------------------------------------------------------------------------

SPREAD_SHARE = 0.25  # of the time that the first notice gives


@dataclass(slots=True)
class Notices(Rule):
    """Holds notices until those of the others may have come, then hands them to `Drains`."""

    drains: Drains
    _hosts: dict[str, Drain] = saved(factory=dict, name="hosts")  # their notices that are held
    _workers: dict[str, Drain] = saved(factory=dict, name="workers")
    _until: float = saved(math.inf, name="until")

    @property
    def gathering(self) -> bool:
        """Whether more notices are awaited, so that the world is to stay as it is."""
        return bool(self._hosts or self._workers) and self.ending.departure is None

    @takes(ev.HostLeaving)
    def on_host_leaving(self, event: ev.HostLeaving, now: float) -> None:
        """Take in the notice of an agent's host."""
        self.fleet.current(event)  # an earlier agent's notice is stale
        if event.host in self._hosts:
            raise ev.StaleEvent(f"host {event.host} has said before that it has to go")
        drain = self.drains.drain_for(event, now)
        if self._is_held(event.deadline, now):
            self._hosts[event.host] = drain
        elif not self.drains.drain(event.host, drain):
            raise ev.StaleEvent(f"host {event.host} is not there, or is drained already")

    @takes(ev.WorkerLeaving)
    def on_worker_leaving(self, event: ev.WorkerLeaving, now: float) -> None:
        """Take in the notice of a single worker."""
        if event.worker in self._workers:
            raise ev.StaleEvent(f"{event.worker} has said before that it has to go")
        self.drains.check_worker(event)
        drain = self.drains.drain_for(event, now)
        if self._is_held(event.deadline, now):
            self._workers[event.worker] = drain
        else:
            self.drains.drain_worker(event.worker, drain, event.deadline)

    def _is_held(self, deadline: float, now: float) -> bool:
        """Return whether to wait for the notices of others; the first one begins the wait."""
        spread = min(self.settings.notice_spread, deadline * SPREAD_SHARE)
        if not spread or not self.outcome.elastic or self.outcome.finishing:
            return False
        if not self._hosts and not self._workers:
            self._until = now + spread
        return True

    def advance(self, now: float) -> Iterable[Wait]:
        """Hand the notices on when there is no reason to wait any longer."""
        if not self._hosts and not self._workers:
            return
        wait = Wait(self._until, "a notice may be one of many")
        told = all(name in self._hosts or self.hosts.drain_of(name) for name in self.hosts.known)
        if told or not self.gathering or self.outcome.finishing or wait.is_over(now):
            self._hand_on(now)
        else:
            yield wait

    def _hand_on(self, now: float) -> None:
        hosts, self._hosts = self._hosts, {}
        workers, self._workers = self._workers, {}
        for host, drain in hosts.items():
            self.drains.drain(host, drain)
        for worker, drain in workers.items():
            self.drains.drain_worker(worker, drain, (drain.leave_by or now) - now)

    def end_by(self, latest: float) -> float:
        """Return when the first host or worker with a notice is stopped, at the latest `latest`."""
        drains = [*self._hosts.values(), *self._workers.values()]
        drains += filter(None, map(self.hosts.drain_of, self.hosts.known))
        return min([latest, *(drain.leave_by for drain in drains if drain.leave_by is not None)])
