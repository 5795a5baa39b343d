"""Hosts and workers that are to go in good order: by hand, with a notice of their end, or slow.

A drained host is left like one that discovery removed, at a step boundary and without a step
lost, but there is time: where other hosts have room, its workers train on until their
replacements are ready, so that the world need not shrink. The same holds for a single worker with
a notice; its slot is then free for the next one.

With `--replace-slow`, a worker that computes slowly is drained, too: one at a time, only out of a
full world, and only onto one host that has room and is not slow itself, where its replacement is
started first. A host once left is the last choice until a rank there has recovered, and between
two hosts there is a pause. Without room elsewhere nothing happens, and that is said once.
`policies.stragglers` gives the verdict on a rank; it is forgotten with its round.

Times are monotonic seconds.
"""

from dataclasses import dataclass, field, replace

from elastic_driver.core import events as ev
from elastic_driver.core.documents import time_to_leave
from elastic_driver.core.rules import units
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.hosts import Drain
from elastic_driver.core.rules.rounds import CLOSING, COMPLETE
from elastic_driver.core.rules.workers import ACTIVE, READY, RUNNING, STOPPED, STOPPING, Worker

REPLACEMENT_SHARE = 0.5  # of a deadline; the rest is for the boundary and for ending processes
NO_REASON = "no reason was given"
_HERE = (READY, RUNNING)
_GONE_AS_TOLD = (STOPPING, STOPPED)


@dataclass(frozen=True, slots=True)
class SlowVerdict:
    """The verdict that a member computes slowly."""

    ratio: float  # its time over the usual one
    since: float


