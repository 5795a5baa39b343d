"""The last checkpoint: the workers that leave last put the state on disk first.

As long as a worker that stays holds the state, it is handed over in memory. When all who hold it
have to go (a notice to all of them, every host removed), they are asked, between two rounds and
so at a common step, to write it together where it has a `checkpoint_dir`. The request changes
nothing else: the workers stay READY, and may be in the next round after all.
Times are monotonic seconds.
"""

from dataclasses import dataclass

from elastic_driver.core.decisions import PublishSave
from elastic_driver.core.documents import SaveRequest
from elastic_driver.core.events import WorkerSaved
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.drain import Drains
from elastic_driver.core.rules.rounds import FORMING
from elastic_driver.core.rules.workers import READY, Worker


@dataclass(slots=True)
class FinalSave:
    """The fate of the state after `request.step` steps, as far as it is known."""

    request: SaveRequest
    round: int  # before it, the state is saved
    until: float
    done: bool = False
    folder: str = ""  # the complete checkpoint
    problem: str = ""  # why there is none

    @property
    def outcome(self) -> str:
        """Describe what is on disk."""
        step = self.request.step
        if self.folder:
            return f"the state of step {step} is in {self.folder}"
        why = self.problem or "it has no checkpoint_dir (docs/checkpoints.md)"
        return f"the state of step {step} is not on disk: {why}"


@dataclass(slots=True)
class FinalSaves(Rule):
    """Asks those who leave to save the state."""

    drains: Drains
    requests: int = 0  # so far
    _last: FinalSave | None = None

    @property
    def save(self) -> FinalSave | None:
        """The save that was requested before the present round, if there is one."""
        last, current = self._last, self.rounds.current
        forming = current.state is FORMING
        return last if last and forming and last.round == current.number else None

    def request(self, now: float) -> bool:
        """Request a final checkpoint if none is pending; return whether one is.

        Only for a moment in which all workers have left the round, and none that stays can
        receive the state.
        """
        holders = self._holders()
        if not holders:
            return False
        known = self.save
        if known is None or known.request.step != holders[0].version:
            known = self._ask(holders, self._until(holders, now), now)
        elif not known.done and not set(known.request.members) <= {w.id for w in holders}:
            known = self._ask(holders, known.until, now)
        if known.done:
            return False
        writing = f"step {known.request.step} is being written to disk"
        if not self.effects.due_or_set_alarm(known.until, now, writing):
            return True
        self._finish(known, problem="it could not be written in time; raise --grace-period")
        return False

    def on_saved(self, event: WorkerSaved, now: float) -> None:
        """Record how it went: the first of those asked says it for all, any of them of trouble."""
        known = self.save
        if known is None or known.done or known.request.number != event.number:
            self.effects.ignore(f"{event.worker} has saved what nobody asks for (any more)")
            return
        members, step = known.request.members, known.request.step
        if event.worker not in members or (event.worker != members[0] and not event.problem):
            self.effects.ignore(f"{event.worker} is not the one to say that step {step} is saved")
            return
        self._finish(known, folder=event.folder, problem=event.problem)

    def _holders(self) -> list[Worker]:
        """Those who hold the newest state, exactly as it was after its last step, by rank."""
        ready = self.workers.having(READY)
        clean = [worker for worker in ready if worker.clean and worker.version > 0]
        newest = max((worker.version for worker in clean), default=0)
        return sorted((w for w in clean if w.version == newest), key=lambda w: w.age)

    def _until(self, holders: list[Worker], now: float) -> float:
        """Return when the first of them is going to be stopped."""
        if self.outcome.departure is not None:
            return self.outcome.departure.end_by
        drains = [self.drains.of(worker) for worker in holders]
        ends = [drain.leave_by for drain in drains if drain and drain.leave_by is not None]
        return min([now + self.settings.grace_period, *ends])

    def _ask(self, holders: list[Worker], until: float, now: float) -> FinalSave:
        self.requests += 1
        step = holders[0].version
        reason = f"all who hold step {step} leave: {holders[0].leaving}"
        members = tuple(worker.id for worker in holders)
        request = SaveRequest(self.requests, step, members, max(0.0, until - now), reason)
        if now < until:
            self.effects.decide(PublishSave(request, reason))
        self._last = FinalSave(request, self.rounds.current.number, until)
        return self._last

    def _finish(self, known: FinalSave, *, folder: str = "", problem: str = "") -> None:
        known.done, known.folder, known.problem = True, folder, problem
        self.effects.announce("state_saved" if folder else "state_not_saved", known.outcome)
