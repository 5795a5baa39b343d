"""Rounds of a job whose script does not call `elastic.init()`: every change restarts all workers.

Also the first round of a job whose kind is not known yet. A worker gets its rank at its start, and
a round is complete when all its processes were started. Times are monotonic seconds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elastic_driver.job import units
from elastic_driver.job.outcome import KILLED, Cause, ScriptKind
from elastic_driver.job.placement import Placement
from elastic_driver.job.reports import Reports
from elastic_driver.job.rounds import CLOSING, COMPLETE, FORMING, Rule
from elastic_driver.job.workers import ACTIVE, OCCUPYING, STARTING
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted


@dataclass(slots=True)
class Plain(Rule):
    """Forms the rounds of plain jobs, and restarts them."""

    reports: Reports
    placement: Placement

    def advance(self, now: float) -> Iterable[Wait]:
        """Form, complete or restart the round as the present state requires."""
        if self.outcome.elastic:
            return
        if self.rounds.current.state is CLOSING:
            yield from self._watch_stopping(now)
        if self.ending.end is None and self.rounds.current.state is FORMING:
            yield from self._watch_forming(now)
        if self.ending.end is not None or not self.rounds.current.founders:
            return
        finishing = self.outcome.first_success is not None
        if self.outcome.losses and (self.settings.max_restarts or not finishing):
            yield from self._watch_losses(now)
        elif not finishing:
            yield from self._watch_changes(now)

    def _watch_stopping(self, now: float) -> Iterator[Wait]:
        left = self.workers.count(*OCCUPYING)
        current = self.rounds.current
        if left == 0:
            self.rounds.open_next(now, f"every worker of round {current.number} has stopped")
            return
        timeout = self.settings.elastic_timeout
        have = counted(left, "worker has", "workers have")
        wait = Wait(current.since + timeout, f"{have} not stopped yet")
        if wait.is_over(now):
            self.outcome.give_up(self.capacity.least, 0, timeout)
        else:
            yield wait

    # ---- a round that forms --------------------------------------------------------------

    def _watch_forming(self, now: float) -> Iterator[Wait]:
        current = self.rounds.current
        if not current.founders:
            if self.outcome.first_success is None and not self.fleet.awaited:
                yield from self._start_founders(now)
            return
        hosts = [worker.host for worker in self.workers.having(STARTING) if not worker.pid]
        if hosts:
            missing = len(hosts)
            timeout = self.settings.start_timeout
            placed = len(current.founders)
            have = counted(missing, "process has", "processes have")
            wait = Wait((current.founded_at or 0.0) + timeout, f"{have} not been started yet")
            if wait.is_over(now):
                late = f"{have} not been started yet, on {', '.join(sorted({*hosts}))}"
                self.outcome.give_up(placed, placed - missing, timeout, booting=late)
            else:
                yield wait
        if hosts or self.outcome.losses:
            return
        started_at = current.wait_for("declaration", now)
        if self.outcome.kind is ScriptKind.UNDECLARED:
            self.rounds.tell_running()
            why = "the script may still call elastic.init()"
            wait = Wait(started_at + self.settings.plain_after, why)
            if not wait.is_over(now):
                yield wait
                return
            self.outcome.declare(ScriptKind.PLAIN)
        founded = [self.workers.workers[worker] for worker in current.founders]
        self.rounds.complete(founded, now, "every process was started")
        self.capacity.note_change()  # the job trains: further hosts may stand by

    def _start_founders(self, now: float) -> Iterator[Wait]:
        """Start the round's workers once enough slots have agents."""
        settings, current = self.settings, self.rounds.current
        first = current.number == 1
        need = self.capacity.at_most_wanted(settings.start_np if first else self.capacity.least)
        free = self.placement.free_slots(self.placement.room_left())
        where = self.placement.founding_slots()
        have = len(free)
        shortage = units.shortage(len({host for host, _ in free}), settings)
        why = shortage or f"{have} of at least {counted(need, 'slot has', 'slots have')} an agent"
        timeout = settings.start_timeout if first else settings.elastic_timeout
        if now < current.since + timeout:
            yield Wait(current.since + timeout, why)
        else:
            if first and settings.start_min_np is not None:
                need = min(need, settings.start_min_np)
            if have < need or not where:
                there = have + sum(host.slots for host in self.hosts.held())
                self.outcome.give_up(need, there, now - current.since, shortage)
                return
        if have < max(need, 1) or not where:
            current.stop_waiting("slots")
            return
        patience = max(settings.last_call, settings.start_together if first else 0.0)
        more = Wait(current.wait_for("slots", now) + patience, why)
        more_to_come = self.fleet.starting and have != self.capacity.wanted
        if more_to_come and not more.is_over(now):
            yield more
            return
        reason = f"round {current.number} starts on {counted(len(where), 'slot')}"
        started = self.placement.place(where, reason, founder=True, awaited=True)
        self.rounds.record_founders(started, need, now)

    # ---- a round that breaks or changes ------------------------------------------------------

    def _watch_losses(self, now: float) -> Iterator[Wait]:
        """Restart after a failure, once it is known whether the others fail by themselves too.

        A loss that surely comes from outside is not waited for. No program ends itself by SIGKILL;
        other signals may be a crash that all its peers share.
        """
        first = self.outcome.losses[0]
        outside = first.cause in (Cause.HUNG, Cause.AGENT, Cause.MEMORY)
        if first.cause is Cause.SIGNAL:
            outside = self.outcome.has_progress or first.failure.exit_code == KILLED
        if not outside and self.workers.count(*ACTIVE):
            wait = Wait(first.at + self.settings.settle, "to see whether every worker fails")
            if not wait.is_over(now):
                yield wait
                return
        if self.outcome.count_failure(now, fruitless=True, whole_round=True):
            self._restart(now, f"{first.failure.worker} {first.reason}")

    def _watch_changes(self, now: float) -> Iterator[Wait]:
        current = self.rounds.current
        if current.state is CLOSING:
            return
        leavers = (w.leaving for w in self.workers.having(*ACTIVE) if w.leaving)
        reason = current.broken or next(leavers, "")
        # The hosts of agents that are awaited would not be counted.
        settled = current.state is COMPLETE and not self.fleet.awaited
        if not reason and settled and self.placement.grows_anew():
            reason = "there are slots for more workers"
        if not reason:
            current.stop_waiting("change")
            return
        at = current.wait_for("change", now) + self.settings.last_call
        if current.broken or now >= at:
            self._restart(now, reason)
        else:
            yield Wait(at, f"change is coming: {reason}")

    def _restart(self, now: float, reason: str) -> None:
        """Stop every worker; the next round is placed when the last one is gone."""
        if self.rounds.close(now, reason, at_boundary=False):
            self.outcome.count_restart(all_workers=True)
            for worker in self.workers.having(*ACTIVE):
                self.effects.stop(worker, f"restart: {reason}")
            self.reports.settle_losses()