class SlowMembers(dict[str, SlowVerdict]):
    """The slow members of a round, by worker; the first that was found comes first."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """A slow worker that is drained, and the host on which its replacement is started."""

    worker: str
    target: str
    round: int  # the one in which it began
    after: int  # workers started before it
    drain: Drain


@dataclass(slots=True)
class Drains(Rule):
    """Records the hosts and workers that have to go, and the reasons."""

    replacement: Replacement | None = None
    _notices: dict[str, Drain] = field(default_factory=dict)  # of workers that were told to go
    _replace_after: float = 0.0  # no replacement begins earlier
    _without_room: set[str] = field(default_factory=set)  # slow hosts that no worker can leave

    # ---- requests and notices ------------------------------------------------------------

    def on_requested(self, event: ev.DrainRequested, now: float) -> None:
        """Drain a host."""
        self._drain(event.host, self._until(event.reason or NO_REASON, event.deadline, now))

    def on_host_leaving(self, event: ev.HostLeaving, now: float) -> None:
        """Drain a host that goes away."""
        if self.fleet.current(event.host, event.incarnation) is None:
            self.effects.ignore(f"agent {event.host}.{event.incarnation} is not the present one")
            return
        self._drain(event.host, self._with_notice(event, now))

    def on_worker_leaving(self, event: ev.WorkerLeaving, now: float) -> None:
        """Drain a worker that has to go; its host stays."""
        worker = self.workers.workers.get(event.worker)
        if worker is None or worker.state not in ACTIVE or not self.outcome.elastic:
            self.effects.ignore(f"{event.worker} is gone or going, or has not taken part yet")
            return
        if worker.id in self._notices:
            self.effects.ignore(f"{event.worker} has said before that it has to go")
            return
        drain = self._notices[worker.id] = self._with_notice(event, now)
        self.capacity.note_change()
        self.effects.announce("worker_leaving", drain.reason, worker, deadline=event.deadline)

    def on_cancelled(self, event: ev.DrainCancelled, now: float) -> None:
        """Let the host be used again; workers that have not left yet stay."""
        if not self.hosts.undrain(event.host):
            self.effects.ignore(f"host {event.host} is not drained")
            return
        self.hosts.trust(event.host)  # its owner may have cured its slowness, too
        self.capacity.note_change()
        self.effects.announce("drain_cancelled", event.reason or NO_REASON, host=event.host)

    def _until(self, reason: str, deadline: float | None, now: float) -> Drain:
        patience = self.settings.start_timeout
        if deadline is not None:
            patience = min(patience, deadline * REPLACEMENT_SHARE)
        return Drain(reason, now + patience)

    def _with_notice(self, event: ev.HostLeaving | ev.WorkerLeaving, now: float) -> Drain:
        drain = self._until(event.reason or NO_REASON, event.deadline, now)
        return replace(drain, leave_by=now + time_to_leave(event.deadline))

    def _drain(self, host: str, drain: Drain) -> None:
        if not self.hosts.drain(host, drain):
            self.effects.ignore(f"host {host} is not there, or is drained already")
            return
        self.capacity.note_change()
        self.effects.announce("drain_requested", drain.reason, host=host)
        if host not in self.fleet.agents:
            self.effects.announce("host_drained", f"nothing ran there: {drain.reason}", host=host)

    # ---- questions -----------------------------------------------------------------------

    def of(self, worker: Worker) -> Drain | None:
        """Return the drain for which a worker has to go: its host's, or its own."""
        drain, replacement = self.hosts.drained(worker.host), self.replacement
        if drain is None and replacement is not None and replacement.worker == worker.id:
            return self._notices.get(worker.id, replacement.drain)
        return drain or self._notices.get(worker.id)

    def has_notice(self, worker: Worker) -> bool:
        """Return whether the worker itself was told to go."""
        return worker.id in self._notices

    def reason_for(self, worker: Worker) -> str:
        """Return why a worker has to go; empty where nothing is drained for it."""
        drain = self.of(worker)
        if drain is None:
            return ""
        if self.hosts.drained(worker.host) is not None:
            return f"host {worker.host} is drained: {drain.reason}"
        how = "has to go" if worker.id in self._notices else "is replaced"
        return f"{worker.id} {how}: {drain.reason}"

    # ---- slow workers --------------------------------------------------------------------

    @property
    def slow(self) -> dict[str, SlowVerdict]:
        """The slow members of the present round."""
        return self.rounds.own(SlowMembers)

    def on_slow(self, event: ev.RankSlow, now: float) -> None:
        """Record that a rank has become slow."""
        worker = self.workers.workers.get(event.worker)
        here = worker is not None and worker.state in _HERE
        if event.round != self.rounds.current.number or not here:
            late = f"{event.worker} was slow in round {event.round}, which is over for it"
            self.effects.ignore(late)
            return
        self.slow.setdefault(event.worker, SlowVerdict(event.ratio, now))

    def on_recovered(self, event: ev.RankRecovered, now: float) -> None:
        """Record that a rank is no longer slow: it stays, and its host counts like any other."""
        round_is_over = event.round != self.rounds.current.number
        if round_is_over or self.slow.pop(event.worker, None) is None:
            self.effects.ignore(f"{event.worker} was not known to be slow in round {event.round}")
            return
        worker = self.workers.workers.get(event.worker)
        if worker is None:
            return
        if self.replacement is not None and self.replacement.worker == worker.id:
            self._abandon("it is no longer slow", now)
        if not any(other.id in self.slow for other in self._active_on(worker.host)):
            self.hosts.trust(worker.host)
            self._without_room.discard(worker.host)

    def advance(self, now: float) -> None:
        """Follow the replacement that goes on, or begin one."""
        if not self.settings.replace_slow or not self.outcome.elastic:
            return
        complete = self.rounds.current.state is COMPLETE
        if self.replacement is not None:
            self._follow(self.replacement, now)
        elif self.slow and complete and not self.outcome.finishing:
            self._consider(now)

    def _follow(self, replacement: Replacement, now: float) -> None:
        worker = self.workers.workers.get(replacement.worker)
        there = self._active_on(replacement.target)
        started = (w for w in there if w.number > replacement.after and not w.leaving)
        successor = next(started, None)
        ready = successor is not None and successor.state in _HERE
        if worker and successor and ready and worker.state in _GONE_AS_TOLD:
            self._finish(worker, successor, replacement.drain.reason, now)
            return
        why = self._why_abandon(replacement, worker)
        if not why and not ready:
            why = self._why_not_wait(replacement, successor, now)
        if why:
            self._abandon(why, now)

    def _why_abandon(self, replacement: Replacement, worker: Worker | None) -> str:
        current = self.rounds.current
        broken = current.state is CLOSING and not current.at_boundary
        if worker is None or worker.state not in ACTIVE:
            return f"{replacement.worker} is gone"
        if self.outcome.finishing:
            return "the job is finishing"
        if current.number != replacement.round or broken:  # the slow one and its state are needed
            return "the world has changed for another reason"
        if not self._makes_a_world(worker, replacement.target):
            return "without it there are too few hosts"
        return ""

    def _why_not_wait(self, replacement: Replacement, successor: Worker | None, now: float) -> str:
        if self.rounds.current.state is not COMPLETE:
            return "the world changes before its replacement is ready"
        if not self.hosts.usable(replacement.target):
            return f"host {replacement.target} cannot be used any more"
        if (self.capacity.wanted or 0) - self.workers.active() > (successor is None):
            return "more workers are wanted"
        if self.effects.due_or_set_alarm(replacement.drain.replace_until, now):
            return f"no replacement is ready within {self.settings.start_timeout:g} s"
        return ""

    def _active_on(self, host: str) -> list[Worker]:
        return [worker for worker in self.workers.on_host(host) if worker.state in ACTIVE]

    def _finish(self, worker: Worker, successor: Worker, reason: str, now: float) -> None:
        by = f"by {successor.id}: {reason}"
        self.effects.announce("worker_replaced", by, worker, replacement=successor.id)
        self.replacement = None
        self.capacity.note_change()
        if not self._active_on(worker.host):  # workers left on the slow host may follow at once
            self._replace_after = now + self.settings.replace_pause

    def _abandon(self, why: str, now: float) -> None:
        """Let every worker stay; one that is too many then is stopped like any other."""
        if self.replacement is None:
            return
        worker = self.workers.workers.get(self.replacement.worker)
        self.effects.announce("replacement_abandoned", why, worker)
        if worker is not None:
            self.workers.mark_leaving(worker, "")
        self.replacement = None
        self.capacity.note_change()
        self._replace_after = now + self.settings.replace_pause

    def _consider(self, now: float) -> None:
        """Replace the rank that has been slow for longest, if it is time and there is room."""
        worker_id, verdict = next(iter(self.slow.items()))
        worker = self.workers.workers.get(worker_id)
        if worker is None or worker.state is not RUNNING or worker.leaving:
            return  # it leaves as it is; the round's end forgets it
        if not self.effects.due_or_set_alarm(verdict.since + self.settings.slow_for, now):
            return
        self.hosts.distrust(worker.host)
        if not self.effects.due_or_set_alarm(self._replace_after, now):
            return
        target = self._room_elsewhere(worker, now)
        running, wanted = self.workers.count(RUNNING), self.capacity.wanted
        if target is not None and running == self.workers.active() == wanted:
            reason = f"it took {verdict.ratio:.1f} times the usual time on {worker.host}"
            drain = Drain(reason, now + self.settings.start_timeout)
            number, started = self.rounds.current.number, self.workers.started
            self.replacement = Replacement(worker.id, target, number, started, drain)
            self.capacity.note_change()
            on = f"on {target}: {reason}"
            self.effects.announce("replacement_started", on, worker, target=target)
        elif target is None and worker.host not in self._without_room:
            self._without_room.add(worker.host)
            why = "no other host that is not has a free slot (--max-np below all slots?)"
            if self._last_change():
                why = "the reset limit leaves no change for that"
            self.effects.announce("worker_not_replaced", f"it is slow, but {why}", worker)

    def _room_elsewhere(self, worker: Worker, now: float) -> str | None:
        """Return the host that may take the worker's place."""
        if self.capacity.wanted is None or self._last_change():
            return None
        slow_now = {w.host for w in self.workers.having(*_HERE) if w.id in self.slow}
        for host in self.hosts.known.values():
            name, without_agent = host.name, host.name not in self.fleet.agents
            distrusted = name in slow_now or name in self.hosts.distrusted
            if distrusted or not self.hosts.usable(name):
                continue
            if without_agent and self.hosts.suspect(name, now):
                continue
            free = len(self.workers.on_host(name)) < host.slots
            if free and self._makes_a_world(worker, name):
                return name
        return None

    def _last_change(self) -> bool:
        """Return whether a failure may need the changes that the reset limit leaves."""
        limit = self.settings.reset_limit
        return limit is not None and self.rounds.current.number >= limit

    def _makes_a_world(self, worker: Worker, target: str) -> bool:
        """Return whether those who stay, and the replacement, are on whole units of hosts."""
        if not units.limited(self.settings):
            return True
        staying = [w for w in self.workers.having(*ACTIVE) if w is not worker and not w.leaving]
        hosts = tuple({target, *(w.host for w in staying)})
        return len(units.whole(hosts, self.settings)) == len(hosts)
