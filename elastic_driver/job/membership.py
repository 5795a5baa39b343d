"""Rounds of a job whose workers call `elastic.init()`: survivors keep their process.

A loss is handled at once, growth and removal at a step boundary; booting workers are not waited for
while enough others are ready. Times are monotonic seconds.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic_driver.job import units
from elastic_driver.job.boundary import Boundary
from elastic_driver.job.leaving import Drains, Notices
from elastic_driver.job.outcome import Loss
from elastic_driver.job.placement import Placement, Spares
from elastic_driver.job.preemption import FinalCheckpoint, Preemption
from elastic_driver.job.ranks import NOT_TOLD, assign
from elastic_driver.job.reports import FIT_HINT, Reports
from elastic_driver.job.rounds import CLOSING, COMPLETE, FORMING, Rule
from elastic_driver.job.workers import ENDING, READY, RUNNING, STARTING, STOPPING, SUCCESS, Worker
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted
from elastic_driver.words import log_events as log
from elastic_driver.words import worker_log_events as worker_log

TOGETHER_S = 1.0  # a newcomer that is ready waits no longer for others that boot
TOLD_RANK_S = 30.0  # nor for those that are to have the ranks before its own


class EndedFirst(NamedTuple):
    """A member that ended its script before the others, which went on from a step."""

    worker: str
    rank: int
    others: int
    step: int
    told: bool = False


@dataclass(slots=True)
class Membership(Rule):
    """Forms the rounds of elastic jobs, and closes them for changes."""

    reports: Reports
    drains: Drains
    notices: Notices
    placement: Placement
    spares: Spares
    boundary: Boundary
    final_checkpoint: FinalCheckpoint
    preemption: Preemption
    ended_first: EndedFirst | None = saved(None)
    # Newcomers wait for the rank that they were told.
    _held_since: float | None = saved(None, name="held_since")

    def advance(self, now: float) -> Iterable[Wait]:
        """Form, complete or close the round as the present state requires."""
        if not self.outcome.elastic or self.placement.unsettled:
            return  # the marks of leaving workers are stale; they are set on the next pass
        if self.placement.some_leave:
            for worker in self.workers.having(STARTING, READY):
                if worker.leaving and worker.admitted is None:  # it is in no round
                    self.effects.stop(worker, worker.leaving)
        stays = self.notices.gathering  # then the world is not to change
        state = self.rounds.current.state
        if state is COMPLETE and self.outcome.first_success is None and not stays:
            yield from self._watch_changes(now)
        if self.rounds.current.state is CLOSING:
            yield from self._watch_leaving(now)
        if self.workers.count(ENDING):
            yield from self._watch_ending(now)
        if self.ending.end is None and not self.outcome.finishing and not stays:
            yield from self._fill_slots(now)
        if self.ending.end is None and self.rounds.current.state is FORMING and not stays:
            yield from self._watch_forming(now)
        self._tell_uneven_end()

    # ---- a round that trains -------------------------------------------------------------

    def _watch_changes(self, now: float) -> Iterator[Wait]:
        """Collect growth and removal for `last_call`, then have the members leave at a boundary."""
        current, settings = self.rounds.current, self.settings
        staying = [w for w in self.workers.having(RUNNING, READY) if not w.leaving]
        fitting, held = self._hold_back(units.fit(staying, settings), now)
        yield from held
        newcomers = [w for w in fitting if w.state is READY]
        if not self.workers.count(RUNNING):
            return  # the scripts of all members are over; their exit statuses say what follows
        leavers = [w for w in self.workers.having(RUNNING) if w.leaving]
        if not newcomers and not leavers:
            current.stop_waiting("change")
            return
        since = current.wait_for("change", now)
        reason = leavers[0].leaving if leavers else f"{newcomers[0].id} is ready to join"
        others_boot = any(not worker.leaving for worker in self.workers.having(STARTING))
        together = min(settings.start_together, TOGETHER_S) if others_boot else 0.0
        at = since + max(settings.last_call, together)
        drains = [self.drains.of(worker) for worker in leavers]
        until = [drain.replace_until for drain in drains if drain is not None]
        all_leave = not newcomers and len(leavers) == self.workers.count(RUNNING)
        if all_leave and self._newcomers_in_sight():
            # Workers that leave now take the state along: train on until others can take it over.
            ends = [drain.replace_until for drain in drains if drain and drain.leave_by is not None]
            at = min([since + settings.elastic_timeout, *ends])
            reason = f"{reason}; no other worker can take over the state yet"
        elif until and len(until) == len(drains) and self._newcomers_in_sight(wanted_only=True):
            # If one of them could not wait, all would leave with it: one change for all.
            at = max(at, min(until))
            reason = f"{reason}; its replacements are booting"
        if now >= at:
            self.boundary.leave(now, reason)
        else:
            yield Wait(at, f"change is coming: {reason}")

    def _hold_back(self, ready: list[Worker], now: float) -> tuple[list[Worker], list[Wait]]:
        """Leave out newcomers that would get another rank than they were told, for a while.

        A script of Horovod's API knows its rank before it is in a round. Where several are started
        together, the later ones wait for those before them, as long as any are coming. Only then
        do the hosts of survivors make room. Return the other workers, and what those wait for.
        """
        kept = ready if self.rounds.repair else _as_told(ready)
        if len(kept) == len(ready) or not self._newcomers_in_sight(wanted_only=True):
            self._held_since = None
            return ready, []
        if self._held_since is None:
            self._held_since = now
        held = ", ".join(worker.id for worker in ready if worker not in kept)
        why = f"workers boot whose ranks come before those of {held}"
        wait = Wait(self._held_since + TOLD_RANK_S, why)
        return (ready, []) if wait.is_over(now) else (kept, [wait])

    def _newcomers_in_sight(self, *, wanted_only: bool = False) -> bool:
        """Return whether workers boot, or may be started soon (only as many as are wanted)."""
        if self.outcome.finishing:
            return False
        if any(not worker.leaving for worker in self.workers.having(STARTING)):
            return True
        if self.fleet.awaited:
            return True
        if wanted_only and self.placement.room_left() == 0:
            return False
        return bool(self.fleet.starting or self.placement.free_slots(1))

    # ---- a round that its members leave ------------------------------------------------------

    def _watch_leaving(self, now: float) -> Iterator[Wait]:
        current, timeout = self.rounds.current, self.settings.elastic_timeout
        still_in = list(self._not_left())
        if not still_in:
            if self.outcome.first_success is None or self.workers.count(READY):
                self.rounds.open_next(now, f"all members have left round {current.number}")
            return
        if current.at_boundary:
            yield from self._hurry_stragglers(now)
        have = counted(len(still_in), "worker has", "workers have")
        wait = Wait(current.since + timeout, f"{have} not left round {current.number} yet")
        if not wait.is_over(now):
            yield wait
            return
        if current.at_boundary:
            # A worker that commits once an hour is not to lose that hour to a planned change, and
            # a worker that hangs loses its lease: so this only announces the wait.
            self.rounds.wait_again(now)
            overdue = f"no step boundary for {timeout:g} s; does the script call commit()?"
            self.effects.announce(log.BoundaryOverdue(), overdue)
            return
        for worker in still_in:
            late = f"did not leave the round within {timeout:g} s"
            self.reports.give_up_worker(worker, late, now)

    def _not_left(self) -> Iterator[Worker]:
        """Yield the members that have not left the round.

        Survivors do not wait until the processes of those end whose scripts are over. Without a
        survivor, their exit statuses decide how the job goes on.
        """
        yield from self.workers.having(RUNNING)
        if all(worker.admitted is None for worker in self.workers.having(READY)):
            yield from self.workers.having(ENDING)

    def _watch_ending(self, now: float) -> Iterator[Wait]:
        """Give up workers whose processes do not end, though the others have gone on."""
        current, timeout = self.rounds.current, self.settings.elastic_timeout
        for worker in self.workers.having(ENDING):
            if not worker.left_behind:
                continue
            wait = Wait(current.since + timeout, f"the process of {worker.id} has not ended yet")
            if not wait.is_over(now):
                yield wait
                continue
            late = f"its process did not end within {timeout:g} s after its script"
            self.reports.give_up_worker(worker, late, now)

    def _hurry_stragglers(self, now: float) -> Iterator[Wait]:
        """Tell members to leave at once that do not follow the first one at the boundary.

        Once a member has left, no other can finish another step without it. So a member that does
        not follow soon missed the notice and waits for its peer: leaving costs it nothing, and
        nothing else would end that wait.
        """
        current = self.rounds.current
        ready = self.workers.having(READY)
        gone = next((worker for worker in ready if worker.left == current.number), None)
        if gone is None:
            return
        at = current.wait_for("stragglers", now) + self.settings.settle
        has_left = f"{gone.id} has left round {current.number}"
        if now >= at:
            self.rounds.leave(now, f"{has_left} and others have not")
        else:
            yield Wait(at, f"{has_left}; others follow")

    # ---- a round that forms ------------------------------------------------------------------

    def _fill_slots(self, now: float) -> Iterator[Wait]:
        """Start replacements and newcomers; before any step was finished, not at once."""
        if not self.capacity.placement_due:
            return
        last_loss_at, current = self.outcome.last_loss_at, self.rounds.current
        if not self.outcome.has_progress and last_loss_at is not None:
            why = "to see whether every worker fails before any is started again"
            wait = Wait(last_loss_at + self.settings.settle, why)
            if not wait.is_over(now):
                yield wait
                return
        self.capacity.begin_placing()
        trained = any(worker.admitted is not None for worker in self.workers.having(READY))
        founders = current.state is FORMING and not trained
        reason = "the first round" if founders and current.number == 1 else "a free slot"
        # In the first round a replacement does not hold up workers that are ready and enough.
        awaited = founders and not current.founders
        free = self.placement.free_slots(self.placement.room_left())
        where = self.spares.promote(free, founder=founders)
        self.placement.place(where, reason, founder=founders, awaited=awaited)
        self.placement.tell_places()

    def _watch_forming(self, now: float) -> Iterator[Wait]:
        awaited = (w for host in self.fleet.awaited for w in self.workers.on_host(host))
        if any(worker.state is READY for worker in awaited):
            return  # it may have ended while no driver lived
        if self.outcome.first_success is not None:
            yield from self._watch_last_round(now)
            return
        if self._founders_boot():
            wait = self._wait_for_founders()
            if not wait.is_over(now):
                yield wait
                return
        ready = [worker for worker in self.workers.having(READY) if not worker.leaving]
        taken_over = ready and self._state_holders(ready)
        if self._newest_leaver(ready) and not taken_over:
            saving = self.final_checkpoint.request(now)
            if saving is not None:
                yield saving
                return
        if self.ending.departure is not None:
            self.preemption.end_after_all_left(self.ending.departure)
            return
        yield from self._release_leavers(ready, now)
        ready, held = self._hold_back(ready, now)
        yield from held
        fitting = units.fit(ready, self.settings)
        least = self.capacity.least
        if not any(worker.admitted is not None for worker in ready):
            yield from self._form_fresh(ready, fitting, now)
        elif len(fitting) < least:
            yield from self._give_up_below(least, ready, now)
        else:
            lost = [loss for loss in self.outcome.losses if loss.member]
            without = _without(lost) if lost else ""
            self._note_uneven_end(ready)
            ending = next(self.workers.having(ENDING), None)
            if ending is not None:
                how = "has failed" if ending.failed else "is over"
                without = without or f"without {ending.id}, whose script {how}"
            self._complete(ready, now, self.rounds.repair or without or "membership changed")

    def _founders_boot(self) -> bool:
        """Return whether the first round only waits for workers that were started for it.

        Needs no loop over all workers, which would cost O(workers²) while they boot.
        """
        departs = self.ending.departure is not None
        if self.rounds.current.number > 1 or self.placement.some_leave or departs:
            return False
        return any(worker.awaited for worker in self.workers.having(STARTING))

    def _wait_for_founders(self) -> Wait:
        """Return the wait for workers that were started together."""
        current = self.rounds.current
        since = current.since if current.founded_at is None else current.founded_at
        least = counted(self._fresh_need(), "worker is", "workers are")
        enough = f"{self.workers.count(READY)} of at least {least} ready"
        why = f"{enough}, {self.workers.count(STARTING)} are booting"
        return Wait(since + self.settings.start_timeout, why)

    def _fresh_need(self) -> int:
        """Return how many workers a round needs in which nobody has trained yet.

        The first one may not be founded: workers of an earlier driver were READY before it was.
        """
        current, settings = self.rounds.current, self.settings
        need = current.need or settings.start_np if current.number == 1 else self.capacity.least
        return self.capacity.at_most_wanted(need)

    def _watch_last_round(self, now: float) -> Iterator[Wait]:
        """After a success, let the workers that are left form a round of their own."""
        ready = list(self.workers.having(READY))
        booting = self.workers.count(STARTING)
        timeout = self.settings.start_timeout
        are = counted(booting, "worker is", "workers are")
        wait = Wait(self.rounds.current.since + timeout, f"{are} booting")
        if booting and not wait.is_over(now):
            yield wait
            return
        if ready:
            self._note_uneven_end(ready)
            self._leave_behind()
            self.rounds.complete(ready, now, "the workers that are left finish together")
            return
        for worker in self.workers.having(STARTING):
            late = f"not ready within {timeout:g} s, and the job is finishing"
            self.effects.stop(worker, late)

    def _note_uneven_end(self, ready: Sequence[Worker]) -> None:
        """Note a member that ended its script before the others, which train on without it."""
        ended = [*self.workers.having(ENDING, SUCCESS)]
        lost = any(loss.member for loss in self.outcome.losses)
        if ended and not lost and self.ended_first is None:
            step = max(worker.version for worker in ready)
            self.ended_first = EndedFirst(ended[0].id, ended[0].place.rank, len(ready), step)

    def _tell_uneven_end(self) -> None:
        """Announce it once the member has exited 0: a failure has another cause."""
        found = self.ended_first
        worker = found and self.workers.workers.get(found.worker)
        if not found or not worker or found.told or worker.state is not SUCCESS:
            return
        self.ended_first = found._replace(told=True)
        others = "another worker trains" if found.others == 1 else f"{found.others} others train"
        self.effects.announce(
            worker_log.FinishedAlone(),
            f"rank {found.rank} is done, {others} on from step {found.step}; every rank has to "
            "return from the training function after the same step",
            worker,
        )

    def _form_fresh(self, ready: list[Worker], fitting: list[Worker], now: float) -> Iterator[Wait]:
        """Complete a round in which no worker has trained yet, or wait for its founders."""
        current = self.rounds.current
        need = self._fresh_need()
        have = len(fitting)
        if current.number > 1 and have < max(need, 1):
            yield from self._give_up_below(need, ready, now)
            return
        wait = self._wait_for_founders()
        least = self.settings.start_min_np
        due = wait.is_over(now)
        if not due:
            yield wait
        # All were lost, and their newcomers were started one after the other.
        holders = any(w.admitted is not None for w in self.workers.having(READY))
        anew = current.number > 1 and not holders
        booting = (w for w in self.workers.having(STARTING) if not w.leaving)
        if not due and any(worker.awaited or anew for worker in booting):
            return
        if due and current.number == 1:
            need = need if least is None else min(need, least)
            if have < max(need, 1):
                waited = now - current.since
                shortage = self._shortage(ready)
                self.outcome.give_up(need, len(ready), waited, shortage, self._booting())
        if have >= max(need, 1):
            self._complete(ready, now, "every worker is ready")

    def _give_up_below(self, need: int, ready: list[Worker], now: float) -> Iterator[Wait]:
        """End the job if it has been below the minimum for too long."""
        since = self.rounds.current.since
        shortage = self._shortage(ready)
        if self.capacity.unfit and not self._newcomers_in_sight():
            host, why = next(iter(self.capacity.unfit.items()))
            least = counted(need, "worker is", "workers are")
            few = f"{len(ready)} of at least {least} left"
            unfit = f"those that were started on {host} cannot take over the state"
            self.ending.finish(1, f"{few}, and {unfit}: {why}; {FIT_HINT}")
            return
        least = counted(need, "worker is", "workers are")
        why = shortage or f"{len(ready)} of at least {least} ready"
        if going := sum(1 for worker in self.workers.having(READY) if worker.leaving):
            why += f"; {counted(going, 'worker has', 'workers have')} to leave"
        wait = Wait(since + self.settings.elastic_timeout, why)
        if wait.is_over(now):
            self.outcome.give_up(need, len(ready), now - since, shortage)
        else:
            yield wait

    def _booting(self) -> str:
        """Return which workers are still booting, in words; empty if none is."""
        hosts = [worker.host for worker in self.workers.having(STARTING)]
        are = counted(len(hosts), "worker is", "workers are")
        return f"{are} still booting, on {', '.join(sorted({*hosts}))}" if hosts else ""

    def _shortage(self, ready: list[Worker]) -> str:
        return units.shortage(len({worker.host for worker in ready}), self.settings)

    def _complete(self, ready: list[Worker], now: float, reason: str) -> None:
        holders = self._state_holders(ready)
        wanted = self.capacity.wanted
        most = None if wanted is None else max(wanted, 1 + len(holders))
        shares = units.shares(ready, self.settings, holders)[:most]
        members = units.fit(shares, self.settings)
        self._leave_behind()
        self.rounds.complete(members, now, reason)
        self.reports.settle_losses()
        self._release(self._state_holders(members))

    def _leave_behind(self) -> None:
        """Record that the others go on without the workers whose processes are about to end."""
        for worker in self.workers.having(ENDING):
            if self.workers.leave_behind(worker):
                why = "the others go on before its process has ended"
                self.effects.announce(worker_log.WorkerLeft(failed=worker.failed), why, worker)

    # ---- workers that have to leave ------------------------------------------------------

    def _newest_leaver(self, ready: list[Worker]) -> Worker | None:
        """Return a worker that has to leave and holds a newer state than all of `ready`."""
        newest = max((worker.version for worker in ready if worker.clean), default=-1)
        leavers = (w for w in self.workers.having(READY) if w.leaving and w.clean)
        best = max(leavers, key=lambda worker: worker.version, default=None)
        return best if best is not None and best.version > newest else None

    def _state_holders(self, ready: list[Worker]) -> list[Worker]:
        """Return the worker that has to leave but has to hand its state over first, if any.

        Where one worker is wanted, there is a second one for that if the state is nowhere else.
        """
        holder = self._newest_leaver(ready)
        wanted = self.capacity.wanted
        room = wanted is None or wanted >= 2  # for it and for a worker that receives
        return [holder] if holder and (room or self.final_checkpoint.failed) else []

    def _release_leavers(self, ready: list[Worker], now: float) -> Iterator[Wait]:
        """Stop workers that left the round and have to leave, unless their state is needed."""
        # Others with a notice make room for a worker that can take the state.
        going = (w for w in self.workers.having(READY, STOPPING) if w.id in self.drains.notices)
        slots_come_free = sum(self.hosts.is_usable(worker.host) for worker in going) > 1
        receivers = ready or slots_come_free or self._newcomers_in_sight()
        holder = self._newest_leaver(ready)
        if receivers:
            self._release(self._state_holders(ready))
            return
        if holder is None or not self.final_checkpoint.failed:
            self._release([])
            return
        drain = self.drains.of(holder)
        leave_by = math.inf if drain is None or drain.leave_by is None else drain.leave_by
        wait = Wait(leave_by, "its host goes away" if leave_by < math.inf else "")
        if wait.is_over(now):
            self._release([])
            return
        self._release([holder])
        self._announce_kept(holder)
        yield wait

    def _release(self, needed: list[Worker]) -> None:
        """Stop the workers that left the round and have to leave, but for these."""
        for worker in self.workers.having(READY):
            if worker.leaving and worker not in needed:
                self.effects.stop(worker, worker.leaving)

    def _announce_kept(self, holder: Worker) -> None:
        """Announce once that a worker with the only state waits for one that takes it over."""
        if self.final_checkpoint.keeps():
            patience = self.settings.elastic_timeout
            what = f"it alone holds the state of step {holder.version}: it stays until another "
            what += f"worker has it, for {patience:g} s at most"
            self.effects.announce(log.StateKept(), what, holder)


def _as_told(workers: list[Worker]) -> list[Worker]:
    """Return the workers of the largest world found in which all get the rank they were told."""
    while any(worker.seat.told != NOT_TOLD for worker in workers):
        places = dict(assign((worker.seat for worker in workers), by_age=True))
        kept = [w for w in workers if w.seat.told in (NOT_TOLD, places[w.id].rank)]
        if len(kept) == len(workers):
            break
        workers = kept
    return workers


def _without(lost: Sequence[Loss]) -> str:
    """Return a clause that names the first of these losses, and says how many more there are."""
    first = f"without {lost[0].failure.worker}, which {lost[0].reason}"
    return first if len(lost) == 1 else f"{first}, and {len(lost) - 1} more"
