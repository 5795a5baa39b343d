"""The last checkpoint, and the end of a whole job that has to go.

As long as a worker that stays holds the state, it is handed over in memory. When all workers that
hold it have to leave (a notice to all of them, or all hosts are removed), `FinalCheckpoint` asks
them to write it together, if the script gives a `checkpoint_dir`. They are asked between two
rounds, and so at a common step. Otherwise nothing changes: they stay READY, and may be in the next
round. If the state is not on disk then, the oldest of them stays for `elastic_timeout`, until
another holds it; where a notice stops it, until then.

`Preemption` ends a job that has to go itself (a signal), or whose hosts all have a notice while no
other hosts can come. All workers leave after one common step, write the state to disk, and the job
ends with a sentence that says how to go on. Half of the time is for reaching the common step; after
that the workers leave at once and roll back to the last commit, so that something is written.
The workers of a plain script did not ask to be told, and get SIGTERM at once.
A job that other hosts may come to does not end because its present ones leave: it waits for hosts.
Times are monotonic seconds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from elastic_driver.errors import ExitCode
from elastic_driver.job.decisions import PublishSave
from elastic_driver.job.events import JobLeaving, takes
from elastic_driver.job.leaving import Drains, Notices
from elastic_driver.job.outcome import Departure
from elastic_driver.job.rounds import CLOSING, FORMING, Rule
from elastic_driver.job.workers import ACTIVE, READY, RUNNING, Worker
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import log_events as log
from elastic_driver.words import wire_events as ev
from elastic_driver.words.orders import SaveRequest, time_to_leave

BOUNDARY_SHARE = 0.5  # of the time; the rest is for writing
_NEWEST = "started again, the job goes on from the newest complete checkpoint, if there is one"


@dataclass(slots=True)
class FinalSave:
    """A request to save the state after `request.step` steps, and its result so far."""

    request: SaveRequest
    round: int  # the state is saved before this round
    until: float
    done: bool = False
    folder: str = ""  # the complete checkpoint
    problem: str = ""  # the reason why there is none
    kept: bool = False  # it was announced that a worker keeps the state

    @property
    def outcome(self) -> str:
        """Describe what is on disk."""
        step = self.request.step
        if self.folder:
            return f"the state of step {step} is in {self.folder}"
        why = self.problem or "it has no checkpoint_dir (docs/checkpoints.md)"
        return f"the state of step {step} is not on disk: {why}"


@dataclass(slots=True)
class FinalCheckpoint(Rule):
    """Asks the workers that leave to save the state."""

    drains: Drains
    requests: int = saved(0)  # so far
    _last: FinalSave | None = saved(None, name="last")

    @property
    def save(self) -> FinalSave | None:
        """The save that was requested before the present round, if there is one."""
        last, current = self._last, self.rounds.current
        return last if last and current.state is FORMING and last.round == current.number else None

    @property
    def failed(self) -> bool:
        """Whether the state was to be written before the present round, and is not on disk."""
        return self.save is not None and self.save.done and not self.save.folder

    def keeps(self) -> bool:
        """Note that a worker keeps the state; return whether that is new."""
        save = self.save
        new = save is not None and not save.kept
        if save is not None:
            save.kept = True
        return new

    def request(self, now: float) -> Wait | None:
        """Request a final checkpoint if none is pending; return the wait for it, or None.

        Called only when all workers have left the round, and none that stays can receive the state.
        """
        clean = [w for w in self.workers.having(READY) if w.clean and w.version > 0]
        newest = max((worker.version for worker in clean), default=0)
        holders = sorted((w for w in clean if w.version == newest), key=lambda w: w.age)
        known = self.save
        if not holders:
            return None
        if known is None or known.request.step != newest:
            known = self._ask(holders, self._write_by(holders, now), now)
        elif not known.done and not set(known.request.members) <= {w.id for w in holders}:
            known = self._ask(holders, known.until, now)
        if known.done:
            return None
        wait = Wait(known.until, f"step {known.request.step} is being written to disk")
        if not wait.is_over(now):
            return wait
        self._finish(known, problem="it could not be written in time; raise --grace-period")
        return None

    @takes(ev.WorkerSaved)
    def on_saved(self, event: ev.WorkerSaved, now: float) -> None:
        """Record the result: the first member reports success, any member reports a problem."""
        known = self.save
        if known is None or known.done or known.request.number != event.number:
            raise ev.StaleEvent(f"{event.worker} reports a save that is not requested (any more)")
        members, step = known.request.members, known.request.step
        if event.worker not in members or (event.worker != members[0] and not event.problem):
            raise ev.StaleEvent(f"{event.worker} does not report the save of step {step}")
        self._finish(known, folder=event.folder, problem=event.problem)

    def _write_by(self, holders: list[Worker], now: float) -> float:
        """Return the time at which the first of these workers is going to be stopped."""
        if self.ending.departure is not None:
            return self.ending.departure.end_by
        drains = [self.drains.of(worker) for worker in holders]
        ends = [drain.leave_by for drain in drains if drain and drain.leave_by is not None]
        return min([now + self.settings.grace_period, *ends])

    def _ask(self, holders: list[Worker], until: float, now: float) -> FinalSave:
        self.requests += 1
        step = holders[0].version
        reason = f"all workers that hold step {step} leave: {holders[0].leaving}"
        members = tuple(worker.id for worker in holders)
        request = SaveRequest(self.requests, step, members, max(0.0, until - now), reason)
        self._last = FinalSave(request, self.rounds.current.number, until)
        self.resume(now)
        return self._last

    def resume(self, now: float) -> None:
        """Publish the request that is pending, if there is time; its members may not know it."""
        save = self.save
        if save is not None and not save.done and now < save.until:
            request = replace(save.request, seconds=save.until - now)
            self.effects.decide(PublishSave(request, request.reason))

    def _finish(self, known: FinalSave, *, folder: str = "", problem: str = "") -> None:
        known.done, known.folder, known.problem = True, folder, problem
        if folder:
            self.outcome.record_saved(known.request.step)
        self.effects.announce(log.StateSaved() if folder else log.StateNotSaved(), known.outcome)


@dataclass(slots=True)
class Preemption(Rule):
    """Ends the job in good order when it has to go."""

    final_checkpoint: FinalCheckpoint
    notices: Notices

    @takes(JobLeaving)
    def on_job_leaving(self, event: JobLeaving, now: float) -> None:
        """Begin to end the job within the time that the event names."""
        if self.ending.departure is not None:
            raise ev.StaleEvent(f"the job is ending already: {self.ending.departure.reason}")
        end_by = self.notices.end_by(now + time_to_leave(event.deadline))
        self._begin(event.reason or "the job has to go", now, max(now, end_by))

    def advance(self, now: float) -> Iterable[Wait]:
        """Begin to end the job if all hosts go away; end a leaving job when its time is over."""
        if self.ending.departure is None:
            self._consider(now)
        departure = self.ending.departure
        if departure is None:
            return
        if not self.outcome.elastic:
            self.ending.finish(int(ExitCode.TERMINATED), departure.reason)
            return
        if self.rounds.current.state is not FORMING and not self.workers.count(*ACTIVE):
            if self.outcome.first_success is None:
                self._end(departure, f"no worker is left; {_NEWEST}")
            return
        wait = Wait(departure.end_by, f"the job is ending: {departure.reason}")
        if wait.is_over(now):
            save, why = self.final_checkpoint.save, "workers had not left their step in time"
            if save is not None and not save.done:
                why = f"the state of step {save.request.step} could not be written in time"
            self._end(departure, f"{why}; {_NEWEST}")
            return
        yield wait
        if self.rounds.current.state is CLOSING and self.workers.count(RUNNING):
            yield from self._hurry(departure, now)

    def end_after_all_left(self, departure: Departure) -> None:
        """End the job: all workers have left, and the state is on disk if it could be written."""
        save, what = self.final_checkpoint.save, "no worker held a state that was worth keeping"
        if save is not None and save.done:
            how = "started again, the job goes on from there" if save.folder else _NEWEST
            what = f"{save.outcome}; {how}"
        self._end(departure, what)

    def _begin(self, reason: str, now: float, end_by: float) -> None:
        leave_by = now + (end_by - now) * BOUNDARY_SHARE
        self.ending.depart(Departure(reason, leave_by, end_by))
        self.capacity.note_change()
        self.effects.announce(log.JobLeaving(), f"{reason}; within {end_by - now:.3g} s")

    def _consider(self, now: float) -> None:
        """Begin to end the job if every host has a notice and no others can come."""
        hosts = self.hosts.known
        if not self.settings.fixed_hosts or not hosts or self.outcome.first_success is not None:
            return
        drains = [drain for drain in map(self.hosts.drain_of, hosts) if drain is not None]
        notices = [(drain.leave_by, drain) for drain in drains if drain.leave_by is not None]
        if len(notices) == len(hosts):
            end_by, _ = min(notices, key=lambda notice: notice[0])
            _, last = max(notices, key=lambda notice: notice[0])
            every = "every host goes away" if len(hosts) > 1 else "its only host goes away"
            self._begin(f"{every} ({last.reason})", now, max(now, end_by))

    def _hurry(self, departure: Departure, now: float) -> Iterator[Wait]:
        """Make workers leave at once if no boundary comes in time; then stop those that cannot."""
        if self.rounds.current.at_boundary:
            boundary = Wait(departure.leave_by, "workers are to reach a step boundary")
            if boundary.is_over(now):
                self.rounds.leave(now, "no step boundary in time; the job is ending")
            else:
                yield boundary
            return
        if not self.workers.count(READY):
            return
        at = max(departure.leave_by, self.rounds.current.since + self.settings.settle)
        others = Wait(at, "others have not left yet, and the job is ending")
        if not others.is_over(now):
            yield others
            return
        for worker in self.workers.having(RUNNING):
            self.effects.stop(worker, "it did not leave in time, and the job is ending")

    def _end(self, departure: Departure, what: str) -> None:
        self.ending.finish(int(ExitCode.TERMINATED), f"{departure.reason}: {what}")
