"""Carries out the machines' decisions with the store, the backend and the record of the job.

Called by the driver's thread only, one decision after the other, in order. It counts each agent's
orders, and removes the keys of agents and workers from the store when they end. It decides nothing.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.job import decisions as do
from elastic_driver.job.events import AgentLost, LeaseExpired, ProgressReading, ProgressReported
from elastic_driver.job.workers import OCCUPYING
from elastic_driver.kernel.kernel import Handler
from elastic_driver.kernel.machine import ForMachine, kinds
from elastic_driver.kernel.services import (
    AdmitMembers,
    KeysRead,
    PublishKey,
    ReadKeys,
    SendEvent,
    ShowLine,
)
from elastic_driver.runtime.backend import (
    AdoptsAgents,
    Backend,
    OnLost,
    RefusedReason,
    UnreachableReason,
)
from elastic_driver.runtime.host_checks import HostChecks
from elastic_driver.runtime.job_record import JobRecord
from elastic_driver.runtime.journal.replay import ResumedRun
from elastic_driver.runtime.probes import HostProbes, Suspects
from elastic_driver.token_roles import RoundMembers
from elastic_driver.words import orders as doc
from elastic_driver.words import wire_events as ev
from elastic_driver.words.progress import decode_progress
from rendezvous import wire
from rendezvous.errors import RendezvousError
from rendezvous.server import RendezvousServer
from rendezvous.service import Results

# The host and the incarnation of an agent.
AgentKey: TypeAlias = tuple[str, int]

KEPT_ORDERS = 4096  # of one agent; it reads them as they come, and is never that far behind
FRESH_S = 0.1  # for the workers to report their progress when a boundary is to be named
# A notice with this step ends no round; it only makes every worker report its progress.
UNREACHABLE_STEP = 2**53
SEALED_ROUNDS = 64  # the newest rounds before the present one: no worker is in an older one


@dataclass(kw_only=True)
class Executor:
    """Carries out decisions."""

    server: RendezvousServer
    rounds: RoundMembers
    starter: Backend
    record: JobRecord
    checks: HostChecks | None
    suspects: Suspects
    post: Callable[[ForMachine], None]  # puts an event into the mailbox, from any thread
    orders: dict[AgentKey, int] = field(default_factory=dict)  # given to agents that live
    look_seconds: float = 0.0  # the machine's time for the last `KeysRead`
    _agent_of: dict[str, AgentKey] = field(default_factory=dict)  # of workers that live
    _awaited: set[AgentKey] = field(default_factory=set)  # of an earlier driver, not here yet
    _host_probes: HostProbes = field(init=False)

    def __post_init__(self) -> None:
        self._host_probes = HostProbes(self._probe_address, self.post)

    # ---- decisions -----------------------------------------------------------------------

    def handlers(self) -> dict[type[Any], Handler]:
        """Return what carries out each type of decision."""
        return {
            ReadKeys: self._read_keys,
            PublishKey: lambda d: self._set(d.key, d.value),
            AdmitMembers: lambda d: self.rounds.admit(d.round, d.members),
            SendEvent: lambda d: self.post(d.event),
            ShowLine: self._show_line,
            do.StartAgent: lambda d: self._start_agent(d.host, d.incarnation),
            do.StopAgent: self._stop_agent,
            do.KillAgent: lambda d: self._kill(d.host, d.incarnation),
            do.ProbeHosts: lambda d: self.server.spawn(self._host_probes.carry_out(d)),
            do.GiveOrder: lambda d: self._give((d.host, d.incarnation), d.order),
            do.ProbeAgent: self.suspects.probe,
            do.AwaitHeartbeats: self._await_heartbeats,
            do.PublishWorld: lambda d: self._publish_world(d.world),
            do.AskProgress: self._ask_progress,
            do.SealRound: lambda d: self._seal_rounds(d.round),
            **dict.fromkeys(kinds(do.Publish), self._publish),
            do.Announce: self.record.announce,
        }

    def shut_down_agents(self, grace: float, reason: str, *, interrupt: bool) -> None:
        """Order every agent to stop its workers and exit; `interrupt`: by SIGINT first."""
        for agent in self.orders:
            self._give(agent, doc.ShutdownOrder(grace, reason, interrupt))

    def _stop_agent(self, decision: do.StopAgent) -> None:
        agent = decision.host, decision.incarnation
        self._give(agent, doc.ShutdownOrder(decision.grace, decision.reason))

    def _publish(self, decision: do.Publish) -> None:
        self._set(*decision.entry())

    def _show_line(self, decision: ShowLine) -> None:
        if self.checks is not None:
            self.checks.say(decision.line)

    def _set(self, key: str, value: bytes) -> None:
        self.server.post([wire.Set(key, value)])

    def _delete(self, *prefixes: str, seal: bool = False) -> None:
        self.server.post([wire.DeletePrefix(prefix, seal=seal) for prefix in prefixes])

    def _seal_rounds(self, *rounds: int) -> None:
        self._delete(*map(contract.round_prefix, rounds), seal=True)
        self.rounds.seal(*rounds)

    def _start_agent(self, host: str, incarnation: int) -> None:
        self.orders[host, incarnation] = 0
        backend = self._backend_of(incarnation)
        if backend is not None:
            backend.start(host, incarnation, self._on_lost(host, incarnation))

    def _on_lost(self, host: str, incarnation: int) -> OnLost:
        def lost(reason: str) -> None:
            unreachable = isinstance(reason, UnreachableReason)
            refused = isinstance(reason, RefusedReason)
            self.post(AgentLost(host, incarnation, str(reason), unreachable, refused))

        return lost

    def _probe_address(self, host: str) -> tuple[str, int] | None:
        """Return the address to probe; not asked before: another package's backend may lack it."""
        return self.starter.probe_address(host)

    def _backend_of(self, incarnation: int) -> Backend | None:
        """Return the backend that starts an agent; None once its check is over."""
        if incarnation < contract.FIRST_OF_CHECKS:
            return self.starter
        return None if self.checks is None else self.checks.backend

    def _kill(self, host: str, incarnation: int) -> None:
        agent, backend = (host, incarnation), self._backend_of(incarnation)
        if agent not in self.orders or backend is None:
            return
        # An agent that was only cut off is refused from now on, and ends when it is back.
        self._delete(contract.agent_prefix(host, incarnation), seal=True)
        if agent in self._awaited:
            reason = "the driver that started it has ended, and it has not returned"
            self.post(AgentLost(host, incarnation, reason))
        else:
            backend.kill(host, incarnation)

    def _give(self, agent: AgentKey, order: doc.Order) -> None:
        if isinstance(order, doc.StartWorkerOrder):
            self._agent_of[order.worker] = agent
        if agent not in self.orders:
            return  # its process has ended meanwhile
        self.orders[agent] += 1
        number = self.orders[agent]
        key = contract.agent_order(*agent, number)
        operations: list[wire.Operation] = [wire.Set(key, doc.encode(order))]
        if number > KEPT_ORDERS:
            operations.append(wire.Delete(contract.agent_order(*agent, number - KEPT_ORDERS)))
        self.server.post(operations)

    def _await_heartbeats(self, decision: do.AwaitHeartbeats) -> None:
        keys = map(contract.worker_lease, decision.workers)
        self.server.post([wire.Set(key, b"", lease=decision.seconds) for key in keys])

    def _publish_world(self, world: doc.World) -> None:
        if world.gone:  # the machine knows the steps of when rounds began
            world = replace(world, gone=max(world.gone, self.record.ledger.step))
        self.rounds.publish(world.round, (member.worker for member in world.members))
        self._set(contract.JOB_WORLD, doc.encode_world(world))
        self.record.world_published(world)

    # ---- reading -------------------------------------------------------------------------

    def _read_keys(self, decision: ReadKeys) -> None:
        """Read keys, and post them as an event; the driver's thread does not wait for them."""
        looked = self.look_seconds

        def found(results: Results | None) -> None:
            entries = _entries_in(results)
            values = {key: (entry.value, entry.revision) for key, entry in entries.items()}
            seconds = time.monotonic() - began + looked
            self.post(KeysRead(decision.machine, decision.keys, values, seconds))

        began = time.monotonic()
        self.server.ask([wire.Get(decision.keys)], found)

    def read(self, keys: tuple[str, ...], found: Callable[[dict[str, wire.Entry]], None]) -> None:
        """Read keys; `found` gets what there is, in the server's thread."""
        with contextlib.suppress(RendezvousError):  # the server has just been stopped
            self.server.ask([wire.Get(keys)], lambda results: found(_entries_in(results)))

    def _ask_progress(self, decision: do.AskProgress) -> None:
        """Read the workers' progress, and post it as an event.

        A notice of a step that is never reached wakes every heartbeat thread, and their next
        heartbeats carry their progress: so the answers are milliseconds old. The core's question
        has a deadline, so a store that answers late holds nobody up.
        """
        notice = doc.Notice(decision.round, UNREACHABLE_STEP, decision.reason)
        keys = tuple(contract.worker_progress(worker) for worker in decision.workers)

        def asked(results: Results | None) -> None:
            written = results[0] if results else None
            revision = written.revision if isinstance(written, wire.Written) else 0
            question = wire.Get(keys, wait=FRESH_S, after=revision)
            with contextlib.suppress(RendezvousError):  # the server has just been stopped
                self.server.ask([question], partial(self._progress_found, decision, revision))

        self.server.ask([wire.Set(contract.JOB_NOTICE, doc.encode(notice))], asked)

    def _progress_found(
        self, question: do.AskProgress, revision: int, results: Results | None
    ) -> None:
        """Post the workers' progress; called by the server's thread."""
        readings = []
        for entry in _entries_in(results).values():
            progress = decode_progress(entry.value)
            if progress is not None and progress.round == question.round:
                at, answered = max(progress.step, 0) + progress.checks, entry.revision > revision
                seconds = progress.boundary_time
                if not seconds and progress.reported is None:
                    seconds = progress.step_time
                reading = ProgressReading(at, seconds, answered, progress.since)
                readings.append(reading)
        if results is not None:
            self.post(ProgressReported(question.number, tuple(readings)))

    # ---- events --------------------------------------------------------------------------

    def followers(self) -> dict[type[Any], Handler]:
        """Return what follows from events themselves: agents and workers that end are forgotten."""
        return {
            AgentLost: lambda e: self._agent_lost(e.host, e.incarnation),
            ev.AgentReturned: self._adopt,
            ev.WorkerExited: self._worker_exited,
            LeaseExpired: self._lease_expired,
        }

    def _worker_exited(self, event: ev.WorkerExited) -> None:
        self._delete(contract.worker_prefix(event.worker))
        self._agent_of.pop(event.worker, None)

    def _lease_expired(self, event: LeaseExpired) -> None:
        if event.kind == "worker":
            self._delete(contract.worker_prefix(event.owner))

    def _agent_lost(self, host: str, incarnation: int) -> None:
        agent = (host, incarnation)
        if self.orders.pop(agent, None) is None:
            return
        self._delete(contract.agent_prefix(host, incarnation), seal=True)
        workers = [worker for worker, its in self._agent_of.items() if its == agent]
        for worker in workers:
            del self._agent_of[worker]
        if workers:
            self._delete(*map(contract.worker_prefix, workers))

    def _adopt(self, event: ev.AgentReturned) -> None:
        """Take over an agent that an earlier driver has started."""
        agent = event.host, event.incarnation
        if agent in self.orders and agent not in self._awaited:
            return  # the event has come twice
        self._awaited.discard(agent)
        self.orders.setdefault(agent, 0)
        if isinstance(self.starter, AdoptsAgents):
            self.starter.adopt(*agent, event.pid, self._on_lost(*agent))

    # ---- the run of an earlier driver ----------------------------------------------------

    def resume(self, run: ResumedRun) -> None:
        """Know again what the driver before this one knew; nothing is shown or logged again."""
        job = run.job
        self.orders = {(host, agent.incarnation): 0 for host, agent in job.fleet.agents.items()}
        self._awaited = set(self.orders)
        for worker in job.workers.having(*OCCUPYING):
            if (agent := job.fleet.agents.get(worker.host)) is not None:
                self._agent_of[worker.id] = worker.host, agent.incarnation
        self.record.resume(run)
        over = range(max(1, job.rounds.current.number - SEALED_ROUNDS), job.rounds.current.number)
        lost = (contract.agent_prefix(*agent) for agent in job.fleet.given_up.items())
        self._seal_rounds(*over)
        self._delete(*lost, seal=True)


def _entries_in(results: Results | None) -> dict[str, wire.Entry]:
    """Return the entries that a `Get` has found; none if the server was stopped."""
    found = results[0] if results else None
    return found.entries if isinstance(found, wire.Entries) else {}
