"""Reports of worker processes, and what the end of a worker means for its host, round and job.

`Job` passes a report on only while the worker's process may still exist. Other rules call
`give_up_worker` and `record_loss` for workers that hang or lose their agent. This rule starts no
worker. Times are monotonic seconds.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elastic_driver.errors import ExitCode
from elastic_driver.job.decisions import KillAgent
from elastic_driver.job.events import LeaseExpired, takes
from elastic_driver.job.outcome import KILLED, TERMINATED, Cause, Loss, ScriptKind, failed_by_itself
from elastic_driver.job.rounds import COMPLETE, FORMING, Rule
from elastic_driver.job.workers import (
    ACTIVE,
    ENDING,
    READY,
    RUNNING,
    STARTING,
    SUCCESS,
    Worker,
    WorkerNews,
)
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import host_log_events as host_log
from elastic_driver.words import log_events as log
from elastic_driver.words import wire_events as ev
from elastic_driver.words import worker_log_events as worker_log
from elastic_driver.words.findings import Failure
from elastic_driver.words.tf_config import TfLayout
from elastic_driver.words.world import StateVersion, receivers_of, source_of

PLAIN_PROGRESS_S = 30.0  # a plain worker reports no steps: after this time it has made progress
FIT_HINT = "run the same script on every worker"
STATE_GONE = (
    "the state is gone with the workers that held it, and there is no checkpoint: give it a "
    "checkpoint_dir (docs/checkpoints.md), or begin anew with --restart-from-scratch"
)
MAY_BE_MISSING = "what it does after training, such as saving the model, may be missing"
SOME_RANKS = 8  # that are named in a sentence
_LOST = {
    Cause.HUNG: "stopped making progress",
    Cause.AGENT: "was lost with its agent",
    Cause.MEMORY: "ran out of memory",
}
_ENDED_BADLY = (Cause.OWN, Cause.VICTIM)  # a non-zero exit status


@dataclass(slots=True)
class Reports(Rule):
    """Records reports and failures of workers, and ends the job when its workers have ended."""

    tf: TfLayout | None
    grace_over: bool = saved(False)  # the others' grace period has passed, and it was announced

    # ---- reports of one worker -----------------------------------------------------------

    @takes(ev.WorkerStarted)
    def on_started(self, worker: Worker, event: ev.WorkerStarted, now: float) -> None:
        """Record a worker's process."""
        if worker.pid:
            raise ev.StaleEvent(f"{worker.id} was started already")
        self.workers.record_start(worker, event.pid, event.cpus)
        bound = f", bound to CPUs {event.cpus}" if event.cpus else ""
        self.effects.announce(worker_log.WorkerStarted(), f"pid {event.pid}{bound}", worker)

    @takes(ev.WorkerReady)
    def on_ready(self, worker: Worker, event: ev.WorkerReady, now: float) -> None:
        """Record that a worker waits for the next round; the round that it left is broken."""
        if not self.outcome.elastic:
            self.outcome.declare(ScriptKind.ELASTIC)
            lost = next((loss for loss in self.outcome.losses if loss.member), None)
            if lost is not None:  # as long as the job passed for plain, that broke no round
                self.rounds.leave(now, f"{lost.failure.worker} {lost.reason}")
        running, current = worker.state is RUNNING, self.rounds.current
        if running and (event.round < current.number or event.round == worker.left):
            raise ev.StaleEvent(f"{worker.id} left round {event.round}, it is in {current.number}")
        self.workers.record_ready(worker, event)
        self.outcome.record_state(event.version, event.phase)
        undone = round(event.undone, 6) or None
        why = event.reason or "waits for a round"
        self.effects.announce(worker_log.WorkerReady(undone=undone), why, worker)
        if running and current.state is COMPLETE:
            self.rounds.leave(now, f"{worker.id} left: {event.reason}")

    @takes(ev.WorkerStepped)
    def on_stepped(self, worker: Worker, event: ev.WorkerStepped, now: float) -> None:
        """Record that a worker has finished its first step in a round."""
        in_round = worker.state is RUNNING and event.round == self.rounds.current.number
        if not in_round and (worker.state is not READY or event.round != worker.left):
            raise ev.StaleEvent(f"step of {worker.id} in round {event.round}, which is over")
        self.workers.record_step(worker, event.round)
        self.outcome.record_step(event.step)
        self.hosts.record_step(worker.host)
        if in_round and self.rounds.note_step():
            self.capacity.note_change()  # the job trains: further hosts may stand by
            self._announce_synced(event)

    def _announce_synced(self, event: ev.WorkerStepped) -> None:
        """Announce the source of the state: the first step of the round proves that all have it."""
        members = self.rounds.members()
        states = [StateVersion(worker.version, worker.clean) for worker in members]
        source = source_of(states)
        if source is None:
            return
        repairs = self.rounds.current.repairs
        worker = members[source]
        receivers = receivers_of(states, source, repair=repairs)
        step, reason = None, f"{worker.id}'s first values, or those of its checkpoint"
        if states[source].trained:
            step, reason = states[source].steps, "all ranks had it already"
            if receivers:
                reason = f"{len(receivers)} of {len(members)} took over {worker.id}'s"
        seconds = round(event.seconds, 6) or None
        many = len(receivers)
        synced = log.StateSynced(step=step, receivers=many, first_step=event.step, seconds=seconds)
        self.effects.announce(synced, reason, worker)

    @takes(ev.WorkerEnding)
    def on_ending(self, worker: Worker, event: ev.WorkerEnding, now: float) -> None:
        """Record that a worker has left for good; its exit status says later what that means."""
        if event.unfit:
            self._refuse(worker, event.unfit)
        if event.round and event.round != self.rounds.current.number:
            raise ev.StaleEvent(f"{worker.id} has ended in round {event.round}, which is over")
        self.workers.record_ending(worker, failed=event.failed)
        self.capacity.note_change()
        if event.failed and self._leaves_failed_hosts():
            self._blame(worker, "has failed", now)

    def _refuse(self, worker: Worker, why: str) -> None:
        """Start no more workers like one that could not take over the state of the others.

        Each of them would break their world once more. Before the first step, the ranks of the job
        itself have built different states: the job ends.
        """
        if not self.outcome.has_progress:
            rank, host = worker.place.rank, worker.host
            what = f"rank {rank} on {host} cannot take over the state of rank 0"
            self.ending.finish(1, f"{what}: {why}; {FIT_HINT}")
            return
        self.capacity.mark_unfit(worker.host, why)
        more = f"no more workers are started on {worker.host}, until another size is asked for"
        self.effects.announce(worker_log.WorkerUnfit(), f"{why}; {more}", worker)

    @takes(ev.WorkerExited)
    def on_exited(self, worker: Worker, event: ev.WorkerExited, now: float) -> None:
        """Record the end of a worker's process: a success, a failure, or a stop that was ordered.

        A worker that has to leave may end early: that is no failure of the job. Its exit is only
        `expected` if it was told to stop or exits 0; otherwise users see its exit and traceback. A
        script that has failed is a failure, whatever the status of its process.
        """
        code, active = event.exit_code, worker.state in ACTIVE
        if self.outcome.kind is ScriptKind.UNDECLARED and active:
            # The worker has sent no message; a later READY of another one can still correct this.
            self.outcome.declare(ScriptKind.PLAIN)
        self.capacity.note_change()
        running = worker.state is RUNNING
        leaving = bool(worker.leaving)
        done = worker.over and code in (KILLED, TERMINATED)  # there was nothing left for it to do
        finished = worker.is_member and not worker.failed and (code == 0 or done)
        if leaving and finished:  # if all members leave, one that finishes has done its work
            leaving = not all(member.leaving for member in self.rounds.members())
        as_told = leaving or not active
        status = 0 if finished else code or int(worker.failed)
        self.workers.record_end(worker, status, as_told=as_told)
        expected = not active or (leaving and code == 0) or done or self._finds_no_state(code)
        how = "as it was told to"
        if done:
            how = "when its script was over"
        elif active and self._finds_no_state(code):
            how = "as there is no state to go on with"
        elif not expected:
            how = f"before it was told to stop ({worker.leaving})" if leaving else "by itself"
        lost = active and code == 0 and not (as_told or finished)
        if lost:
            how = "though its script had failed" if worker.failed else "before it took part"
        reason = f"exit code {code}, {how}"
        if code < 0 and how == "by itself":  # somebody may have sent it
            reason = f"killed by signal {-code}"
        exited = worker_log.WorkerExited(exit_code=code, expected=expected, lost=lost or None)
        self.effects.announce(exited, reason, worker)
        if not active:
            return
        if as_told:
            self.rounds.break_for_early_end(worker, now, running=running and code != 0)
        elif finished:
            self.outcome.record_success(now)
        else:  # a newcomer that exits 0 before it ever took part has not done its work either
            short = event.out_of_memory is not None
            cause = Cause.of(code, victim=event.victim, short=short)
            self.record_loss(worker, cause, now, code, event.log_tail)

    def take_in_after_the_end(self, event: ev.Event) -> None:
        """Record the events that still come while the agents of an ended job shut down."""
        if isinstance(event, ev.WorkerExited):
            worker = self.workers.workers.get(event.worker)
            code = event.exit_code
            if worker is not None and self.workers.record_end(worker, code, as_told=True):
                why = f"exit code {code}, stopped with the job"
                exited = worker_log.WorkerExited(exit_code=code, expected=True, job_over=True)
                self.effects.announce(exited, why, worker)
        elif isinstance(event, LeaseExpired) and event.kind == "agent":
            self.effects.decide(KillAgent(*event.agent, event.reason))
        else:
            self.effects.ignore(f"{type(event).__name__} after the end of the job")

    # ---- losses --------------------------------------------------------------------------

    def give_up_worker(
        self, worker: Worker, reason: str, now: float, stack: str | None = None
    ) -> None:
        """Kill a worker that hangs, and go on without it; `stack`: its last one."""
        if not self.workers.apply(worker, WorkerNews.LOST):
            raise ev.StaleEvent(f"{worker.id} is {worker.state.value}, it cannot be lost any more")
        self.effects.kill(worker, reason)
        has_agent = self.fleet.is_ready(worker.host)
        kind = worker_log.WorkerHung if has_agent else worker_log.WorkerLost
        self.effects.announce(kind(stack=stack), reason, worker)
        self.record_loss(worker, Cause.HUNG, now)

    def record_loss(
        self,
        worker: Worker,
        cause: Cause,
        now: float,
        exit_code: int = KILLED,
        log_tail: str = "",
        *,
        silent: bool = False,
    ) -> None:
        """Record a worker's failure against the round, its host and the budget.

        `silent`: its host answers no more, so its peers see no end of their connections.
        """
        if worker.over and worker.is_member and cause is Cause.AGENT:
            self.outcome.record_success(now)
            return
        rank, member = worker.place.rank, worker.is_member and not worker.left_behind
        lost = _LOST.get(cause, "")
        failure = Failure(worker.id, rank, worker.host, worker.pid, exit_code, log_tail, lost)
        reason = _describe(failure, cause)
        current, given = self.rounds.current, self.settings.host_failures
        trains = current.state is COMPLETE and now - current.since >= PLAIN_PROGRESS_S
        plain_progress = trains and self.outcome.kind is ScriptKind.PLAIN
        if plain_progress:
            self.outcome.record_step()
        self.outcome.record_loss(Loss(failure, cause, reason, member, now))
        self.capacity.note_change(vacated=(worker.host, worker.slot))
        if cause not in (Cause.VICTIM, Cause.AGENT):
            counts = given is not None or not (worker.stepped or plain_progress)
            if cause is not Cause.MEMORY and (counts or self._leaves_failed_hosts()):
                self._blame(worker, reason, now)
            if self.outcome.first_success is None:
                self.count_failure(now, member=member)
        if self.hosts.known and all(map(self.hosts.is_left, self.hosts.known.values())):
            none = "workers have failed on every host; --failed-hosts keep goes on there"
            self.outcome.fail(none)
        if member and self.outcome.elastic and self.ending.end is None:
            self.rounds.leave(now, f"{worker.id} {reason}", silent=silent)

    def _blame(self, worker: Worker, reason: str, now: float) -> None:
        """Count a failure against the worker's host, which may get no workers for a time."""
        if not self.workers.blame(worker):
            return
        host = worker.host
        leave = self._leaves_failed_hosts()
        why = f"{worker.id} {reason}"
        needed = self.is_needed(host)
        cooldown = self.hosts.count_failure(host, now, why, needed=needed, leave=leave)
        if cooldown is not None:
            self.effects.announce(host_log.HostBlacklisted(), cooldown, host)

    def _leaves_failed_hosts(self) -> bool:
        """Return whether a host is left at the failure of a worker; the only host never is."""
        asked = self.settings.failed_hosts == "leave" and self.outcome.elastic
        return asked and self.outcome.first_success is None and len(self.hosts.known) > 1

    def count_failure(self, now: float, *, member: bool) -> None:
        """Take one failure from the budget; an elastic job ends here if it is exceeded.

        A plain round counts once, however many of its workers fail: `plain` counts it at its end.
        """
        current = self.rounds.current
        if self.outcome.elastic:
            stands = current.state is COMPLETE and current.stepped and not member
            self.outcome.count_restart()
            self.outcome.count_failure(now, fruitless=not stands)

    # ---- the end of the job --------------------------------------------------------------

    def advance(self, now: float) -> Iterable[Wait]:
        """End the job if the ends of its workers ask for it."""
        if self.outcome.first_success is not None:
            yield from self._judge_finish(now)
        elif self.outcome.losses and not self._world_lives():
            self._judge_wipe_out()

    def _world_lives(self) -> bool:
        """Return whether a worker of the present world lives; a newcomer does not carry it on."""
        if self.rounds.current.state is FORMING or not self.outcome.elastic:
            return self.workers.count(*ACTIVE) > 0
        there = self.workers.having(READY, RUNNING, ENDING)
        return any(worker.admitted is not None for worker in there)

    def _finds_no_state(self, exit_code: int) -> bool:
        """Return whether a worker ends with this status because the state of the job is gone."""
        current = self.rounds.current
        return current.gone > 0 and not current.stepped and exit_code == ExitCode.UNAVAILABLE

    def _judge_wipe_out(self) -> None:
        if any(self._finds_no_state(loss.failure.exit_code) for loss in self.outcome.losses):
            self.ending.finish(ExitCode.UNAVAILABLE, STATE_GONE)
            return
        outcome, progress = self.outcome, self.outcome.has_progress
        by_itself = failed_by_itself(outcome.losses, kind=outcome.kind, has_progress=progress)
        if not by_itself or self.settings.max_restarts:  # a limit that ends the job by itself
            if outcome.elastic:
                self.settle_losses()  # restart all workers: each failure was counted already
            return
        when = "by itself"
        if outcome.elastic:
            when = "after training had begun" if progress else "before it had finished a step"
        hint = "not restarted (--max-restarts N restarts)"
        outcome.fail(f"every worker failed {when}: {hint}")

    def settle_losses(self) -> None:
        """Forget the losses of this round and the workers that have ended."""
        self.outcome.forget_losses()
        self.workers.forget_ended()
        if not self.workers.count(*ACTIVE):
            self.capacity.begin_anew()

    def _judge_finish(self, now: float) -> Iterator[Wait]:
        self._stop_newcomers()
        if self.tf is not None:  # TensorFlow's servers never end by themselves
            serving = list(self.workers.having(*ACTIVE))
            if not any(self.tf.essential((worker.host, worker.slot)) for worker in serving):
                for worker in serving:
                    self.effects.stop(worker, "the training it served is done")
        losses = [x for x in self.outcome.losses if x.member]
        left = self.workers.count(*ACTIVE)
        bad = next((loss for loss in losses if self._ended_badly(loss)), None)
        limit = 0.0 if self.outcome.elastic else self.settings.finish_timeout
        grace = min(self.settings.grace_period, limit or math.inf)
        success = self.outcome.first_success or 0.0
        why = f"a worker has finished; {left} still running"
        if bad is not None and not self.outcome.elastic and self.settings.max_restarts:
            return  # `plain` restarts all, those that have finished too, or ends the job
        if bad is not None and (left == 0 or not self.outcome.elastic):
            who = f"rank {bad.failure.rank} on {bad.failure.host} {bad.reason}"
            if self.outcome.elastic and bad.cause not in _ENDED_BADLY:
                who += " before its script was over"
            others = "others exited 0" if left == 0 else "after another rank had exited 0"
            more = f": {MAY_BE_MISSING}" if self.outcome.elastic and bad.failure.rank == 0 else ""
            self.outcome.finish_with(bad.failure, f"{who}, {others}{more}")
        elif left == 0:
            lost = "".join(
                f"; rank {loss.failure.rank} on {loss.failure.host} {loss.reason} before"
                for loss in losses[:SOME_RANKS]
            )
            self.ending.finish(0, f"the workers finished the script{lost}")
        elif now < success + grace:
            yield Wait(success + grace, why)
        else:
            if not self.grace_over:
                self.grace_over = True
                self.effects.announce(log.GracePeriodPassed(), self._late(grace, limit))
            end = Wait(success + limit if limit else math.inf, why)
            yield end
            if end.is_over(now):
                stuck = f"{self._early(limit)}; every rank has to make the same collectives"
                self.outcome.finish_with(None, f"{stuck}, or raise --finish-timeout")

    def _stop_newcomers(self) -> None:
        """Stop the workers that are not in the world that finishes."""
        current = self.rounds.current
        for worker in self.workers.having(STARTING, READY):
            # With node units, the present world may go on without an earlier member.
            can_wait = worker.state is READY and current.state is COMPLETE
            if not worker.is_member or (can_wait and worker.id not in current.members):
                self.effects.stop(worker, "the job is finishing: no new worker joins")

    def _ended_badly(self, loss: Loss) -> bool:
        """Return whether a job in which others have finished has failed by this loss.

        The ranks of an elastic job have the same state, so only rank 0's end is awaited: it is the
        one that saves what they have trained.
        """
        mattered = not self.outcome.elastic or loss.failure.rank == 0
        return mattered or loss.cause in _ENDED_BADLY

    def _early(self, seconds: float) -> str:
        """Return a clause that names the rank that has ended, and those that have not."""
        early = next(self.workers.having(SUCCESS), None)
        who = "a rank" if early is None else f"rank {early.place.rank} on {early.host}"
        ranks = sorted(worker.place.rank for worker in self.workers.having(*ACTIVE))
        some = ", ".join(map(str, ranks[:SOME_RANKS])) + ", …" * (len(ranks) > SOME_RANKS)
        others = f"rank {some} was" if len(ranks) == 1 else f"ranks {some} were"
        return f"{who} has ended with 0, and {others} still running {seconds:g} s later"

    def _late(self, grace: float, limit: float) -> str:
        then = f"waiting until --finish-timeout ({limit:g} s)" if limit else "waiting for them"
        if not self.outcome.elastic and self.settings.hang_timeout:
            then += "; --hang-timeout does not watch a script that sends no heartbeats"
        return f"{self._early(grace)}; {then}"


def _describe(failure: Failure, cause: Cause) -> str:
    code, after = failure.exit_code, " after losing a peer" if cause is Cause.VICTIM else ""
    text = f"was killed by signal {-code}" if code < 0 else f"exited {code}"
    return _LOST.get(cause, text + after)
