"""A job, a clock that moves only when told, and agents that do as they are told.

`Scenario` is the other side of the job machine's door for tests: agents come up and processes start
as soon as they are ordered (unless a test wants to do that itself); everything a script does
is said by the test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from elastic_driver.job import events as seen
from elastic_driver.job.decisions import (
    Announce,
    AskProgress,
    Decision,
    EndJob,
    GiveOrder,
    ProbeHosts,
    PublishNotice,
    PublishPlace,
    PublishWorld,
    StartAgent,
)
from elastic_driver.job.job import Job
from elastic_driver.job.workers import OCCUPYING, Worker
from elastic_driver.settings import Settings
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev

D = TypeVar("D")


class Scenario:
    """One job under test."""

    def __init__(self, *, agents: bool = True, processes: bool = True, **settings: Any) -> None:
        self.job = Job(Settings(**settings))
        self.now = 100.0
        self.decisions: list[Decision] = []
        self.agents, self.processes = agents, processes
        self.progress = True  # whether the members' progress can be read
        self.silent: set[str] = set()  # hosts that answer no probe
        self.machines: dict[str, str] = {}  # host → machine, as its agent says
        self._pid = 1000

    # ---- in ------------------------------------------------------------------------------

    def send(self, event: ev.Event) -> list[Decision]:
        """Hand in one event; what was decided, including what followed from obedience."""
        decided = self.job.handle(event, self.now)
        violated = self.job.check()
        assert violated == [], f"after {event}: {violated}"
        self.decisions += decided
        for decision in list(decided):
            decided += self._obey(decision)
        return decided

    def _obey(self, decision: Decision) -> list[Decision]:
        if self.agents and isinstance(decision, StartAgent):
            return self.agent_up(decision.host, decision.incarnation)
        if isinstance(decision, ProbeHosts):
            answers = (h for h in decision.hosts if h not in self.silent)
            probed = (seen.HostProbed(host, decision.number, answered=True) for host in answers)
            return [d for event in probed for d in self.send(event)]
        if isinstance(decision, AskProgress) and self.progress:
            members = self.job.workers.workers
            versions = [members[name].version for name in decision.workers]
            readings = tuple(seen.ProgressReading(max(0, v), 0.0, answered=True) for v in versions)
            return self.send(seen.ProgressReported(decision.number, readings))
        order = decision.order if isinstance(decision, GiveOrder) else None
        if self.processes and isinstance(order, msg.StartWorkerOrder):
            return self.started(order.worker)
        return []

    def hosts(self, **slots: int) -> list[Decision]:
        return self.send(seen.HostsDiscovered(tuple(slots.items())))

    def agent_up(self, host: str, incarnation: int = 1) -> list[Decision]:
        self._pid += 1
        address = f"10.0.0.{ord(host[0])}"
        up = host, incarnation, self._pid, address, (5000, 5001)
        return self.send(ev.AgentReady(*up, machine_id=self.machines.get(host, "")))

    def agent_lost(
        self, host: str, reason: str = "its lease expired", *, unreachable: bool = False
    ) -> list[Decision]:
        incarnation = self.job.fleet.agents[host].incarnation
        return self.send(seen.AgentLost(host, incarnation, reason, unreachable))

    def resume(self, *, moved: bool = False) -> list[Decision]:
        """The driver dies, and the next one goes on from its journal."""
        self.job = Job.restored(self.job.snapshot())
        term = self.job.adoption.term + 1
        return self.send(seen.DriverResumed(term, "a test says so", moved))

    def returns(self, host: str, *workers: str, incarnation: int = 0) -> list[Decision]:
        """The host's agent returns and runs these workers; without any: those in the books."""
        known, agent = self.job.workers.workers, self.job.fleet.agents.get(host)
        names = workers or [w.id for w in self.job.workers.on_host(host) if w.pid]
        told = tuple(ev.RunningWorker(n, known[n].pid if n in known else 7) for n in names)
        up = host, incarnation or (agent.incarnation if agent else 1), 1, f"10.0.0.{ord(host[0])}"
        term = self.job.adoption.term
        return self.send(ev.AgentReturned(*up, (5000, 5001), term=term, workers=told))

    def started(self, worker: str) -> list[Decision]:
        self._pid += 1
        return self.send(ev.WorkerStarted(worker, self._pid))

    def ready(
        self, *workers: str, version: int = -1, clean: bool = True, told: bool = False
    ) -> list[Decision]:
        """These workers say READY, each naming the round it is in (0: it was in none).

        `told`: their scripts know the ranks of their variables, as those of Horovod's API do.
        """
        decided: list[Decision] = []
        for name in workers:
            worker = self.job.workers.workers[name]
            left = self.job.rounds.current.number if worker.state.value == "running" else 0
            rank = self.told(name) if told else -1
            report = ev.WorkerReady(name, left, version, clean, "a test says so", told=rank)
            decided += self.send(report)
        return decided

    def step(self, *workers: str, step: int = 1) -> None:
        for worker in workers:
            self.send(ev.WorkerStepped(worker, self.job.rounds.current.number, step))

    def exit(self, worker: str, code: int, *, victim: bool = False) -> list[Decision]:
        return self.send(ev.WorkerExited(worker, code, f"log of {worker}", victim))

    def lost(self, worker: str) -> list[Decision]:
        return self.send(seen.LeaseExpired("worker", worker, 30.0))

    def obey_stops(self) -> list[Decision]:
        """Every worker that was told to stop ends by SIGTERM."""
        stopping = [w.id for w in self._workers() if w.state.value == "stopping"]
        return [decision for name in stopping for decision in self.exit(name, -15)]

    def wait(self, seconds: float) -> list[Decision]:
        """Let time pass, with a tick at every deadline on the way."""
        end, decided = self.now + seconds, []
        while (at := self.job.deadline()) is not None and at <= end:
            self.now = max(at, self.now)
            decided += self.send(seen.Tick())
            assert (after := self.job.deadline()) is None or after > self.now
        self.now = end
        return decided

    def training(self, *, steps: int = 1, **hosts: int) -> Scenario:
        """An elastic job on these hosts whose first round is complete, maybe with a step."""
        self.hosts(**hosts)
        self.ready(*self.starting)
        if steps:
            self.step(*self.members)
        return self

    # ---- out -----------------------------------------------------------------------------

    def all(self, kind: type[D]) -> list[D]:
        """Every decision of this kind so far."""
        return [d for d in self.decisions if isinstance(d, kind)]

    def orders(self, kind: type[D]) -> list[D]:
        """Every order of this kind so far."""
        return [d.order for d in self.all(GiveOrder) if isinstance(d.order, kind)]

    def told(self, worker: str) -> int:
        """The rank that a worker was told last: in its variables, or later."""
        orders = [o for o in self.orders(msg.StartWorkerOrder) if o.worker == worker]
        later = [d.place for d in self.all(PublishPlace) if d.worker == worker]
        return [*(order.place for order in orders), *later][-1].rank

    def announced(self, event: str) -> list[Announce]:
        return [a for a in self.all(Announce) if a.event == event]

    def _workers(self) -> list[Worker]:
        return [w for w in self.job.workers.workers.values() if w.state in OCCUPYING]

    def in_state(self, state: str) -> list[str]:
        return [w.id for w in self._workers() if w.state.value == state]

    @property
    def starting(self) -> list[str]:
        return self.in_state("starting")

    @property
    def world(self) -> msg.World:
        return self.all(PublishWorld)[-1].world

    @property
    def members(self) -> list[str]:
        """The members of the newest world, by rank."""
        return [member.worker for member in self.world.members]

    @property
    def notice(self) -> PublishNotice:
        return self.all(PublishNotice)[-1]

    @property
    def end(self) -> EndJob | None:
        return self.job.ending.end

    @property
    def round(self) -> tuple[int, str]:
        return self.job.rounds.current.number, self.job.rounds.current.state.value


MakeScenario = Callable[..., Scenario]
