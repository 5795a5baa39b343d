"""The simulated cluster around one real `Job`: its driver, network, agents and hosts.

Everything random comes from one seeded generator. After each event the core's invariants
are checked, and what it orders is compared with what is really there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Literal

from msgspec.structs import replace

from elastic_driver.job.decisions import (
    Announce,
    AskProgress,
    AskStacks,
    AwaitHeartbeats,
    CheckHosts,
    EndJob,
    GiveOrder,
    KillAgent,
    ProbeAgent,
    ProbeHosts,
    PublishNotice,
    PublishPlace,
    PublishSave,
    PublishWorld,
    SealRound,
    StartAgent,
    StopAgent,
)
from elastic_driver.job.events import (
    AgentLost,
    AgentProbed,
    HostProbed,
    ProgressReading,
    ProgressReported,
)
from elastic_driver.job.fleet import NAMES_OF_A_DRIVER
from elastic_driver.job.job import Job
from elastic_driver.job.rounds import PUBLISHED_AGAIN
from elastic_driver.job.workers import ACTIVE
from elastic_driver.kernel.kernel import Handler
from elastic_driver.settings import Settings
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from elastic_driver.words.world import SlotInfo
from tests.sim.agents import OWN, SimAgent
from tests.sim.clock import Clock
from tests.sim.differences import Differences
from tests.sim.driver import Driver
from tests.sim.workers import STEP_S, Group, SimWorker, Violation, break_group


class Cluster:
    """Hosts, agents, workers and the driver, on simulated time."""

    def __init__(
        self, seed: int, settings: Settings, *, elastic: bool, mortal: bool = False
    ) -> None:
        self.random = Random(seed)
        self.clock = Clock()
        self.settings, self.elastic = settings, elastic
        self.horovod = elastic and seed % 3 == 0  # scripts know the ranks of their variables
        self.driver = Driver(self, Job(settings), seed, mortal=mortal)
        self.agents: dict[str, SimAgent] = {}  # the newest of each host
        self._all_agents: dict[tuple[str, int], SimAgent] = {}
        self.back: list[Callable[[], None]] = []  # called when another driver has taken over
        self.newest: msg.World | None = None  # that any driver has published
        self.world: msg.World | None = None  # in the store of the present driver
        self.notice: msg.Notice | None = None
        self.save: msg.SaveRequest | None = None
        self.places: dict[str, SlotInfo] = {}  # of workers, other than those of their orders
        self.leases: set[str] = set()  # of workers, begun by a driver that resumed
        self.spares: set[str] = set()  # workers that were ordered as spares
        self.calm = False  # agents find the next driver in time
        self.end: EndJob | None = None
        self.ended_at = 0.0
        self.groups: dict[int, Group] = {}
        self.births: dict[tuple[int, int], Group] = {}
        self.replaced = 0  # slow workers
        self.promoted = 0  # spares
        self.trained = 0  # steps anybody has ever finished
        self.saves: set[int] = set()  # requests, by number
        self.written: dict[int, set[str]] = {}  # shares of last checkpoints, by request
        self.on_disk = 0  # the step of the newest that is complete
        self.goal: int | None = None  # the number of steps after which workers finish
        self._trace: list[tuple[float, str, object]] = []
        self.dark: set[str] = set()  # hosts without power
        self.agent_trouble = 0.0  # chance that an agent fails to start
        self.duplicates = 0.1
        self.refused = 0  # orders of earlier drivers
        self.reunited = [0, 0]  # agents after a partition: those given up, those that went on
        self._pids = 1000
        self.differences = Differences(self, seed)
        self._asking = Random(f"asking of {seed}")
        self._probing = Random(f"probing of {seed}")

    @property
    def job(self) -> Job:
        """The job, as its newest driver knows it."""
        return self.driver.job

    def deliver(self, event: ev.Event) -> None:
        """Hand the driver an event, unless there is none."""
        self.driver.deliver(event)

    # ---- the network -----------------------------------------------------------------

    def delay(self) -> float:
        """How long a message takes: usually a millisecond, sometimes far longer."""
        slow = self.random.random() < 0.1
        return self.random.uniform(0.05, 0.3) if slow else self.random.uniform(0.0005, 0.005)

    def post(self, agent: SimAgent, event: ev.WireEvent, *, again: bool = False) -> None:
        """Send an event to the driver; it may come late, twice, or in another order."""
        if agent.cut:
            return
        own, parted = isinstance(event, OWN), agent.parted
        if agent.away or (own and agent.telling):
            agent.unanswered.append(event)
            return
        if parted is not None:  # it is sent until it is answered, the agent's own ones in order
            waits = own and any(isinstance(earlier, OWN) for earlier in agent.unanswered)
            agent.unanswered.append(event)
            if parted.mute or waits:
                return
        copies = 2 if not again and self.random.random() < self.duplicates else 1
        agent.under_way += own * copies
        for _ in range(copies):
            self.clock.after(self.delay(), partial(self._arrive, agent, event, own=own))

    def _arrive(self, agent: SimAgent, event: ev.WireEvent, *, own: bool) -> None:
        agent.under_way -= own
        if agent.parted is not None and agent.parted.mute:
            agent.unanswered.append(event)
        else:
            self.driver.deliver(event, agent)

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    # ---- the story -------------------------------------------------------------------

    def note(self, mark: str, what: object) -> None:
        """Remember what happened; it is put into words only if somebody asks."""
        self._trace.append((self.clock.now, mark, what))

    @property
    def trace(self) -> list[str]:
        """The whole story, a line for each event, decision and fault."""
        return [f"{at:9.3f} {mark} {what}" for at, mark, what in self._trace]

    # ---- what the driver decides -----------------------------------------------------

    def handlers(self) -> dict[type[Any], Handler]:
        """Return what carries out each type of decision."""
        return {
            StartAgent: self._start_agent,
            StopAgent: lambda d: self._give(d, msg.ShutdownOrder(d.grace, d.reason)),
            KillAgent: self._kill,
            GiveOrder: self._order,
            AwaitHeartbeats: self._await_heartbeats,
            ProbeAgent: self._probe,
            ProbeHosts: self._probe_hosts,
            PublishWorld: lambda d: self._publish(d.world),
            AskProgress: self._ask_progress,
            PublishNotice: self._publish_notice,
            PublishPlace: self._publish_place,
            PublishSave: lambda d: self._publish_save(d.request),
            SealRound: lambda _: None,  # nobody here asks for rounds that are over
            AskStacks: lambda _: None,  # workers of this world have no stacks
            CheckHosts: self._check_hosts,
            Announce: self._announced,
            EndJob: self.end_job,
        }

    def end_job(self, decision: EndJob) -> None:
        """Stop everything."""
        self.end, self.ended_at = decision, self.driver.now

    def _await_heartbeats(self, decision: AwaitHeartbeats) -> None:
        self.leases = set(decision.workers)

    def _publish_place(self, decision: PublishPlace) -> None:
        self.places[decision.worker] = decision.place

    def _check_hosts(self, decision: CheckHosts) -> None:
        raise Violation(f"{decision.hosts} are to be checked in a job without node checks")

    def _announced(self, told: Announce) -> None:
        if told.event == "worker_replaced":
            self._check_replaced(told)
        elif told.event == "agent_lost":
            self._check_lost(told)
        self.promoted += told.event == "spare_promoted"

    def start_agent_late(self, decision: StartAgent, term: int) -> None:
        """Start an agent for a driver that has been replaced: it finds the present one."""
        name = decision.host, decision.incarnation
        if decision.host in self.dark or name in self._all_agents:
            return
        agent = self._all_agents[name] = SimAgent(self, *name, term)
        agent.ready = ev.AgentReady(*name, self.next_pid(), "127.0.0.1", (5000, 5001))
        agent.come_back(self.driver.term)

    def _start_agent(self, decision: StartAgent) -> None:
        agent = SimAgent(self, decision.host, decision.incarnation, self.driver.term)
        self.agents[decision.host] = self._all_agents[agent.name] = agent
        dark = self._is_away(agent.host) or decision.host in self.dark
        why = "ssh: no route to host" if dark else "ssh: permission denied"
        lost = AgentLost(decision.host, decision.incarnation, why, unreachable=dark)
        if dark or self.random.random() < self.agent_trouble:
            agent.alive = False
            self.driver.report(self.random.uniform(0.1, 1.0), lost)
            return
        ready = ev.AgentReady(
            decision.host,
            decision.incarnation,
            self.next_pid(),
            "127.0.0.1",
            (5000, 5001),
            probe_port=7000 if self._probing.random() < 0.8 else 0,
        )
        self.clock.after(self.random.uniform(0.02, 0.6), lambda: agent.come_up(ready))

    def _kill(self, decision: KillAgent) -> None:
        """End an agent that can be reached; another one ends when it hears that it is given up."""
        agent = self.agent_named(decision.host, decision.incarnation)
        if agent is not None:
            agent.sealed = True
            delay = self.driver.random.uniform(0.001, 0.05)
            self.clock.after(delay, lambda: agent.die() if agent.reachable else None)

    def _probe(self, asked: ProbeAgent) -> None:
        """A process answers, a machine says that it is gone, a host cut off does neither."""
        agent = self.agents[asked.host]
        same = agent.incarnation == asked.incarnation
        result: Literal["answered", "refused", "silent"]
        result, seconds = "refused", self._probing.uniform(0.0005, 0.05)
        if same and (agent.cut or (agent.alive and not agent.reachable)):
            result, seconds = "silent", asked.patience
        elif same and agent.alive:
            result = "answered"
        found = AgentProbed(asked.host, asked.incarnation, asked.number, result, seconds)
        term = self.driver.term

        def answer() -> None:
            now_back = same and result == "silent" and agent.reachable  # several attempts are made
            if result == "silent" and not now_back:
                agent.silent_at = self.clock.now
            if term == self.driver.term:
                self.deliver(replace(found, result="answered") if now_back else found)

        self.clock.after(seconds, answer)

    def _probe_hosts(self, decision: ProbeHosts) -> None:
        """A host without power does not answer; a few cannot be probed at all."""
        for host in decision.hosts:
            if host in self.job.fleet.agents:
                raise Violation(f"{host} is probed though it has an agent")
            known = not host.endswith("3")
            if not (self._is_away(host) or host in self.dark) or not known:
                probed = HostProbed(host, decision.number, answered=known)
                self.driver.report(self.delay(), probed)

    def _is_away(self, host: str) -> bool:
        there = (agent for agent in self.every_agent() if agent.host == host)
        return any(agent.away or agent.parted is not None for agent in there)

    def _order(self, decision: GiveOrder) -> None:
        if isinstance(decision.order, msg.StartWorkerOrder):
            host = self.job.hosts.known.get(decision.host)
            if host is None or decision.order.place.slot >= host.slots:
                raise Violation(f"{decision.order.worker} is started beyond the host's slots")
        if isinstance(decision.order, msg.StopWorkerOrder):
            self._check_stop(decision.order)
        self._give(decision, decision.order)

    def _give(self, decision: GiveOrder | StopAgent, order: msg.Order) -> None:
        agent = self.agent_named(decision.host, decision.incarnation)
        if agent is not None:
            agent.receive(order, self.driver.term)

    def _publish(self, world: msg.World) -> None:
        newest, again = self.newest, False
        if newest is not None and newest.round == world.round and self.world is None:
            again = list(newest.members) == list(world.members)  # by a driver that has resumed
        forgotten = self.driver.lacks > 0  # perhaps the newest one
        if newest is not None and world.round <= newest.round and not (again or forgotten):
            raise Violation(f"round {world.round} is published after round {newest.round}")
        if not again and world.reason != PUBLISHED_AGAIN:  # it may have forgotten later rounds
            self._check_world(world)
        self.newest = self.world = world
        self._tell_workers("see_world", world)

    def _tell_workers(self, action: str, document: object) -> None:
        for worker in self.living():
            worker.act(self.delay(), "hear", self.driver.term, action, document)

    def hears(self, worker: SimWorker, term: int) -> bool:
        """Whether an answer of the driver of this term reaches a worker: not all do if it dies."""
        driver, parted = self.driver, worker.agent.parted
        there = driver.up and driver.term == term
        if parted is not None and (parted.deaf or driver.random.random() < 0.5):
            return False
        return not worker.agent.away and (there or driver.random.random() < 0.5)

    def _ask_progress(self, question: AskProgress) -> None:
        """Most questions are answered at once, some late, and a few never."""
        if self._asking.random() < 0.03:
            return
        late = self._asking.uniform(0.1, 3.0) if self._asking.random() < 0.1 else 0.002

        def answer() -> None:
            told = [w for w in self.living() if w.driver == term and not w.agent.away]
            readings = [
                ProgressReading(w.version, 0.0, answered=True)
                if w.agent.parted is None
                else ProgressReading(max(0, w.heard_version), 0.0, answered=False)
                for w in told
            ]
            self.driver.report(0.0, ProgressReported(question.number, tuple(readings)))

        term = self.driver.term
        self.clock.after(late, lambda: answer() if term == self.driver.term else None)

    def _publish_notice(self, decision: PublishNotice) -> None:
        self.notice = msg.Notice(decision.round, decision.after_step, decision.reason)
        self._tell_workers("see_notice", self.notice)

    def _publish_save(self, request: msg.SaveRequest) -> None:
        workers, again = self.job.workers.workers, request.number in self.saves
        self.save = request
        self.saves.add(request.number)
        for member in () if again else request.members:
            held = workers[member]  # READY when asked; it may be in a round again by now
            there = held.state.value in ("ready", "running")
            if not there or (held.version, held.clean) != (request.step, True):
                raise Violation(f"{member} is asked to save step {request.step}, it is {held}")
        self._tell_workers("see_save", request)

    # ---- drivers that come and go ------------------------------------------------------

    def forget_store(self) -> None:
        """The driver has died, and its store with it; nobody is cut off from the next one yet."""
        self.world = self.notice = self.save = None
        for agent in self.every_agent():
            agent.away = False

    def driver_comes(self) -> None:
        """Choose the agents that cannot reach the next driver at first, before that acts."""
        for agent in self.every_agent():
            agent.late = self.driver.random.random()
            agent.away = agent.late > 0.88 and not agent.cut and not self.calm

    def driver_is_back(self) -> None:
        """Another driver has taken over: agents find it, a few of them too late."""
        random, term = self.driver.random, self.driver.term
        for name in self.job.fleet.given_up.items():
            if (lost := self.agent_named(*name)) is not None:
                lost.sealed = True  # perhaps the driver died before it had done that
        for agent in self.every_agent():
            delay = random.uniform(0.0, 0.3) if agent.late < 0.7 else random.uniform(0.3, 1.5)
            delay = random.uniform(1.0, 6.0) if agent.away else delay
            if agent.sealed and not agent.away:
                delay = 0.0  # its keys are refused as soon as it can be reached
            self.clock.after(delay, partial(agent.come_back, term))
        for worker in self.living():
            worker.act(random.uniform(0.0, 1.0), "find_driver", term)
        for tell in self.back:
            tell()

    # ---- what is really there --------------------------------------------------------

    def every_agent(self) -> list[SimAgent]:
        """Every agent process, in a stable order."""
        return [agent for agent in self._all_agents.values() if agent.alive]

    def agent_named(self, host: str, incarnation: int) -> SimAgent | None:
        """This agent, if it was ever started."""
        return self._all_agents.get((host, incarnation))

    def living(self) -> list[SimWorker]:
        """Every worker process, in a stable order."""
        return [w for agent in self.every_agent() for w in agent.workers.values() if w.alive]

    def check_term(self, agent: SimAgent, term: int) -> None:
        """No agent that has reported to a driver obeys an earlier one."""
        if term < agent.term:
            raise Violation(f"{agent.host}.{agent.incarnation} obeys the driver of term {term}")

    def check_slot(self, newcomer: SimWorker) -> None:
        known = self.job.workers.workers

        def slot(worker: SimWorker) -> int | None:
            """The slot that it occupies; none if it is a spare."""
            record = known.get(worker.id)
            if record is None:  # it is stopped before it was started, or its agent was given up
                unknown = self.driver.lacks or worker.id in self.spares
                return None if unknown else worker.order.place.slot
            return None if record.spare else record.slot

        for worker in self.living():
            if worker.id == newcomer.id:
                raise Violation(f"{newcomer.id} is started twice")
            there = worker.agent.host == newcomer.agent.host and not worker.agent.cut
            if self.driver.lacks and worker.agent is not newcomer.agent:
                there = False  # this driver has never heard of the earlier agent
            if there and slot(worker) is not None and slot(worker) == slot(newcomer):
                raise Violation(f"{newcomer.id} is started beside {worker.id} in one slot")

    def _check_world(self, world: msg.World) -> None:
        """No finished step may be lost while somebody who could bring it along is there."""
        if not self.elastic or self.job.outcome.first_success is not None:
            return
        members = {member.worker for member in world.members}
        best = max((m.version for m in world.members if m.clean), default=-1)
        room = self.settings.max_np is None or (self.job.capacity.wanted or 2) >= 2
        for worker in self.job.workers.workers.values():
            waits = worker.state.value == "ready" and worker.clean and room
            if waits and worker.id not in members and worker.version > best:
                raise Violation(f"{worker.id} holds version {worker.version}, the world {best}")

    def _check_stop(self, order: msg.StopWorkerOrder) -> None:
        """The last holder of the newest state is not sent away while others come to take over."""
        job = self.job
        stopped = job.workers.workers.get(order.worker)
        if stopped is None:  # only its agent knows it, as the journal was late
            return
        finishing = job.outcome.first_success is not None
        if not self.elastic or finishing or (job.capacity.wanted or 2) < 2:
            return
        others = [w for w in job.workers.having(*ACTIVE) if w is not stopped]
        holders = [w for w in others if w.admitted is not None and w.version >= stopped.version]
        heirs = [w for w in others if not w.leaving and w.admitted is None]
        alone = stopped.clean and stopped.version > 0 and not holders
        if order.grace > 0 and alone and heirs:
            raise Violation(f"{stopped.id} alone holds version {stopped.version}, but is stopped")

    def _check_lost(self, told: Announce) -> None:
        """By evidence, an agent is lost only if it is gone, or was cut off when it was probed."""
        agent = self.agent_named(str(told.host), self.job.fleet.given_up[str(told.host)])
        if agent is None or "evidence" not in told.what.facts():
            return
        if agent.reachable and agent.back_at <= agent.silent_at:
            raise Violation(f"the agent on {agent.host} lives, but is lost: {told.reason}")

    def _check_replaced(self, told: Announce) -> None:
        """A slow worker goes only when its replacement is there, on a host that was never slow."""
        self.replaced += 1
        job = self.job
        successor = job.workers.workers[str(told.what.facts()["replacement"])]
        if successor.state.value not in ("ready", "running"):
            raise Violation(f"{told.worker} left before {successor.id} was ready")
        if successor.host in job.hosts.distrusted:
            raise Violation(f"{told.worker} was replaced on {successor.host}, which is slow too")

    def someone_is_gone(self, world: msg.World) -> bool:
        """Whether building this group must fail: a member is dead or has gone on."""
        there = {w.id: w for w in self.living() if not w.frozen or w.group is not None}
        for member in world.members:
            worker = there.get(member.worker)
            if worker is None or worker.left >= world.round:
                return True
        return False

    # ---- training --------------------------------------------------------------------

    def group(self, world: msg.World) -> Group:
        """The process group that the members of this world build."""
        new = Group(world.round, world.size, repair=world.repair)
        return self.groups.setdefault(world.round, new)

    def birth_group(self, order: msg.StartWorkerOrder) -> Group:
        """The process group of plain workers that were born together into the same round."""
        term = (int(order.worker.rsplit(".", 1)[1]) - 1) // NAMES_OF_A_DRIVER
        return self.births.setdefault((order.round, term), Group(order.round, order.place.size))

    def begin_training(self, group: Group) -> None:
        """Everybody has joined: the state is synced, then steps follow each other."""
        group.training = True
        members = list(group.members.values())
        if self.elastic:
            self.differences.begin(group)
        source = [w.version for w in members if w.clean] or [w.version for w in members]
        version = max(0, *source)
        if not self.elastic:
            version = self.trained  # plain scripts go on from a checkpoint
        elif version == 0:
            version = self.on_disk
        for worker in members:
            worker.version, worker.clean = version, True
        self.clock.after(STEP_S, lambda: self._step(group))

    def _step(self, group: Group) -> None:
        members = list(group.members.values())
        if group.broken or not members:
            return
        if len(members) < group.size and not any(w.alive for w in members):
            return
        if group.stands_still():
            self.clock.after(STEP_S, lambda: self._step(group))  # stalled, until told to leave
            return
        version = members[0].version + 1
        self.trained = max(self.trained, version)
        for worker in members:
            worker.finish_step(version)
        if self.goal is not None and version >= self.goal:
            for worker in list(group.members.values()):
                worker.act(self.random.uniform(0.0, 0.2), "end", 0)
            return
        self.clock.after(STEP_S, lambda: self._step(group))


__all__ = ["Cluster", "SimAgent", "Violation", "break_group"]
