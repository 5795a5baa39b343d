"""One check of some nodes, from the start of their agents to the report (a `Machine`).

In each round that `check.NodeCheck` plans, the processes of a group meet through the rendezvous,
run `features.checks.worker.measure` and report. A task that fails, falls silent or runs out of time
has failed; `NodeCheck` decides what that means. A process stays for the tasks of later rounds,
unless it failed. Agents, workers and tasks of a check have numbers from `contract.FIRST_OF_CHECKS`
on, so that they differ from those of the job.

Pure. Times are monotonic seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.features.checks import messages
from elastic_driver.features.checks.evidence import Group, NodeCheck, NodeVerdict
from elastic_driver.features.checks.report import CheckReport, shown_times
from elastic_driver.features.checks.tasks import GroupTask, Process, StartingGate
from elastic_driver.job import decisions as do
from elastic_driver.job.events import AgentLost, LeaseExpired, Tick
from elastic_driver.job.ranks import Seat, assign
from elastic_driver.kernel.machine import CausedDecision, Declaration
from elastic_driver.kernel.services import AdmitMembers, KeysRead, PublishKey, ReadKeys, ShowLine
from elastic_driver.kernel.tables import Snapshots, Tables, make, saved, set_defaults, table
from elastic_driver.words import counted
from elastic_driver.words import wire_events as ev
from elastic_driver.words.orders import StartWorkerOrder, StopWorkerOrder
from rendezvous.wire import UNREADABLE

STOP_S = 10.0  # for an agent to report the end of a process that is killed
SHUTDOWN_S = 5.0  # for agents to end by themselves
TASKS_OF_A_CHECK = 10**6
_LAST_WORDS_CHARS = 200


class CheckLimits(Struct, frozen=True, kw_only=True):
    """The timeouts of a check."""

    start_timeout: float = 60.0  # for an agent to come up
    task_timeout: float = 120.0  # for the task of one round, with its start


class CheckEnded(CausedDecision, frozen=True, tag="check_ended"):
    """The check is over; `report` has its results."""

    report: CheckReport
    reason: str


CheckEvent: TypeAlias = (
    ev.AgentEvent | ev.WorkerReport | LeaseExpired | Tick | messages.TaskEnded | KeysRead
)
CheckDecision: TypeAlias = (
    do.StartAgent | do.StopAgent | do.KillAgent | do.GiveOrder | do.SealRound | PublishKey
) | (AdmitMembers | ReadKeys | ShowLine | CheckEnded)


class Phase(str, Enum):
    """The phases of a check."""

    STARTING = "starting"  # waits for the agents
    GATHERING = "gathering"  # waits until the processes of a round are up
    MEASURING = "measuring"
    STOPPING = "stopping"  # waits for the processes that ran out of time
    CLOSING = "closing"  # waits for the agents' end
    OVER = "over"


class _Waiting(NamedTuple):
    """A process that waits for its next task."""

    worker: str
    done: int  # tasks so far


@dataclass(init=False)
class NodeChecker(Snapshots):
    """Checks nodes; the first `Tick` begins.

    Args:
        hosts: (host, processes); a process for each device of the host that is to be checked.
        number: of this check in its run, from 0.
        limits: how long to wait.
        task: describes the task; times of the same task can be compared.
        known: verdicts of earlier checks of the same cluster.
    """

    _slots: dict[str, int] = saved(factory=dict, name="slots")
    _limits: CheckLimits = saved(name="limits")
    _task: str = saved("", name="task")
    _incarnation: int = saved(0, name="incarnation")
    _last_task: int = saved(0, name="last_task")
    _phase: Phase = saved(Phase.STARTING, name="phase")
    _agents: dict[str, ev.AgentReady] = saved(factory=dict, name="agents")  # that are up, by host
    # Hosts whose agent's process has not ended.
    _running: dict[str, None] = saved(factory=dict, name="running")
    _tasks: dict[int, GroupTask] = saved(factory=dict, name="tasks")  # of this round, by number
    # By (host, slot).
    _waiting: dict[tuple[str, int], _Waiting] = saved(factory=dict, name="waiting")
    _reading: dict[str, str] = saved(factory=dict, name="reading")  # key of a result → worker
    _due: float | None = saved(None, name="due")
    _began: float | None = saved(None, name="began")
    _measuring_since: float = saved(0.0, name="measuring_since")
    _task_seconds: float = saved(0.0, name="task_seconds")
    _processes: dict[str, Process] = field(default_factory=dict)  # of this round, by worker
    _gate: StartingGate = field(default_factory=lambda: StartingGate(()))
    _out: list[CheckDecision] = field(default_factory=list)

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        *,
        number: int,
        limits: CheckLimits,
        task: str = "",
        known: Sequence[NodeVerdict] = (),
    ) -> None:
        set_defaults(self)
        self._slots = dict(hosts)
        self._limits, self._task = limits, task
        self._check = NodeCheck(tuple(self._slots), known=known)
        self._incarnation = contract.FIRST_OF_CHECKS + number
        self._last_task = contract.FIRST_OF_CHECKS + number * TASKS_OF_A_CHECK

    def tables(self) -> Tables:
        """See `Snapshots.tables`."""
        return {"": table(self), "check": table(self._check), "gate": table(self._gate)}

    @classmethod
    def from_tables(cls, found: Tables) -> "NodeChecker":
        """See `Snapshots.from_tables`."""
        checker = make(cls, found[""])
        checker._check = make(NodeCheck, found["check"])
        checker._gate = make(StartingGate, found["gate"])
        checker._processes = {p.worker: p for t in checker._tasks.values() for p in t.processes}
        return checker

    # ---- a machine's methods -------------------------------------------------------------

    def handle(self, event: CheckEvent, now: float) -> list[CheckDecision]:
        """Take in what agents and tasks report, and the time."""
        if self._began is None:
            self._began, self._due = now, now + self._limits.start_timeout
            self._running = dict.fromkeys(self._slots)
            for host, slots in self._slots.items():
                start = do.StartAgent(host, self._incarnation, slots, "the node is checked")
                self._out.append(start)
        match event:
            case ev.AgentReady(host=host) if host in self._running:
                self._agents[host] = event
            case AgentLost(host=host, reason=reason):
                self._running.pop(host, None)
                self._agent_lost(host, reason)
            case LeaseExpired(kind="agent"):
                self._agent_lost(event.agent[0], event.reason)
            case ev.WorkerReady(worker=worker):
                self._gate.passed(worker, now)
            case ev.WorkerExited():
                self._exited(event)
            case messages.TaskEnded():
                self._task_ended(event)
            case KeysRead():
                self._results_read(event)
        while self._advance(now):
            pass
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """See `Machine.deadline`."""
        opens = self._gate.opens_at if self._phase is Phase.GATHERING else None
        return min((at for at in (opens, self._due) if at is not None), default=None)

    def check(self) -> list[str]:
        """See `Machine.check`."""
        wrong = [
            f"{host} is up but was given up" for host in self._agents.keys() - self._running.keys()
        ]
        if self._phase is not Phase.OVER and self._began is not None and self._due is None:
            wrong.append(f"the check is {self._phase.value} without a deadline")
        return wrong

    def report(self, now: float) -> CheckReport:
        """Return the report of what is known so far."""
        return CheckReport(
            state="done" if self._phase is Phase.OVER else "checking",
            rounds=len(self._check.rounds),
            seconds=self._seconds(now),
            task_seconds=self._task_seconds,
            nodes=self._check.verdicts(),
            task=self._task,
        )

    # ---- phases --------------------------------------------------------------------------

    def _advance(self, now: float) -> bool:
        """Go on to the next phase, if it is time; return whether it was."""
        late = self._due is not None and now >= self._due
        match self._phase:
            case Phase.STARTING if late or len(self._agents) == len(self._running):
                within = f"within {self._limits.start_timeout:g} s (--start-timeout)"
                missing = self._running.keys() - self._agents.keys()
                for host in [host for host in self._slots if host in missing]:
                    self._give_up(host, f"its agent did not come up {within}")
                of = counted(len(self._slots), "node")
                self._show(f"agents are up on {len(self._agents)} of {of}", now)
                self._next_round(now)
            case Phase.GATHERING if late or self._is_gate_open(now):
                # All begin at once: the start of one would disturb the times of another.
                self._show("measuring", now)
                for task in self._tasks.values():
                    self._out.append(PublishKey(messages.go_key(task.number), b"", "all are up"))
                self._phase, self._measuring_since = Phase.MEASURING, now
            case Phase.MEASURING if late or self._is_round_over():
                self._task_seconds += now - self._measuring_since
                within = f"within {self._limits.task_timeout:g} s (--check-timeout)"
                for task in self._tasks.values():
                    self._stop(task, f"not done {within}")
                self._phase, self._due = Phase.STOPPING, now + STOP_S
            case Phase.STOPPING if late or self._is_round_over():
                self._end_round(now)
                self._next_round(now)
            case Phase.CLOSING if late or not self._running:
                why = "it has not ended by itself"
                self._out += [do.KillAgent(h, self._incarnation, why) for h in self._running]
                self._running.clear()
                self._agents.clear()
                self._phase, self._due = Phase.OVER, None
                self._out.append(CheckEnded(self.report(now), "the check is over"))
            case _:
                return False
        return True

    def _is_gate_open(self, now: float) -> bool:
        for process in self._processes.values():
            if process.ended:
                self._gate.passed(process.worker, now)
        return self._gate.is_open(now)

    def _is_round_over(self) -> bool:
        return not self._reading and all(p.ended for p in self._processes.values())

    def _end_round(self, now: float) -> None:
        for process in self._processes.values():
            if not process.ended:
                process.failure = process.failure or "it does not end"
                self._give_up(process.host, "its agent does not end a task")
        for task in self._tasks.values():
            self._out.append(do.SealRound(task.number, "the round of the node check is over"))
        measured = [
            [task.measurement(host) for host in task.group] for task in self._tasks.values()
        ]
        for group in measured:
            self._show(f"measured {'; '.join(map(shown_times, group))}", now)
        self._check.report(chain.from_iterable(measured))
        self._reading.clear()
        self._tasks, self._processes = {}, {}

    def _next_round(self, now: float) -> None:
        """Start the tasks of the next round, or let the agents end if there is none."""
        groups = self._check.plan()
        if not groups:
            why = "the node check is over"
            self._out += [do.StopAgent(h, self._incarnation, 0.0, why) for h in self._running]
            self._phase, self._due = Phase.CLOSING, now + SHUTDOWN_S
            return
        nodes, number = sum(map(len, groups)), len(self._check.rounds) + 1
        self._show(
            f"round {number}, {counted(nodes, 'node')} in {counted(len(groups), 'group')}", now
        )
        made = [self._new_task(group) for group in groups]
        self._tasks = {task.number: task for task in made}
        self._processes = {p.worker: p for task in made for p in task.processes}
        self._gate = StartingGate(self._processes)
        for task in self._tasks.values():
            self._start(task)
        self._phase, self._due = Phase.GATHERING, now + self._limits.task_timeout

    # ---- tasks ---------------------------------------------------------------------------

    def _new_task(self, group: Group) -> GroupTask:
        self._last_task += 1
        task = GroupTask(self._last_task, group)
        for host in group:
            for slot in range(self._slots[host]):
                before = self._waiting.get((host, slot))
                done = 0 if before is None else before.done + 1
                worker = contract.worker_id(host, slot, task.number)
                worker = worker if before is None else before.worker
                task.processes.append(Process(worker, host, slot, task.number, done))
        return task

    def _start(self, task: GroupTask) -> None:
        """Start the task's processes; those that wait since an earlier round get an assignment."""
        first = self._agents.get(task.group[0])
        address = first.address if first is not None else "127.0.0.1"
        port = first.ports[0] if first is not None and first.ports else 0
        ages = {host: (False, age) for age, host in enumerate(task.group)}
        seats = (Seat(p.worker, p.host, p.slot, ages[p.host]) for p in task.processes)
        members = tuple(process.worker for process in task.processes)
        self._out.append(AdmitMembers(task.number, members, "they meet in this task"))
        for worker, place in assign(seats):
            if self._waiting.pop((place.host, place.slot), None) is None:
                order = StartWorkerOrder(worker, place, task.number, 0, address, port)
                self._order(place.host, order, "its node is checked")
            else:
                given = messages.Assignment(
                    task=task.number, rank=place.rank, size=place.size, node=place.node_rank
                )
                key = messages.assignment_key(worker, self._processes[worker].done)
                self._out.append(PublishKey(key, msgspec.json.encode(given), "a further round"))
        for process in task.processes:
            if process.host not in self._agents:
                self._failed(process, "its agent was lost")

    def _order(self, host: str, order: StartWorkerOrder | StopWorkerOrder, reason: str) -> None:
        if host in self._agents:
            self._out.append(do.GiveOrder(host, self._incarnation, order, reason))

    def _failed(self, process: Process, reason: str) -> None:
        """Record that a process has failed, and stop its partners, which would wait in vain."""
        process.failure = process.failure or reason
        if process.host not in self._agents:
            process.ended = True
        self._stop(self._tasks[process.task], f"stopped: {process.host} failed")

    def _stop(self, task: GroupTask, reason: str) -> None:
        for process in task.processes:
            if not process.ended and not process.failure:
                process.failure = reason
                self._order(process.host, StopWorkerOrder(process.worker, 0.0, reason), reason)

    # ---- reports -------------------------------------------------------------------------

    def _task_ended(self, event: messages.TaskEnded) -> None:
        process = self._processes.get(event.worker)
        if process is None or process.ended or process.task != event.task:
            return
        process.ended = True
        if not process.failure:
            self._waiting[process.host, process.slot] = _Waiting(process.worker, process.done)
            self._read_result(process)

    def _exited(self, event: ev.WorkerExited) -> None:
        self._waiting = {k: p for k, p in self._waiting.items() if p.worker != event.worker}
        process = self._processes.get(event.worker)
        if process is None or process.ended:
            return
        process.ended = True
        if event.exit_code:
            self._failed(process, _last_words(event))
        elif not process.failure:
            self._read_result(process)

    def _read_result(self, process: Process) -> None:
        key = messages.result_key(process.task, process.worker)
        self._reading[key] = process.worker
        self._out.append(ReadKeys("check", (key,), f"{process.worker} has ended its task"))

    def _results_read(self, event: KeysRead) -> None:
        for key in event.keys:
            process = self._processes.get(self._reading.pop(key, ""))
            if process is None or process.failure:
                continue
            written, _ = event.entries.get(key, (b"", 0))
            try:
                process.result = msgspec.json.decode(written, type=messages.TaskResult)
            except UNREADABLE:
                self._failed(process, "it ended without a usable result")

    def _agent_lost(self, host: str, reason: str) -> None:
        self._give_up(host, reason)
        for process in self._processes.values():
            if process.host == host and not process.ended:
                self._failed(process, "its agent was lost")

    def _give_up(self, host: str, reason: str) -> None:
        """Use a host's agent no more; its node has failed the check, unless the check is over."""
        self._agents.pop(host, None)
        if host not in self._slots or self._phase in (Phase.CLOSING, Phase.OVER):
            return
        self._check.give_up(host, reason)
        if host in self._running:
            self._running.pop(host, None)
            self._out.append(do.KillAgent(host, self._incarnation, reason))

    # ---- for people ----------------------------------------------------------------------

    def _seconds(self, now: float) -> float:
        """Return how long the check has taken."""
        return 0.0 if self._began is None else now - self._began

    def _show(self, what: str, now: float) -> None:
        line = f"node check: {what}, after {self._seconds(now):.1f} s"
        self._out.append(ShowLine(line, "for people"))


def _last_words(event: ev.WorkerExited) -> str:
    """Return a process's exit status and the last line of its traceback."""
    code = event.exit_code
    what = f"exit code {code}" if code > 0 else f"signal {-code}"
    lines = [line.strip() for line in event.log_tail.splitlines() if line.strip()]
    return f"{what}: {lines[-1][:_LAST_WORDS_CHARS]}" if lines else what


MACHINES = (
    Declaration(
        name="check",
        kind=NodeChecker,
        events=CheckEvent,
        decisions=CheckDecision,
    ),
)
ENDS = (CheckEnded,)
REPORTED = (messages.TaskEnded,)
