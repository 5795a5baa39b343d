"""The whole job goes away with notice: told by itself, or by the last of its hosts.

All workers leave after one common step, put the state on disk (`final_checkpoint`), and the job
ends with a sentence that says how to go on. Half of the time is for reaching the boundary; then it
is left at once, back at the last commit, lest nothing be written. A job that other hosts may come
to does not end because its present ones go: it waits for them as for any lack of hosts. Times are
monotonic seconds.
"""

from dataclasses import dataclass

from elastic_driver.core.documents import time_to_leave
from elastic_driver.core.events import JobLeaving
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.final_checkpoint import FinalSaves
from elastic_driver.core.rules.outcome import Departure
from elastic_driver.core.rules.rounds import CLOSING
from elastic_driver.core.rules.workers import READY, RUNNING
from elastic_driver.errors import ExitCode

BOUNDARY_SHARE = 0.5  # of the time; the rest is for writing
_FROM_THE_NEWEST = (
    "started again, the job goes on from the newest complete checkpoint, if there is one"
)


@dataclass(slots=True)
class Preemption(Rule):
    """Ends the job in good order when it has to go."""

    final_checkpoint: FinalSaves

    def on_job_leaving(self, event: JobLeaving, now: float) -> None:
        """Begin to end the job, which has to be gone in so many seconds."""
        if self.outcome.departure is not None:
            self.effects.ignore(f"the job is ending already: {self.outcome.departure.reason}")
            return
        self._begin(event.reason or "the job has to go", now, now + time_to_leave(event.deadline))

    def advance(self, now: float) -> None:
        """End the job where all hosts go away; where it is to end, see that it does so in time."""
        if self.outcome.departure is None:
            self._consider(now)
        departure = self.outcome.departure
        if departure is None:
            return
        if not self.outcome.elastic:
            self._end("its workers are told to stop; they did not ask to be told earlier")
            return
        waiting = f"the job is ending: {departure.reason}"
        closing = self.rounds.current.state is CLOSING
        if self.effects.due_or_set_alarm(departure.end_by, now, waiting):
            self._end(self._too_late())
        elif closing and self.workers.count(RUNNING):
            self._hurry(departure, now)

    def everybody_left(self) -> None:
        """End the job: all workers have left, and the state is on disk if it could be written."""
        save = self.final_checkpoint.save
        if save is None or not save.done:
            self._end("no worker held a state that was worth keeping")
            return
        how = "started again, the job goes on from there" if save.folder else _FROM_THE_NEWEST
        self._end(f"{save.outcome}; {how}")

    def _begin(self, reason: str, now: float, end_by: float) -> None:
        leave_by = now + (end_by - now) * BOUNDARY_SHARE
        self.outcome.depart(Departure(reason, leave_by, end_by))
        self.capacity.note_change()
        self.effects.announce("job_leaving", f"{reason}; within {end_by - now:.3g} s")

    def _consider(self, now: float) -> None:
        """Begin to end the job where every host has a notice and no others can come."""
        hosts = self.hosts.known
        if not self.settings.fixed_hosts or not hosts or self.outcome.first_success is not None:
            return
        drains = [self.hosts.drained(host) for host in hosts]
        noticed = [drain for drain in drains if drain is not None and drain.leave_by is not None]
        if len(noticed) < len(hosts):
            return
        last = max(noticed, key=lambda drain: drain.leave_by or now)
        every = "every host goes away" if len(hosts) > 1 else "its only host goes away"
        self._begin(f"{every} ({last.reason})", now, max(now, last.leave_by or now))

    def _hurry(self, departure: Departure, now: float) -> None:
        """Leave at once where no boundary comes in time; then go without those who cannot."""
        if self.rounds.current.at_boundary:
            waiting = "workers are to reach a step boundary"
            if self.effects.due_or_set_alarm(departure.leave_by, now, waiting):
                self.rounds.leave(now, "no step boundary in time; the job is ending")
            return
        at = max(departure.leave_by, self.rounds.current.since + self.settings.settle)
        waiting = "others have not left yet, and the job is ending"
        some_left = self.workers.count(READY)
        if some_left and self.effects.due_or_set_alarm(at, now, waiting):
            for worker in self.workers.having(RUNNING):
                self.orders.stop(worker, "it did not leave in time, and the job is ending")

    def _too_late(self) -> str:
        save = self.final_checkpoint.save
        if save is None or save.done:
            return f"workers had not left their step in time; {_FROM_THE_NEWEST}"
        step = save.request.step
        return f"the state of step {step} could not be written in time; {_FROM_THE_NEWEST}"

    def _end(self, what: str) -> None:
        assert self.outcome.departure is not None  # noqa: S101 - the callers have looked
        self.outcome.finish(int(ExitCode.TERMINATED), f"{self.outcome.departure.reason}: {what}")
