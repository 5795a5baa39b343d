"""A driver goes on with the job of one that has died: it adopts the agents and their workers.

The books of the job (all its parts) are as the last event in the journal left them. Whether the
decisions upon that event were carried out is not known, and the store is empty. So what a client
may wait for is published or asked again, and an order is given again if its agent does not know it.

An agent that was up is *awaited*: it gets no orders until it has returned and said which workers it
runs. Then these are compared with the books. A worker that was ordered and is not known there was
never started, so it is ordered again; an agent starts no worker twice. A worker that the books do
not have is stopped. One that was to stop is told so again, unless the newest state may be lost with
it. An agent that does not return is found by probes like any silent one (`lost_hosts`), and lost
after `heartbeat_timeout` at the latest. Nobody knows the process of an agent that was being
started, so it is refused from now on and another one is started. An agent that the books do not
have is told to shut down.

A journal that was late may lack the last events (docs/journal.md). Then agents and workers know
more than the books. So the agents and workers that a driver starts have other names than those of
all earlier drivers, and numbers of rounds that workers name are not given again.
Times are monotonic seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_driver.job.boundary import Boundary
from elastic_driver.job.decisions import AwaitHeartbeats, KillAgent, PublishNotice, StopAgent
from elastic_driver.job.events import DriverResumed, Turn, takes
from elastic_driver.job.fleet import AgentNews, first_number
from elastic_driver.job.hangs import Stacks
from elastic_driver.job.leaving import Drains
from elastic_driver.job.lost_hosts import Agents, Suspicion
from elastic_driver.job.preemption import FinalCheckpoint
from elastic_driver.job.reports import Reports
from elastic_driver.job.rounds import Rule
from elastic_driver.job.supply import Rechecks
from elastic_driver.job.workers import (
    ACTIVE,
    READY,
    RUNNING,
    SPARE,
    STARTING,
    STOPPING,
    WARMING,
    Worker,
    WorkerNews,
)
from elastic_driver.kernel.tables import saved
from elastic_driver.kernel.wait import Wait
from elastic_driver.words import counted
from elastic_driver.words import log_events as log
from elastic_driver.words import wire_events as ev

AGAIN = "the driver was resumed"


@dataclass(slots=True)
class Adoption(Rule):
    """Compares what returning agents say with the tables of the job, and repeats orders."""

    agents: Agents
    suspicion: Suspicion
    reports: Reports
    boundary: Boundary
    stacks: Stacks
    drains: Drains
    rechecks: Rechecks
    final_checkpoint: FinalCheckpoint
    term: int = saved(1)  # of this driver
    resumed_at: float = saved(0.0)
    _returned: set[tuple[str, int]] = saved(factory=set, name="returned")  # agents, in this term

    @takes(DriverResumed)
    def on_resumed(self, event: DriverResumed, now: float) -> None:
        """Begin the term of a driver that goes on with the job."""
        self._begin_term(event)
        self.resumed_at = now
        for agent in tuple(self.fleet.starting.values()):
            why = f"{AGAIN} while this agent was being started; another one is started"
            self.effects.decide(KillAgent(agent.host, agent.incarnation, why))
            self.fleet.apply(agent, AgentNews.LOST)
            self.capacity.note_change()
        self.rounds.resume(now)
        if self.ending.end is not None:
            return
        self._recall_holders()
        self.boundary.resume(now)
        self.final_checkpoint.resume(now)
        self.stacks.resume(now)
        self.drains.resume()
        self.rechecks.resume()
        self.suspicion.resume(now, moved=event.moved)
        heard = tuple(w.id for w in self.workers.having(READY, RUNNING, SPARE))
        if self.outcome.elastic and heard:  # the workers of a plain job send no heartbeats
            self.effects.decide(AwaitHeartbeats(heard, self.settings.heartbeat_timeout, AGAIN))

    @takes(ev.AgentReturned)
    def on_returned(self, event: ev.AgentReturned, now: float) -> None:
        """Adopt an agent, and give it the orders that it lacks; or let it go."""
        self._check_new(event)
        agent = self.fleet.agents.get(event.host)
        if agent is None or agent.incarnation != event.incarnation:
            self._dismiss(event, "the job does not have this agent (any more)")
            return
        self.agents.on_ready(event, now)
        self.suspicion.on_ready(event, now)
        self._compare(event, now)
        self.rounds.give_ranks(event.host, AGAIN)

    @takes(ev.WorkerReady, turn=Turn.FIRST)
    def on_left(self, event: ev.WorkerReady) -> None:
        """Note the round that a worker has left."""
        if self._is_unknown(event.round):
            self.rounds.continue_after(event.round)

    @takes(ev.WorkerStepped, ev.WorkerStalled, turn=Turn.FIRST)
    def on_trains(self, event: ev.WorkerStepped | ev.WorkerStalled) -> None:
        """Note the round that a worker is in; have all leave one of which the books know nothing.

        Its members are not known.
        """
        number = event.round
        if self._is_unknown(number):
            unknown = f"the driver that began round {number} has died, and kept no record of it"
            self.effects.decide(PublishNotice(number, None, unknown))
            self.rounds.continue_after(number)

    def _is_unknown(self, number: int) -> bool:
        return self.term > 1 and number > self.rounds.newest

    def take_in_after_the_end(self, event: DriverResumed | ev.AgentReturned) -> None:
        """Repeat that the job is over; returning agents shut down."""
        if isinstance(event, ev.AgentReturned):
            self._check_new(event)
            self._dismiss(event, "the job is over")
        elif self.ending.end is not None:
            self._begin_term(event)
            self.effects.decide(self.ending.end)

    def advance(self, now: float) -> Iterable[Wait]:
        """Give up agents that do not return."""
        awaited = tuple(self.fleet.awaited.values())
        if not awaited:
            return
        timeout = self.settings.heartbeat_timeout
        agents = counted(len(awaited), "agent has", "agents have")
        wait = Wait(self.resumed_at + timeout, f"{agents} not returned to the resumed driver yet")
        if not wait.is_over(now):
            yield wait
            return
        for agent in awaited:
            late = f"it did not return to the resumed driver within {timeout:g} s"
            self.agents.give_up(agent, late, now)

    def _begin_term(self, event: DriverResumed) -> None:
        self.term = event.term
        self._returned.clear()
        self.fleet.begin_term(event.term)
        self.workers.begin_term(first_number(event.term))
        for agent in self.fleet.agents.values():
            self.fleet.apply(agent, AgentNews.RESUMED)
        self.effects.announce(log.DriverResumed(term=event.term), event.reason or AGAIN)

    def _check_new(self, event: ev.AgentReturned) -> None:
        agent = event.host, event.incarnation
        if event.term != self.term or agent in self._returned:
            raise ev.StaleEvent(f"{event.host} returns to term {event.term}, twice or too late")
        self._returned.add(agent)

    def _dismiss(self, event: ev.AgentReturned, reason: str) -> None:
        grace = self.settings.stop_grace
        self.effects.decide(StopAgent(event.host, event.incarnation, grace, reason))

    def _recall_holders(self) -> None:
        """Keep workers that were to stop, if they may be the last ones to hold the newest state.

        The members of the round were to go on with it, but no step proves that they have it. Once
        it is not needed any more, such a worker is told to stop like any other that has to leave.
        """
        current, outcome = self.rounds.current, self.outcome
        if current.stepped or not outcome.elastic or outcome.first_success is not None:
            return
        trained = [w for w in self.workers.having(*ACTIVE, STOPPING) if w.clean and w.version > 0]
        newest = max((worker.version for worker in trained), default=0)
        for worker in trained:
            going = worker.state is STOPPING and not worker.killed
            if going and worker.version == newest and worker.id not in current.members:
                self.workers.apply(worker, WorkerNews.RECALLED)
                self.capacity.note_change()

    # ---- comparing -------------------------------------------------------------------------

    def _compare(self, event: ev.AgentReturned, now: float) -> None:
        """Compare the workers that an agent runs with those that the job knows."""
        told = {each.worker: each.pid for each in event.workers}
        host = self.hosts.known.get(event.host)
        lost = list[Worker]()
        slots = 0 if host is None else host.slots
        for worker in self.workers.on_host(event.host):
            if worker.id in told:
                self._go_on_with(worker, told.pop(worker.id), now)
            elif worker.order is None or worker.state not in (STARTING, WARMING):
                lost.append(worker)
            elif worker.slot < slots:
                why = f"{AGAIN}; it was not started yet"
                self.effects.give(event.host, worker.order, why, repeated=True)
            else:
                self.workers.mark_leaving(worker, "its host does not have this slot any more")
                lost.append(worker)
        for name, pid in told.items():
            stranger = self.workers.add_stranger(event.host, name, pid)
            if stranger is not None:  # nobody gets its slot before it has ended
                self.effects.stop(stranger, "the job does not have this worker")
        self.agents.lose_workers(lost, "its agent does not run it any more", now)

    def _go_on_with(self, worker: Worker, pid: int, now: float) -> None:
        """Go on with a worker that the agent runs."""
        if pid and not worker.pid:
            self.reports.on_started(worker, ev.WorkerStarted(worker.id, pid), now)
        if worker.killed:
            self.effects.kill(worker, f"{AGAIN}; it was given up")
        elif worker.state is STOPPING:
            self.effects.order_stop(worker.host, worker.id, f"{AGAIN}; it had to stop")
