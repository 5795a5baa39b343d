"""Carries out the machines' decisions.

Called by the driver's thread only, one decision after the other, in order. It remembers agents
and workers to number their orders, and to remove their keys from the store when they end. It
decides nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.core import events as ev
from elastic_driver.core.decisions import (
    Announce,
    AskProgress,
    AskStacks,
    CheckHosts,
    Decision,
    EndJob,
    GiveOrder,
    PublishNotice,
    PublishSave,
    PublishWorld,
    SealRound,
    StartAgent,
    StopAgent,
)
from elastic_driver.core.documents import (
    Notice,
    Order,
    ShutdownOrder,
    SlotInfo,
    StartWorkerOrder,
    StopWorkerOrder,
    World,
    decode_progress,
    encode,
    encode_world,
)
from elastic_driver.errors import assert_never
from elastic_driver.policies.messages import (
    KeysRead,
    KillAgent,
    PublishKey,
    ReadKeys,
    SendEvent,
    ShowLine,
)
from elastic_driver.policies.nodecheck.checker import CheckDecision, CheckEnded
from elastic_driver.policies.stragglers import RoundPublished
from elastic_driver.runtime.backend import Backend
from elastic_driver.runtime.checks import NodeChecks
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.failures import HeldTails
from elastic_driver.runtime.mailbox import MachineEvent
from elastic_driver.runtime.reporter import Reporter
from rendezvous.errors import RendezvousError
from rendezvous.server import RendezvousServer
from rendezvous.wire import Delete, DeletePrefix, Entries, Get, Operation, Set, Written

AnyDecision: TypeAlias = Decision | SendEvent | CheckDecision

READ_S = 1.0  # for the store to answer a `ReadKeys`
KEPT_ORDERS = 4096  # of one agent; it reads them as they come, and is never that far behind
FRESH_S = 0.1  # for the workers to say how far they are, when a boundary is to be named
UNREACHABLE_STEP = 2**53
"""A notice that names this step asks for nothing yet; it only makes every heartbeat report."""
_LAST_EVENTS = ("job_succeeded", "job_failed")  # logged after all processes have ended


@dataclass(slots=True)
class AgentRecord:
    """An agent that was started and whose process has not ended."""

    host: str
    incarnation: int
    orders: int = 0  # given so far


@dataclass(slots=True)
class WorkerRecord:
    """A worker that was ordered and whose end was not reported."""

    agent: tuple[str, int]
    round: int  # the newest one it takes part in, or was started for
    place: SlotInfo
    pid: int | None = None
    expected: bool = False  # it was told to stop


class Executor:
    """Carries out decisions with the store, the backend, the event log and the reporter."""

    def __init__(
        self,
        *,
        server: RendezvousServer,
        starter: Backend,
        log: EventLog,
        reporter: Reporter,
        run_id: str,
        heartbeat_timeout: float,
        checks: NodeChecks | None,
        post: Callable[[MachineEvent], None],
    ) -> None:
        """`post` puts an event into the mailbox; any thread may call it."""
        self._server, self._starter, self._log = server, starter, log
        self._reporter, self.run_id = reporter, run_id
        self._checks, self._post = checks, post
        self._heartbeat_timeout = heartbeat_timeout
        self._agents: dict[tuple[str, int], AgentRecord] = {}
        self._workers: dict[str, WorkerRecord] = {}
        self._world: World | None = None
        self._exit_codes: dict[str, tuple[int, bool]] = {}  # of the event being handled
        self._last_event: Announce | None = None
        self.tails = HeldTails()
        self.look_seconds = 0.0  # that the machine needed for the last `KeysRead`

    @property
    def agents(self) -> tuple[AgentRecord, ...]:
        """The agents whose processes have not ended."""
        return tuple(self._agents.values())

    # ---- decisions -----------------------------------------------------------------------

    def execute(self, decision: AnyDecision) -> None:  # noqa: PLR0912 - a case for each
        """Carry out one decision; `EndJob` is the driver's to carry out."""
        match decision:
            case ReadKeys():
                self._read_keys(decision)
            case PublishKey(key=key, value=value):
                self._server.post([Set(key, value)])
            case SendEvent(event=event):
                self._post(event)
            case KillAgent(host=host, incarnation=incarnation):
                self._kill(host, incarnation)
            case ShowLine(line=line) if self._checks is not None:
                self._checks.say(line)
            case StartAgent():
                self._start_agent(decision)
            case StopAgent():
                order = ShutdownOrder(decision.grace, decision.reason)
                self._give(decision.host, decision.incarnation, order)
            case GiveOrder():
                self._note_order(decision)
                self._give(decision.host, decision.incarnation, decision.order)
            case PublishWorld():
                self._publish_world(decision.world)
            case AskProgress():
                self._ask_progress(decision)
            case PublishNotice(round=round_id, after_step=step, reason=reason):
                notice = Notice(round_id, step, reason)
                self._server.post([Set(contract.JOB_NOTICE, encode(notice))])
            case PublishSave(request=request):
                self._server.post([Set(contract.JOB_SAVE, encode(request))])
            case SealRound():
                prefix = contract.round_prefix(decision.round)
                self._server.post([DeletePrefix(prefix, seal=True)])
            case AskStacks(number=number):
                self._server.post([Set(contract.JOB_STACKS, str(number).encode())])
            case Announce():
                self._announce(decision)
            case EndJob() | CheckHosts() | CheckEnded() | ShowLine():
                raise AssertionError(f"{decision} is the loop's to carry out")
            case _:
                assert_never(decision)

    def shut_down_agents(self, grace: float, reason: str) -> None:
        """Order every agent to stop its workers and exit."""
        for agent in self._agents.values():
            self._give(agent.host, agent.incarnation, ShutdownOrder(grace, reason))

    def _start_agent(self, decision: StartAgent) -> None:
        host, incarnation = decision.host, decision.incarnation
        self._agents[host, incarnation] = AgentRecord(host, incarnation)

        def on_lost(reason: str) -> None:
            self._post(ev.AgentLost(host, incarnation, reason))

        backend = self._backend_for(incarnation)
        if backend is not None:
            backend.start(host, incarnation, on_lost)

    def _backend_for(self, incarnation: int) -> Backend | None:
        """Return the backend that started an agent; None once its check is over."""
        if incarnation < contract.FIRST_OF_CHECKS:
            return self._starter
        return None if self._checks is None else self._checks.backend

    def _note_order(self, decision: GiveOrder) -> None:
        match decision.order:
            case StartWorkerOrder(worker=worker, round=round_id, place=place):
                agent = (decision.host, decision.incarnation)
                self._workers[worker] = WorkerRecord(agent, round_id, place)
            case StopWorkerOrder(worker=worker) if worker in self._workers:
                self._workers[worker].expected = True
            case _:
                pass

    def _give(self, host: str, incarnation: int, order: Order) -> None:
        agent = self._agents.get((host, incarnation))
        if agent is None:
            return  # its process has ended meanwhile
        agent.orders += 1
        key = contract.agent_order(host, incarnation, agent.orders)
        operations: list[Operation] = [Set(key, encode(order))]
        if agent.orders > KEPT_ORDERS:
            old = agent.orders - KEPT_ORDERS
            operations.append(Delete(contract.agent_order(host, incarnation, old)))
        self._server.post(operations)

    def _publish_world(self, world: World) -> None:
        self._world = world
        self._post(RoundPublished(world))
        for member in world.members:
            if member.worker in self._workers:
                record = self._workers[member.worker]
                record.round, record.place = world.round, member.place
        self._server.post([Set(contract.JOB_WORLD, encode_world(world))])
        self._show(self.tails.world_published(world.round))

    # ---- reading -------------------------------------------------------------------------

    def _read_keys(self, decision: ReadKeys) -> None:
        began, entries = time.monotonic(), {}
        try:
            (found,) = self._server.apply([Get(decision.keys)], timeout=READ_S)
        except RendezvousError:  # the store has too much to do: the machine asks again
            found = None
        if isinstance(found, Entries):
            entries = {key: (entry.value, entry.revision) for key, entry in found.entries.items()}
        seconds = time.monotonic() - began + self.look_seconds
        self._post(KeysRead(decision.machine, decision.keys, entries, seconds))

    def _ask_progress(self, decision: AskProgress) -> None:
        """Read how far the workers are, and post it as an event.

        A notice of a step that is never reached wakes every heartbeat thread, and their next
        heartbeats say how far they are: so the answers are milliseconds old.
        """
        question = Notice(decision.round, UNREACHABLE_STEP, decision.reason)
        keys = tuple(contract.worker_progress(worker) for worker in decision.workers)
        try:
            (asked,) = self._server.apply([Set(contract.JOB_NOTICE, encode(question))])
            revision = asked.revision if isinstance(asked, Written) else 0
            (found,) = self._server.apply([Get(keys, wait=FRESH_S, after=revision)])
        except RendezvousError:
            return  # the core's question has a deadline
        readings = []
        for entry in found.entries.values() if isinstance(found, Entries) else ():
            progress = decode_progress(entry.value)
            if progress is not None and progress.round == decision.round:
                answered = entry.revision > revision
                readings.append(ev.ProgressReading(progress.step, progress.step_time, answered))
        self._post(ev.ProgressReported(decision.number, tuple(readings)))

    # ---- what happened -------------------------------------------------------------------

    def note(self, event: MachineEvent) -> None:
        """Take in what has happened to a worker of the job, before its machine does."""
        match event:
            case ev.WorkerStarted() if event.worker in self._workers:
                self._workers[event.worker].pid = event.pid
            case ev.WorkerReady():
                self.tails.spoken = True
            case ev.WorkerStepped(round=round_id):  # the job goes on after what went wrong before
                self._show(self.tails.step_finished(round_id))
            case ev.WorkerExited():
                self._worker_exited(event)
            case _:
                pass

    def worker_exited_late(self, event: ev.WorkerExited) -> None:
        """Log the end of a worker of a job that is over; nothing else follows from it."""
        record = self._workers.pop(event.worker, None)
        if record is None:
            return
        reason = f"exit code {event.exit_code}, stopped with the job"
        place, detail = record.place, {"exit_code": event.exit_code, "expected": True}
        self._tell(
            Announce(
                "worker_exited",
                reason,
                record.round,
                place.host,
                place.slot,
                place.rank,
                record.pid,
                event.worker,
                {**detail},
            )
        )

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        """Note a worker's end, and clear the store of the worker."""
        record = self._workers.pop(event.worker, None)
        if record is None:
            return
        self._exit_codes = {event.worker: (event.exit_code, record.expected)}
        if not record.expected:  # the traceback of a stopped worker explains no failure
            self.tails.add(event, record.round)
        self._server.post([DeletePrefix(contract.worker_prefix(event.worker))])

    def note_check(self, event: MachineEvent) -> None:
        """Take in what has happened to an agent or a worker of a node check."""
        match event:
            case ev.WorkerExited(worker=worker):
                self._workers.pop(worker, None)
                self._server.post([DeletePrefix(contract.worker_prefix(worker))])
            case ev.AgentLost():
                self.agent_lost(event)
            case _:
                pass

    def was_told_to_stop(self, worker: str) -> bool:
        """Return True if the worker was ordered to stop."""
        return worker in self._workers and self._workers[worker].expected

    def agent_lost(self, event: ev.AgentLost) -> None:
        """Take in that an agent's process has ended, and its workers with it."""
        agent = (event.host, event.incarnation)
        if not event.ended:
            self._kill(*agent)
        elif self._agents.pop(agent, None) is not None:
            gone = [worker for worker, record in self._workers.items() if record.agent == agent]
            for worker in gone:
                del self._workers[worker]
            self._fence(*agent)
            if gone:
                self._server.post([DeletePrefix(contract.worker_prefix(w)) for w in gone])

    def _kill(self, host: str, incarnation: int) -> None:
        """End an agent at once: it must not go on beside its successor."""
        backend = self._backend_for(incarnation)
        if (host, incarnation) in self._agents and backend is not None:
            self._fence(host, incarnation)
            backend.kill(host, incarnation)

    def _fence(self, host: str, incarnation: int) -> None:
        """Refuse an agent from now on: one that was only cut off ends as soon as it is back."""
        self._server.post([DeletePrefix(contract.agent_prefix(host, incarnation), seal=True)])

    def lease_expired(self, key: str) -> ev.AgentLost | ev.WorkerLost | ev.WorkerSilent | None:
        """Return the event for an expired lease, and remove what it leaves in the store."""
        quiet = contract.worker_of_half_lease(key)
        if quiet is not None:
            half = f"it has not been heard of for {self._heartbeat_timeout / 2:g} s"
            return ev.WorkerSilent(quiet, half) if quiet in self._workers else None
        silent = f"not heard of for {self._heartbeat_timeout:g} s (--heartbeat-timeout)"
        agent = contract.agent_of_lease(key)
        if agent is not None:
            return ev.AgentLost(*agent, reason=silent, ended=False)
        worker = contract.worker_of_lease(key)
        if worker is not None:
            if worker not in self._workers:  # its end was reported before
                self._server.post([DeletePrefix(contract.worker_prefix(worker))])
            return ev.WorkerLost(worker, silent)
        return None

    def job_ended(self, end: EndJob) -> None:
        """Log and show the job's end, as the last event and lines."""
        if end.exit_code == 0:
            self._show(self.tails.job_succeeded())
        last, self._last_event = self._last_event, None
        name = _LAST_EVENTS[0] if end.exit_code == 0 else _LAST_EVENTS[1]
        self._tell(last or Announce(name, end.reason))
        self._reporter.job_ended(end.reason, end.failure, end.exit_code)

    def _announce(self, event: Announce) -> None:
        world = self._world
        if event.event in _LAST_EVENTS:
            self._last_event = event
        elif event.event == "round_completed" and world is not None and world.round == event.round:
            hosts = len({member.place.host for member in world.members})
            detail = {**event.detail, "size": world.size, "hosts": hosts}
            self._tell(replace(event, reason=world.reason, detail=detail))
        elif event.event == "worker_exited" and event.worker in self._exit_codes:
            code, expected = self._exit_codes[event.worker]
            detail = {**event.detail, "exit_code": code, "expected": expected}
            self._tell(replace(event, detail=detail))
        else:
            self._tell(event)

    def _tell(self, event: Announce) -> None:
        logged = self._log.append(
            event.event,
            round=event.round,
            host=event.host,
            slot=event.slot,
            rank=event.rank,
            pid=event.pid,
            worker=event.worker,
            reason=event.reason,
            **event.detail,
        )
        self._reporter.announced(event, logged.line)

    def _show(self, tracebacks: list[tuple[str, str]]) -> None:
        for worker, text in tracebacks:
            self._reporter.worker_raised(worker, text)
