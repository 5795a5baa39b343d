"""Rounds of a job whose workers never speak to us: every change restarts them all.

Also the first round of a job whose kind is not known yet. Ranks are given at birth;
a round is complete when all its processes were started. Times are monotonic seconds.
"""

from dataclasses import dataclass

from elastic_driver.core.rules import units
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.endings import Endings
from elastic_driver.core.rules.outcome import KILLED, Cause, Loss, ScriptKind
from elastic_driver.core.rules.placement import Placement
from elastic_driver.core.rules.rounds import CLOSING, COMPLETE, FORMING
from elastic_driver.core.rules.workers import ACTIVE, OCCUPYING, STARTING


@dataclass(slots=True)
class PlainRound:
    """The moments since which one round waits."""

    slots_since: float | None = None  # enough slots are ready since then
    started_at: float | None = None  # every process is up since then
    change_since: float | None = None  # a planned change waits since then


@dataclass(slots=True)
class Plain(Rule):
    """Forms the rounds of plain jobs, and restarts them."""

    endings: Endings
    placement: Placement

    def advance(self, now: float) -> None:
        """Do what the present state asks for."""
        if self.outcome.elastic:
            return
        if self.rounds.current.state is CLOSING:
            self._watch_stopping(now)
        if self.outcome.end is None and self.rounds.current.state is FORMING:
            self._watch_forming(now)
        over = self.outcome.end is not None or self.outcome.first_success is not None
        if over or not self.placement.founders.workers:
            return
        if self.outcome.losses:
            self._watch_losses(now)
        else:
            self._watch_changes(now)

    def _watch_stopping(self, now: float) -> None:
        left, current = self.workers.count(*OCCUPYING), self.rounds.current
        if left == 0:
            self.rounds.open_next(now, f"every worker of round {current.number} has stopped")
            return
        timeout, waiting = self.settings.elastic_timeout, f"{left} workers have not stopped yet"
        if self.effects.due_or_set_alarm(current.since + timeout, now, waiting):
            self.outcome.give_up(self.settings.min_np, 0, timeout)

    # ---- a round that forms --------------------------------------------------------------

    def _watch_forming(self, now: float) -> None:
        founders, own = self.placement.founders, self.rounds.own(PlainRound)
        if not founders.workers:
            if self.outcome.first_success is None:
                self._found(now)
            return
        if self._wait_for_processes(now) or self.outcome.losses:
            return
        if own.started_at is None:
            own.started_at = now
        if self.outcome.kind is ScriptKind.UNDECLARED:
            at = own.started_at + self.settings.plain_after
            waiting = "to see whether the script calls elastic.init()"
            if not self.effects.due_or_set_alarm(at, now, waiting):
                return
            self.outcome.declare(ScriptKind.PLAIN)
        founded = [self.workers.workers[worker] for worker in founders.workers]
        self.rounds.complete(founded, now, "every process was started")

    def _wait_for_processes(self, now: float) -> bool:
        missing = sum(1 for w in self.workers.having(STARTING) if not w.pid)
        if not missing:
            return False
        founders = self.placement.founders
        assert founders.at is not None  # noqa: S101 - set together with the workers
        timeout, placed = self.settings.start_timeout, len(founders.workers)
        waiting = f"{missing} processes have not been started yet"
        if self.effects.due_or_set_alarm(founders.at + timeout, now, waiting):
            self.outcome.give_up(placed, placed - missing, timeout)
        return True

    def _found(self, now: float) -> None:
        """Start the round's workers once enough slots have agents."""
        settings, current, own = self.settings, self.rounds.current, self.rounds.own(PlainRound)
        first = current.number == 1
        need = self.capacity.at_most_wanted(settings.start_np if first else settings.min_np)
        free = self.placement.free_slots(self.placement.room_left())
        where = self.placement.founding_slots()
        have = len(free)
        shortage = units.shortage(len({host for host, _ in free}), settings)
        waiting = shortage or f"{have} of at least {need} slots have an agent"
        timeout = settings.start_timeout if first else settings.elastic_timeout
        if self.effects.due_or_set_alarm(current.since + timeout, now, waiting):
            if first and settings.start_min_np is not None:
                need = min(need, settings.start_min_np)
            if have < need or not where:
                self.outcome.give_up(need, have, now - current.since, shortage)
                return
        if have < max(need, 1) or not where:
            own.slots_since = None
            return
        own.slots_since = now if own.slots_since is None else own.slots_since
        if self.fleet.starting() and have != self.capacity.wanted:  # there are more to come
            at = own.slots_since + settings.last_call
            if not self.effects.due_or_set_alarm(at, now, waiting):
                return
        reason = f"round {current.number} starts on {len(where)} slots"
        self.placement.found(where, need, now, reason)

    # ---- a round that breaks or changes ------------------------------------------------------

    def _watch_losses(self, now: float) -> None:
        """Restart after a failure, once it is known whether the others fail by themselves too."""
        assert self.outcome.first_loss_at is not None  # noqa: S101 - set with the first of `losses`
        first = self.outcome.losses[0]
        if not self._comes_from_outside(first) and self.workers.count(*ACTIVE):
            waiting, at = "to see whether every worker fails", self.outcome.first_loss_at
            if not self.effects.due_or_set_alarm(at + self.settings.settle, now, waiting):
                return
        if self.outcome.count_failure(now, fruitless=True, whole_round=True):
            self._restart(now, f"{first.failure.worker} {first.reason}")

    def _comes_from_outside(self, loss: Loss) -> bool:
        """Return whether a loss is surely not the script's own doing: its peers need no watching.

        No program ends itself by SIGKILL; other signals may be a crash that all its peers share.
        """
        if loss.cause in (Cause.HUNG, Cause.AGENT):
            return True
        killed = loss.failure.exit_code == KILLED
        return loss.cause is Cause.SIGNAL and (self.outcome.has_progress or killed)

    def _watch_changes(self, now: float) -> None:
        current, own = self.rounds.current, self.rounds.own(PlainRound)
        if current.state is CLOSING:
            return
        leavers = (w.leaving for w in self.workers.having(*ACTIVE) if w.leaving)
        reason = current.broken or next(leavers, "")
        complete = current.state is COMPLETE
        if not reason and complete and self.placement.founding_slots():
            reason = "there are slots for more workers"
        if not reason:
            own.change_since = None
            return
        own.change_since = now if own.change_since is None else own.change_since
        at, waiting = own.change_since + self.settings.last_call, f"change is coming: {reason}"
        if current.broken or self.effects.due_or_set_alarm(at, now, waiting):
            self._restart(now, reason)

    def _restart(self, now: float, reason: str) -> None:
        """Stop every worker; the next round is placed when the last one is gone."""
        if self.rounds.close(now, reason, at_boundary=False):
            self.outcome.restarted()
            self.orders.stop_all(f"restart: {reason}")
            self.endings.settle_losses()
