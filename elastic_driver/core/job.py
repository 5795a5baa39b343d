"""The one door of the core: `Job.handle(event, now)` takes an event and returns decisions.

Called by `runtime.driver` for every event, by the tests and by the simulation. Each event is
entered into the books (`state`), then the job looks at itself until nothing more follows.
Reads no clock and does no I/O; the same events at the same times give the same decisions.
`now` is in monotonic seconds and never goes back. An event that is late, repeated or out of
order changes nothing and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from elastic_driver.core.decisions import Decision
from elastic_driver.core.documents import Failure
from elastic_driver.core.events import (
    AgentLost,
    AgentReady,
    Batch,
    DiscoveryFailed,
    DrainCancelled,
    DrainRequested,
    Event,
    HostLeaving,
    HostsChecked,
    HostsDiscovered,
    JobLeaving,
    ProgressReported,
    RankRecovered,
    RankSlow,
    ScaleRequested,
    StacksRequested,
    StopRequested,
    Tick,
    WorkerExited,
    WorkerLeaving,
    WorkerLost,
    WorkerReady,
    WorkerResumed,
    WorkerSaved,
    WorkerSilent,
    WorkerStack,
    WorkerStalled,
    WorkerStarted,
    WorkerStepped,
)
from elastic_driver.core.rules import (
    agents,
    boundary,
    discovered,
    drain,
    endings,
    final_checkpoint,
    hangs,
    membership,
    placement,
    plain,
    preemption,
    rechecks,
    replacing,
    stacks,
    synced,
    units,
)
from elastic_driver.core.rules.hosts import HostManager
from elastic_driver.core.rules.outcome import Budget, Kind, cause_of
from elastic_driver.core.rules.rounds import RoundState
from elastic_driver.core.rules.workers import ACTIVE, OCCUPYING, News, Worker, WorkerState
from elastic_driver.core.state import JobState
from elastic_driver.core.status import JobStatus, snapshot
from elastic_driver.core.tf_config import TfLayout
from elastic_driver.settings import Settings

_MAX_PASSES = 64  # far more than any chain of consequences; a guard, not a limit


class Job:
    """One elastic job, from its first host to its exit status."""

    def __init__(self, settings: Settings) -> None:
        tf = None if settings.tf_roles is None else TfLayout(settings.tf_roles)
        self.state = JobState(settings, HostManager(settings), Budget(settings), tf=tf)
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            HostsDiscovered: partial(discovered.hosts, self.state),
            DiscoveryFailed: partial(discovered.failed, self.state),
            AgentReady: partial(agents.ready, self.state),
            AgentLost: partial(agents.lost, self.state),
            WorkerStarted: self._worker_started,
            WorkerReady: self._worker_ready,
            WorkerStepped: self._worker_stepped,
            WorkerStalled: self._worker_stalled,
            WorkerResumed: self._worker_resumed,
            WorkerStack: partial(stacks.told, self.state),
            HostsChecked: partial(rechecks.checked, self.state),
            WorkerExited: self._worker_exited,
            WorkerSilent: self._worker_silent,
            WorkerLost: self._worker_lost,
            WorkerSaved: lambda event, _now: final_checkpoint.told(self.state, event),
            ScaleRequested: self._scale_requested,
            DrainRequested: partial(drain.requested, self.state),
            DrainCancelled: partial(drain.cancelled, self.state),
            HostLeaving: partial(drain.noticed, self.state),
            WorkerLeaving: partial(drain.told, self.state),
            ProgressReported: partial(boundary.reported, self.state),
            RankSlow: partial(replacing.slow, self.state),
            RankRecovered: partial(replacing.recovered, self.state),
            JobLeaving: partial(preemption.told, self.state),
            StacksRequested: lambda event, now: stacks.ask(self.state, now, event.reason),
            StopRequested: lambda event, _now: self.state.finish(event.exit_code, event.reason),
            Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Take in one event; return the decisions to carry out, in order. Never raises for one."""
        job = self.state
        if job.end is not None:
            job.ignore(f"{type(event).__name__} after the end of the job")
            return []
        if job.born is None:
            job.born = job.round.since = now
            job.announce("round_opened", "the job begins")
        for news in event.events if isinstance(event, Batch) else (event,):
            if job.end is None:
                self._handlers[type(news)](news, now)
        self._look(now)
        decisions, job.out = job.out, []
        return decisions

    def deadline(self) -> float | None:
        """When to send a `Tick`, if nothing happens before; None: only an event can help."""
        return self.state.alarm

    def snapshot(self, now: float) -> JobStatus:
        """A frozen picture of the job, for `/v1/status`."""
        return snapshot(self.state, now)

    # ---- consequences ----------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Look at the job until nothing more follows; the last look sets the alarm."""
        job = self.state
        for _ in range(_MAX_PASSES):
            if job.end is not None:
                return
            before = self._mark()
            job.alarm, job.waiting = None, ""
            self._look_once(now)
            if self._mark() == before:
                return

    def _mark(self) -> tuple[object, ...]:
        """What a look may have changed: not every consequence is a decision."""
        job = self.state
        return (
            len(job.out),
            job.round.number,
            job.round.state,
            job.kind,
            len(job.losses),
            job.capacity_changed,
            job.placement_due,
        )

    def _look_once(self, now: float) -> None:
        job = self.state
        self._watch_hosts(now)
        rechecks.look(job, now)
        stacks.look(job, now)
        endings.judge(job, now)
        if job.end is None:
            preemption.look(job, now)
        if job.end is not None:
            return
        replacing.look(job, now)
        if job.leavers_unsettled:
            job.capacity_changed, job.placement_due = False, not job.finishing
            placement.mark_leavers(job)
            if not job.finishing:
                placement.plan_fleet(job, now)
        if job.kind is Kind.ELASTIC:
            membership.advance(job, now)
        else:
            plain.advance(job, now)

    def _watch_hosts(self, now: float) -> None:
        job = self.state
        for host in job.hosts.resurrect(now):
            job.announce("host_resurrected", "its cool-down is over", host=host)
            rechecks.hold(job, host, "its cool-down is over")
            job.capacity_changed = True
        next_end = job.hosts.next_resurrection()
        if next_end is not None:
            job.passed(next_end, now, "")
        agents.watch_starting(job, now)

    # ---- workers ---------------------------------------------------------------------

    def _known(self, worker_id: str, what: str) -> Worker | None:
        worker = self.state.registry.workers.get(worker_id)
        if worker is None or worker.state not in OCCUPYING:
            self.state.ignore(f"{what} of {worker_id}, which is gone or was never started")
            return None
        return worker

    def _worker_started(self, event: WorkerStarted, _now: float) -> None:
        worker = self._known(event.worker, "start")
        if worker is None:
            return
        if worker.pid:
            self.state.ignore(f"{worker.id} was started already")
            return
        worker.pid = event.pid
        self.state.announce("worker_started", f"pid {event.pid}", worker)

    def _worker_ready(self, event: WorkerReady, now: float) -> None:
        job = self.state
        worker = self._known(event.worker, "READY")
        if worker is None:
            return
        self._is_elastic(now)
        running = worker.state is WorkerState.RUNNING
        if running and event.round != job.round.number:
            job.ignore(f"{worker.id} speaks of round {event.round}, it is in {job.round.number}")
            return
        if not job.registry.apply(worker, News.READY):
            job.ignore(f"{worker.id} is {worker.state.value}, not awaited as READY")
            return
        worker.left, worker.version, worker.clean = event.round, event.version, event.clean
        job.announce("worker_ready", event.reason or "waits for a round", worker)
        if running and job.round.state is RoundState.COMPLETE:
            job.leave_round(now, f"{worker.id} left: {event.reason}")

    def _is_elastic(self, now: float) -> None:
        """A worker has spoken; members lost while the job passed for plain broke the round."""
        job = self.state
        if job.kind is Kind.ELASTIC:
            return
        job.kind = Kind.ELASTIC
        lost = next((loss for loss in job.losses if loss.member), None)
        if lost is not None:
            job.leave_round(now, f"{lost.failure.worker} {lost.reason}")

    def _worker_stepped(self, event: WorkerStepped, _now: float) -> None:
        job = self.state
        worker = self._known(event.worker, "step")
        if worker is None:
            return
        in_round = worker.state is WorkerState.RUNNING and event.round == job.round.number
        just_left = worker.state is WorkerState.READY and event.round == worker.left
        if not (in_round or just_left):
            job.ignore(f"step of {worker.id} in round {event.round}, which is over")
            return
        worker.stepped = job.fruitful = True
        job.mismatches = 0
        if in_round:
            synced.step_in_round(job)
        job.budget.step_finished()
        job.hosts.step_finished(worker.host)

    def _worker_stalled(self, event: WorkerStalled, now: float) -> None:
        worker = self._known(event.worker, "stall")
        if worker is not None and not hangs.stalled(self.state, worker, event, now):
            self.state.ignore(f"{worker.id} stalled in round {event.round}, which it has left")

    def _worker_resumed(self, event: WorkerResumed, _now: float) -> None:
        worker = self._known(event.worker, "progress")
        if worker is not None and not hangs.resumed(self.state, worker, event):
            self.state.ignore(f"{worker.id} goes on, and was not known to stand still")

    def _worker_exited(self, event: WorkerExited, now: float) -> None:
        job = self.state
        worker = self._known(event.worker, "exit")
        if worker is None:
            return
        if job.kind is Kind.UNDECLARED and worker.state in ACTIVE:
            job.kind = Kind.PLAIN  # it never said a word; a later READY can still prove us wrong
        job.capacity_changed = True
        told = worker.state not in ACTIVE
        running = worker.state is WorkerState.RUNNING
        finished = event.exit_code == 0 and endings.is_member(worker)
        expected = worker.leaving and not (finished and self._all_leave())
        if expected:
            job.registry.apply(worker, News.TOLD_TO_STOP)
        news = News.EXITED_ZERO if event.exit_code == 0 else News.EXITED_NONZERO
        job.registry.apply(worker, news)
        what = "as it was told to" if told or expected else "by itself"
        job.announce(
            "worker_exited",
            f"exit code {event.exit_code}, {what}",
            worker,
            exit_code=event.exit_code,
            expected=bool(told or expected),
        )
        if told:
            return
        if expected:
            job.left_early(worker, now, running=running and event.exit_code != 0)
        elif finished:
            endings.record_success(job, now)
        else:
            self._worker_failed(worker, event, now)

    def _worker_failed(self, worker: Worker, event: WorkerExited, now: float) -> None:
        # A newcomer that exits 0 before it ever took part has not done its work either.
        failure = Failure(
            worker.id, worker.place.rank, worker.host, worker.pid, event.exit_code, event.log_tail
        )
        cause = cause_of(event.exit_code, victim=event.victim)
        endings.record_loss(self.state, worker, failure, cause, now)

    def _all_leave(self) -> bool:
        """Whether the whole world is leaving: then those who finish have finished the job."""
        job = self.state
        members = [job.registry.workers.get(worker_id) for worker_id in job.round.members]
        return all(worker is None or worker.leaving for worker in members)

    def _worker_silent(self, event: WorkerSilent, now: float) -> None:
        worker = self._known(event.worker, "silence")
        if worker is not None:
            hangs.silent(self.state, worker, event, now)

    def _worker_lost(self, event: WorkerLost, now: float) -> None:
        worker = self._known(event.worker, "loss")
        if worker is None:
            return
        stacks.settle(self.state)  # where it stood is evidence, before it is killed
        if worker.leaving and self.state.registry.apply(worker, News.TOLD_TO_STOP):
            self.state.order_kill(worker, event.reason)
            self.state.left_early(worker, now, running=True)
        elif not membership.give_up_worker(self.state, worker, event.reason, now):
            self.state.ignore(f"{worker.id} is {worker.state.value}, it cannot be lost any more")

    # ---- wishes and time -------------------------------------------------------------

    def _scale_requested(self, event: ScaleRequested, _now: float) -> None:
        job = self.state
        wish = max(event.num_proc, job.settings.min_np, units.width(job.settings))
        if job.settings.max_np is not None:
            wish = min(wish, job.settings.max_np)
        job.target = wish
        job.capacity_changed = True
        job.announce("scale_requested", f"{wish} workers (asked for {event.num_proc})")

    def _tick(self, _event: Tick, now: float) -> None:
        """Only time has passed; looking at the job does the rest."""
