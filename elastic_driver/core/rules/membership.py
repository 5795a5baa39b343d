"""Rounds of a job whose workers speak to us: survivors keep their process.

A loss is handled at once, growth and removal at a step boundary; booting workers are not waited for
while enough others are ready. Times are monotonic seconds.
"""

from dataclasses import dataclass

from elastic_driver.core.rules import units
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.boundary import Boundary
from elastic_driver.core.rules.drain import Drains
from elastic_driver.core.rules.endings import Endings
from elastic_driver.core.rules.final_checkpoint import FinalSaves
from elastic_driver.core.rules.placement import Placement
from elastic_driver.core.rules.preemption import Preemption
from elastic_driver.core.rules.rounds import CLOSING, COMPLETE, FORMING
from elastic_driver.core.rules.workers import READY, RUNNING, STARTING, STOPPING, Worker


@dataclass(slots=True)
class ElasticRound:
    """The moments since which one round waits."""

    change_since: float | None = None  # a planned change waits since then
    left_since: float | None = None  # the first member left it at the boundary then


@dataclass(slots=True)
class Membership(Rule):
    """Forms the rounds of elastic jobs, and closes them for changes."""

    endings: Endings
    drains: Drains
    placement: Placement
    boundary: Boundary
    final_checkpoint: FinalSaves
    preemption: Preemption

    def advance(self, now: float) -> None:
        """Do what the present state asks for."""
        if not self.outcome.elastic or self.placement.unsettled:
            return  # leavers are stale; they are marked anew on the next pass
        if self.placement.some_leave:
            self._stop_newcomers()
        if self.rounds.current.state is COMPLETE:
            self._watch_changes(now)
        if self.rounds.current.state is CLOSING:
            self._watch_leaving(now)
        if self.outcome.end is None and not self.outcome.finishing:
            self._fill_slots(now)
        if self.outcome.end is None and self.rounds.current.state is FORMING:
            self._watch_forming(now)

    def _stop_newcomers(self) -> None:
        """Those that have to go and never took part: they have nothing to leave."""
        for worker in self.workers.having(STARTING, READY):
            if worker.leaving and worker.admitted is None:
                self.orders.stop(worker, worker.leaving)

    # ---- a round that trains -------------------------------------------------------------

    def _watch_changes(self, now: float) -> None:
        """Growth and removal: coalesced by the last call, then a notice to leave at a boundary."""
        if self.outcome.first_success is not None:
            return
        staying = [w for w in self.workers.having(RUNNING, READY) if not w.leaving]
        fitting = units.fit(staying, self.settings)
        newcomers = [w for w in fitting if w.state is READY]
        leavers = [w for w in self.workers.having(RUNNING) if w.leaving]
        own = self.rounds.own(ElasticRound)
        if not newcomers and not leavers:
            own.change_since = None
            return
        own.change_since = now if own.change_since is None else own.change_since
        reason = leavers[0].leaving if leavers else f"{newcomers[0].id} is ready to join"
        at = own.change_since + self.settings.last_call
        all_leave = not newcomers and len(leavers) == self.workers.count(RUNNING)
        if all_leave and self._newcomers_in_sight():
            # Workers that leave now take the state along: train on until others can take it over.
            drains = [self.drains.of(worker) for worker in leavers]
            ends = [drain.replace_until for drain in drains if drain and drain.leave_by is not None]
            at = min([own.change_since + self.settings.elastic_timeout, *ends])
            reason = f"{reason}; nobody to take over yet"
        elif not self.outcome.finishing and (until := self._waits_until(leavers)) is not None:
            at, reason = max(at, until), f"{reason}; its replacements are booting"
        if self.effects.due_or_set_alarm(at, now, f"change is coming: {reason}"):
            self.boundary.leave(now, reason)

    def _waits_until(self, leavers: list[Worker]) -> float | None:
        """Return until when these workers wait for their replacements; None: not at all."""
        drains = [self.drains.of(worker) for worker in leavers]
        until = [drain.replace_until for drain in drains if drain is not None]
        if not until or len(until) < len(drains):  # others leave now: one change for all
            return None
        return min(until) if self._replacements_are_coming() else None

    def _replacements_are_coming(self) -> bool:
        if any(not worker.leaving for worker in self.workers.having(STARTING)):
            return True
        if self.placement.room_left() == 0:
            return False
        return bool(self.fleet.starting() or self.placement.free_slots(1))

    def _slots_come_free(self) -> bool:
        """Return whether others with a notice make room for a worker that can take the state."""
        going = self.workers.having(READY, STOPPING)
        noticed = (w for w in going if self.drains.has_notice(w))
        return sum(1 for worker in noticed if self.hosts.usable(worker.host)) > 1

    def _newcomers_in_sight(self) -> bool:
        if self.outcome.finishing:
            return False
        booting = any(not w.leaving for w in self.workers.having(STARTING))
        return booting or bool(self.fleet.starting()) or bool(self.placement.free_slots(1))

    # ---- a round that its members leave ------------------------------------------------------

    def _watch_leaving(self, now: float) -> None:
        current = self.rounds.current
        still_in = self.workers.count(RUNNING)
        if not still_in:
            if self.outcome.first_success is None or self.workers.count(READY):
                self.rounds.open_next(now, f"everybody has left round {current.number}")
            return
        self._hurry_stragglers(now)
        timeout = self.settings.elastic_timeout
        waiting = f"{still_in} workers have not left round {current.number} yet"
        if not self.effects.due_or_set_alarm(current.since + timeout, now, waiting):
            return
        if current.at_boundary:
            # A worker that commits once an hour is not to lose that hour to a planned change, and
            # one that hangs loses its lease: so this only announces the wait.
            self.rounds.wait_again(now)
            overdue = f"no step boundary for {timeout:g} s; does the script call commit()?"
            self.effects.announce("boundary_overdue", overdue)
            return
        for worker in self.workers.having(RUNNING):
            late = f"did not leave the round within {timeout:g} s"
            self.endings.give_up_worker(worker, late, now)

    def _hurry_stragglers(self, now: float) -> None:
        """Tell members to leave at once that do not follow the first one at the boundary.

        Once a member has left, no other can finish another step without it. So a member that does
        not follow soon missed the notice and waits for its peer: this costs it nothing, and
        nothing else would end that wait.
        """
        current, own = self.rounds.current, self.rounds.own(ElasticRound)
        if not current.at_boundary:
            return
        ready = self.workers.having(READY)
        gone = next((worker for worker in ready if worker.left == current.number), None)
        if gone is None:
            return
        own.left_since = now if own.left_since is None else own.left_since
        has_left = f"{gone.id} has left round {current.number}"
        at = own.left_since + self.settings.settle
        if self.effects.due_or_set_alarm(at, now, f"{has_left}; others follow"):
            self.rounds.leave(now, f"{has_left} and others have not")

    # ---- a round that forms ------------------------------------------------------------------

    def _fill_slots(self, now: float) -> None:
        """Start replacements and newcomers; before any step was finished, not at once."""
        if not self.capacity.placement_due:
            return
        last_loss_at = self.outcome.last_loss_at
        if not self.outcome.has_progress and last_loss_at is not None:
            waiting = "to see whether every worker fails before anyone is started again"
            if not self.effects.due_or_set_alarm(last_loss_at + self.settings.settle, now, waiting):
                return
        self.capacity.placing_begins()
        founders = self.rounds.current.state is FORMING and not any(
            w.admitted is not None for w in self.workers.having(READY)
        )
        later = self.rounds.current.number > 1 or not founders
        reason = "a free slot" if later else "the first round"
        # In the first round a replacement does not hold up those who are ready and enough.
        awaited = founders and not self.placement.founders.workers
        where = self.placement.free_slots(self.placement.room_left())
        self.placement.place(where, founders=founders, awaited=awaited, reason=reason)

    def _watch_forming(self, now: float) -> None:
        if self.outcome.first_success is not None:
            self._watch_last_round(now)
            return
        if self._founders_boot(now):
            return
        ready = [w for w in self.workers.having(READY) if not w.leaving]
        if self._would_be_lost(ready) and self.final_checkpoint.request(now):
            return
        if self.outcome.departure is not None:
            self.preemption.everybody_left()
            return
        self._release_leavers(ready)
        fitting = units.fit(ready, self.settings)
        if any(w.admitted is not None for w in ready):
            if len(fitting) >= self.settings.min_np:
                self._complete(ready, now, self._why_complete())
            else:
                self._give_up_below(self.settings.min_np, ready, now)
            return
        need = self._need_of_a_fresh_round(ready, fitting, now)
        if need is not None and len(fitting) >= max(need, 1):
            self._complete(ready, now, "every worker is ready")

    def _founders_boot(self, now: float) -> bool:
        """Return whether the first round only waits for workers that were started for it.

        Seen without a look at each, for that would cost the square of their number.
        """
        departs = self.outcome.departure is not None
        if self.rounds.current.number > 1 or self.placement.some_leave or departs:
            return False
        if not any(worker.awaited for worker in self.workers.having(STARTING)):
            return False
        return not self._fresh_is_due(now)

    def _fresh_is_due(self, now: float) -> bool:
        """Return whether workers that were started together are waited for no longer."""
        founded_at = self.placement.founders.at
        since = self.rounds.current.since if founded_at is None else founded_at
        at = since + self.settings.start_timeout
        ready, booting = (self.workers.count(s) for s in (READY, STARTING))
        enough = f"{ready} of at least {self._fresh_need()} workers are ready"
        waiting = f"{enough}, {booting} are booting"
        return self.effects.due_or_set_alarm(at, now, waiting)

    def _fresh_need(self) -> int:
        first = self.rounds.current.number == 1
        need = self.placement.founders.need if first else self.settings.min_np
        return self.capacity.at_most_wanted(need)

    def _watch_last_round(self, now: float) -> None:
        """After a success: those who are left form a round of their own, however few."""
        ready = list(self.workers.having(READY))
        booting = self.workers.count(STARTING)
        timeout, waiting = self.settings.start_timeout, f"{booting} workers are booting"
        at = self.rounds.current.since + timeout
        if booting and not self.effects.due_or_set_alarm(at, now, waiting):
            return
        if ready:
            self._complete(ready, now, "the workers that are left finish together")
            return
        for worker in self.workers.having(STARTING):
            self.orders.stop(worker, f"not ready within {timeout:g} s, and the job is finishing")

    def _need_of_a_fresh_round(
        self, ready: list[Worker], fitting: list[Worker], now: float
    ) -> int | None:
        """Return how many are enough where no worker trains yet; None: the founders are awaited."""
        settings, first, need = self.settings, self.rounds.current.number == 1, self._fresh_need()
        booting = any(w.awaited for w in self.workers.having(STARTING))
        if not first and len(fitting) < max(need, 1):
            self._give_up_below(need, ready, now)
            return None
        if not self._fresh_is_due(now):
            return None if booting else need
        if first and settings.start_min_np is not None:
            need = min(need, settings.start_min_np)
        if first and len(fitting) < max(need, 1):
            waited = now - self.rounds.current.since
            self.outcome.give_up(need, len(ready), waited, self._shortage(ready))
            return None
        return need

    def _why_complete(self) -> str:
        lost = next((loss for loss in self.outcome.losses if loss.member), None)
        if lost is None:
            return "membership changed"
        return f"without {lost.failure.worker}, which {lost.reason}"

    def _give_up_below(self, need: int, ready: list[Worker], now: float) -> None:
        """Below the minimum for too long: the job ends."""
        since, shortage = self.rounds.current.since, self._shortage(ready)
        waiting = shortage or f"{len(ready)} of at least {need} workers are ready"
        at = since + self.settings.elastic_timeout
        if self.effects.due_or_set_alarm(at, now, waiting):
            self.outcome.give_up(need, len(ready), now - since, shortage)

    def _shortage(self, ready: list[Worker]) -> str:
        return units.shortage(len({worker.host for worker in ready}), self.settings)

    def _complete(self, ready: list[Worker], now: float, reason: str) -> None:
        members = ready
        if self.outcome.first_success is None:
            holders = self._state_holders(ready)
            shares = units.shares(ready, self.settings, holders)[: self.capacity.wanted]
            members = units.fit(shares, self.settings)
        self.rounds.complete(members, now, reason)
        if self.outcome.first_success is None:
            self.endings.settle_losses()
            self._release_leavers(members)

    # ---- workers that have to leave ------------------------------------------------------

    def _state_holders(self, ready: list[Worker]) -> list[Worker]:
        """The worker that has to leave but alone holds the newest state: it hands it over first."""
        newest = max((w.version for w in ready if w.clean), default=-1)
        leavers = [w for w in self.workers.having(READY) if w.leaving and w.clean]
        best = max(leavers, key=lambda w: w.version, default=None)
        wanted = self.capacity.wanted
        room = wanted is None or wanted >= 2  # beside it another has to receive
        return [best] if best is not None and best.version > newest and room else []

    def _would_be_lost(self, ready: list[Worker]) -> bool:
        """Return whether only leavers hold the newest state, and no other can receive it."""
        newest = max((w.version for w in ready if w.clean), default=-1)
        waiting = self.workers.having(READY)
        ahead = any(w.leaving and w.clean and w.version > newest for w in waiting)
        return ahead and not (ready and self._state_holders(ready))

    def _release_leavers(self, ready: list[Worker]) -> None:
        """Stop those who have left the round and have to go, unless their state is still needed."""
        needed: list[Worker] = []
        if ready or self._newcomers_in_sight() or self._slots_come_free():
            needed = self._state_holders(ready)
        for worker in self.workers.having(READY):
            if worker.leaving and worker not in needed:
                self.orders.stop(worker, worker.leaving)
