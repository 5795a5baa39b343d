"""Reports of worker processes (started, ready, a step, ended), and leases that expire.

A report that is late, repeated or about a worker that is gone changes nothing and is counted.
Times are monotonic seconds.
"""

from dataclasses import dataclass

from elastic_driver.core import events as ev
from elastic_driver.core.decisions import KillAgent
from elastic_driver.core.rules.agents import Agents
from elastic_driver.core.rules.base import Rule
from elastic_driver.core.rules.endings import Endings
from elastic_driver.core.rules.outcome import ScriptKind, cause_of
from elastic_driver.core.rules.rounds import COMPLETE
from elastic_driver.core.rules.stacks import Stacks
from elastic_driver.core.rules.workers import ACTIVE, OCCUPYING, READY, RUNNING, Worker, WorkerNews
from elastic_driver.core.state_version import StateVersion, receivers_of, source_of


@dataclass(slots=True)
class Reports(Rule):
    """Decides what follows from the report of one worker."""

    endings: Endings
    stacks: Stacks
    agents: Agents

    def on_started(self, worker: Worker, event: ev.WorkerStarted, now: float) -> None:
        """Record a worker's process."""
        if worker.pid:
            self.effects.ignore(f"{worker.id} was started already")
            return
        self.workers.process_started(worker, event.pid)
        self.effects.announce("worker_started", f"pid {event.pid}", worker)

    def on_ready(self, worker: Worker, event: ev.WorkerReady, now: float) -> None:
        """Record that a worker waits for a round; leave the round if it was a member."""
        self._declare_elastic(now)
        running, current = worker.state is RUNNING, self.rounds.current
        if running and event.round != current.number:
            other = f"{worker.id} speaks of round {event.round}, it is in {current.number}"
            self.effects.ignore(other)
            return
        if not self.workers.ready(worker, event):
            self.effects.ignore(f"{worker.id} is {worker.state.value}, not awaited as READY")
            return
        self.effects.announce("worker_ready", event.reason or "waits for a round", worker)
        if running and current.state is COMPLETE:
            self.rounds.leave(now, f"{worker.id} left: {event.reason}")

    def _declare_elastic(self, now: float) -> None:
        """A worker has spoken: members lost while the job passed for plain broke the round."""
        if self.outcome.elastic:
            return
        self.outcome.declare(ScriptKind.ELASTIC)
        lost = next((loss for loss in self.outcome.losses if loss.member), None)
        if lost is not None:
            self.rounds.leave(now, f"{lost.failure.worker} {lost.reason}")

    def on_stepped(self, worker: Worker, event: ev.WorkerStepped, now: float) -> None:
        """Record progress: a worker has finished its first step in this round."""
        number = self.rounds.current.number
        in_round = worker.state is RUNNING and event.round == number
        just_left = worker.state is READY and event.round == worker.left
        if not (in_round or just_left):
            self.effects.ignore(f"step of {worker.id} in round {event.round}, which is over")
            return
        self.workers.stepped(worker)
        self.outcome.step_finished()
        self.hosts.step_finished(worker.host)
        if in_round and self.rounds.note_step():
            self._announce_synced()

    def _announce_synced(self) -> None:
        """Announce the source of the state: the first step of the round proves that all have it."""
        found = (self.workers.workers.get(name) for name in self.rounds.current.members)
        members = [worker for worker in found if worker is not None]
        states = [StateVersion(worker.version, worker.clean) for worker in members]
        source = source_of(states)
        if source is None:
            return
        worker, receivers = members[source], receivers_of(states, source)
        step = states[source].steps if states[source].trained else None
        if step is None:
            reason = f"{worker.id}'s first values, or those of its checkpoint"
        elif receivers:
            reason = f"{len(receivers)} of {len(members)} took over {worker.id}'s"
        else:
            reason = "everybody had it already"
        self.effects.announce("state_synced", reason, worker, step=step, receivers=len(receivers))

    def on_exited(self, worker: Worker, event: ev.WorkerExited, now: float) -> None:
        """Record the end of a worker's process, and judge whether it is a failure."""
        code, active = event.exit_code, worker.state in ACTIVE
        if self.outcome.kind is ScriptKind.UNDECLARED and active:
            # It never said a word; a later READY can still prove us wrong.
            self.outcome.declare(ScriptKind.PLAIN)
        self.capacity.note_change()
        running = worker.state is RUNNING
        finished = code == 0 and worker.is_member
        as_told = not active
        if worker.leaving and not (finished and self._all_leave()):
            as_told = True
            self.workers.apply(worker, WorkerNews.TOLD_TO_STOP)
        news = WorkerNews.EXITED_ZERO if code == 0 else WorkerNews.EXITED_NONZERO
        self.workers.apply(worker, news)
        reason = f"exit code {code}, {'as it was told to' if as_told else 'by itself'}"
        self.effects.announce("worker_exited", reason, worker, exit_code=code, expected=as_told)
        if not active:
            return
        if as_told:
            self.rounds.left_early(worker, now, running=running and code != 0)
        elif finished:
            self.outcome.succeeded(now)
        else:  # a newcomer that exits 0 before it ever took part has not done its work either
            cause = cause_of(code, victim=event.victim)
            self.endings.record_loss(worker, cause, now, code, event.log_tail)

    def _all_leave(self) -> bool:
        """Return whether the whole world leaves: then those who finish have finished the job."""
        members = [self.workers.workers.get(name) for name in self.rounds.current.members]
        return all(worker is None or worker.leaving for worker in members)

    def after_the_end(self, event: ev.Event) -> None:
        """Record what still happens while the agents of an ended job shut down."""
        match event:
            case ev.WorkerExited(worker=name, exit_code=code):
                worker = self.workers.workers.get(name)
                if worker is not None and worker.state in OCCUPYING:
                    self.workers.apply(worker, WorkerNews.TOLD_TO_STOP)
                    self.workers.apply(worker, WorkerNews.EXITED_NONZERO)
                    reason = f"exit code {code}, stopped with the job"
                    self.effects.announce(
                        "worker_exited", reason, worker, exit_code=code, expected=True
                    )
            case ev.LeaseExpired(kind="agent"):
                self.effects.decide(KillAgent(*event.agent, event.reason))
            case _:
                self.effects.ignore(f"{type(event).__name__} after the end of the job")

    # ---- leases --------------------------------------------------------------------------

    def on_lease_expired(self, event: ev.LeaseExpired, now: float) -> None:
        """Give up an agent or a worker that was not heard of; ask for stacks at half the time."""
        if event.kind == "agent":
            # It may only be cut off, and must not go on beside its successor.
            self.effects.decide(KillAgent(*event.agent, event.reason))
            self.agents.on_lost(ev.AgentLost(*event.agent, event.reason), now)
            return
        worker = self.workers.workers.get(event.owner)
        if worker is None or worker.state not in OCCUPYING:
            self.effects.ignore(f"a lease of {event.owner} expired, which is gone")
        elif event.kind == "worker":
            self._lost(worker, event.reason, now)
        elif worker.state is RUNNING:
            # It may hang with the GIL. When its lease ends it is killed, and the evidence with it.
            self.stacks.ask(now, f"{worker.id}: {event.reason}")

    def _lost(self, worker: Worker, reason: str, now: float) -> None:
        self.stacks.settle()  # the stacks are evidence, before it is killed
        if worker.leaving and self.workers.apply(worker, WorkerNews.TOLD_TO_STOP):
            self.orders.kill(worker, reason)
            self.rounds.left_early(worker, now, running=True)
        elif not self.endings.give_up_worker(worker, reason, now):
            self.effects.ignore(f"{worker.id} is {worker.state.value}, it cannot be lost any more")
