"""One check of some nodes, from the start of their agents to the report (a `Machine`).

In each round that `check.NodeCheck` plans, the processes of a group meet through the rendezvous,
run `worker.nodecheck.task` and report. A task that fails, falls silent or runs out of time has
failed; `NodeCheck` decides what that means. A process stays for the tasks of later rounds, unless
it failed. Agents, workers and tasks of a check have numbers from `contract.FIRST_OF_CHECKS`
on, so that they never meet those of the job.

Pure. Times are monotonic seconds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.core.decisions import (
    CausedDecision,
    GiveOrder,
    KillAgent,
    SealRound,
    StartAgent,
    StopAgent,
)
from elastic_driver.core.documents import StartWorkerOrder, StopWorkerOrder
from elastic_driver.core.events import (
    AgentLost,
    AgentReady,
    Event,
    LeaseExpired,
    WorkerExited,
    WorkerReady,
)
from elastic_driver.core.rules.ranks import Seat, assign
from elastic_driver.policies.messages import KeysRead, PublishKey, ReadKeys, ShowLine
from elastic_driver.policies.nodecheck.check import (
    Group,
    Measurement,
    NodeCheck,
    NodeVerdict,
    failed,
)
from elastic_driver.policies.nodecheck.gate import StartingGate
from elastic_driver.policies.nodecheck.messages import (
    Assignment,
    TaskEnded,
    TaskResult,
    assignment_key,
    go_key,
    result_key,
)
from elastic_driver.policies.nodecheck.report import CheckReport

STOP_S = 10.0  # for an agent to report the end of a process that is killed
SHUTDOWN_S = 5.0  # for agents to end by themselves
TASKS_OF_A_CHECK = 10**6
_LAST_WORDS_CHARS = 200


class CheckLimits(Struct, frozen=True, kw_only=True):
    """The settings of a check's verdicts, and its timeouts."""

    stragglers: bool = True  # look for slow nodes too
    start_timeout: float = 60.0  # for an agent to come up
    task_timeout: float = 120.0  # for the task of one round, with its start
    task: str = ""  # names the task: times of the same task can be compared


class CheckEnded(CausedDecision, frozen=True, tag="check_ended"):
    """The check is over; `report` has its results."""

    report: CheckReport
    reason: str


CheckDecision = (
    StartAgent | StopAgent | KillAgent | GiveOrder | PublishKey | ReadKeys | SealRound | ShowLine
) | CheckEnded


class Phase(str, Enum):
    """The phases of a check."""

    STARTING = "starting"  # waits for the agents
    GATHERING = "gathering"  # waits until the processes of a round are up
    MEASURING = "measuring"
    STOPPING = "stopping"  # waits for the processes that ran out of time
    CLOSING = "closing"  # waits for the agents' end
    OVER = "over"


@dataclass(slots=True)
class _Process:
    """One process in one task."""

    worker: str
    host: str
    slot: int
    done: int = 0  # tasks before this one
    result: TaskResult | None = None
    failure: str = ""
    ended: bool = False  # this task, or the process itself


@dataclass(slots=True)
class _GroupTask:
    """The task of one group in one round."""

    number: int
    group: Group
    processes: dict[str, _Process] = field(default_factory=dict)  # by worker

    def measurement(self, host: str) -> Measurement:
        """Return a host's measurement: it is as slow as its slowest process, and fails with any."""
        own = [process for process in self.processes.values() if process.host == host]
        failure = next((process.failure for process in own if process.failure), "")
        results = [process.result for process in own if process.result is not None]
        if failure or not results:
            return failed(host, failure or "it was not started")
        return Measurement(
            host,
            max(r.compute for r in results),
            max(r.network for r in results),
            bandwidth=min((r.bandwidth for r in results if r.bandwidth is not None), default=None),
            latency=max((r.latency for r in results if r.latency is not None), default=None),
            linked=all(r.linked for r in results),
        )


class NodeChecker:
    """Checks nodes; the first `Tick` begins.

    Args:
        hosts: (host, processes): as many processes as the host has devices to check.
        number: of this check in its run, from 0.
        limits: how to judge, and how long to wait.
        known: verdicts of earlier checks of the same cluster.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        *,
        number: int,
        limits: CheckLimits,
        known: Sequence[NodeVerdict] = (),
    ) -> None:
        self._slots = dict(hosts)
        self._limits = limits
        self._check = NodeCheck(tuple(self._slots), stragglers=limits.stragglers, known=known)
        self._incarnation = contract.FIRST_OF_CHECKS + number
        self._last_task = contract.FIRST_OF_CHECKS + number * TASKS_OF_A_CHECK
        self._phase = Phase.STARTING
        self._agents: dict[str, AgentReady] = {}  # that are up and do as they are told
        self._awaited = set(self._slots)  # hosts whose agents are to come up
        self._running: set[str] = set()  # hosts whose agent's process has not ended
        self._tasks: tuple[_GroupTask, ...] = ()  # of this round
        self._waiting: dict[tuple[str, int], _Process] = {}  # (host, slot): for its next task
        self._reading: set[str] = set()  # keys of results
        self._gate = StartingGate(())
        self._due: float | None = None
        self._began: float | None = None
        self._measuring_since = 0.0
        self._task_seconds = 0.0
        self._out: list[CheckDecision] = []

    # ---- the door ------------------------------------------------------------------------

    def handle(self, event: Event | TaskEnded | KeysRead, now: float) -> list[CheckDecision]:
        """Take in what agents and tasks report, and the time."""
        if self._began is None:
            self._begin(now)
        match event:
            case AgentReady(host=host) if host in self._slots:
                self._agents[host] = event
                self._awaited.discard(host)
            case AgentLost(host=host, reason=reason):
                self._running.discard(host)
                self._agent_lost(host, reason)
            case LeaseExpired(kind="agent"):
                self._agent_lost(event.agent[0], event.reason)
            case WorkerReady(worker=worker):
                self._gate.passed(worker, now)
            case WorkerExited():
                self._exited(event)
            case TaskEnded():
                self._task_ended(event)
            case KeysRead():
                self._results_read(event)
            case _:
                pass
        while self._advance(now):
            pass
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """See `Machine.deadline`."""
        if self._phase is Phase.GATHERING and self._gate.opens_at is not None:
            return min(self._gate.opens_at, self._due or self._gate.opens_at)
        return self._due

    def check(self) -> list[str]:
        """See `Machine.check`."""
        wrong = [f"{host} is up but was given up" for host in self._agents.keys() - self._running]
        if self._phase is not Phase.OVER and self._began is not None and self._due is None:
            wrong.append(f"the check is {self._phase.value} without a deadline")
        return wrong

    def snapshot(self) -> bytes:
        """See `Machine.snapshot`."""
        agents = sorted(self._agents)
        return msgspec.json.encode((self._phase, agents, self._last_task, self._check.verdicts()))

    def report(self, now: float) -> CheckReport:
        """Return what is known so far."""
        return CheckReport(
            state="done" if self._phase is Phase.OVER else "checking",
            rounds=len(self._check.rounds),
            seconds=now - (now if self._began is None else self._began),
            task_seconds=self._task_seconds,
            nodes=self._check.verdicts(),
            task=self._limits.task,
        )

    # ---- phases --------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self._began, self._due = now, now + self._limits.start_timeout
        for host, slots in self._slots.items():
            self._running.add(host)
            self._out.append(StartAgent(host, self._incarnation, slots, "the node is checked"))

    def _advance(self, now: float) -> bool:
        """Go on to the next phase, if it is time; return whether it was."""
        late = self._due is not None and now >= self._due
        match self._phase:
            case Phase.STARTING if late or not self._awaited:
                self._agents_are_up(now)
            case Phase.GATHERING if late or self._is_gate_open(now):
                self._measure(now)
            case Phase.MEASURING if late or self._is_round_over():
                self._task_seconds += now - self._measuring_since
                for task in self._tasks:
                    within = f"within {self._limits.task_timeout:g} s (--check-timeout)"
                    self._stop(task, f"not done {within}")
                self._phase, self._due = Phase.STOPPING, now + STOP_S
            case Phase.STOPPING if late or self._is_round_over():
                self._end_round(now)
            case Phase.CLOSING if late or not self._running:
                self._end(now)
            case _:
                return False
        return True

    def _agents_are_up(self, now: float) -> None:
        within = f"within {self._limits.start_timeout:g} s (--start-timeout)"
        for host in sorted(self._awaited, key=list(self._slots).index):
            self._give_up(host, f"its agent did not come up {within}")
        self._show(f"agents are up on {len(self._agents)} of {len(self._slots)} nodes", now)
        self._next_round(now)

    def _next_round(self, now: float) -> None:
        groups = self._check.plan()
        if not groups:
            for host in self._running:
                stop = StopAgent(host, self._incarnation, 0.0, "the node check is over")
                self._out.append(stop)
            self._phase, self._due = Phase.CLOSING, now + SHUTDOWN_S
            return
        nodes, number = sum(map(len, groups)), len(self._check.rounds) + 1
        self._show(f"round {number}, {nodes} nodes in {len(groups)} groups", now)
        self._tasks = tuple(self._new_task(group) for group in groups)
        self._gate = StartingGate(process.worker for _, process in self._processes())
        for task in self._tasks:
            self._start(task)
        self._phase, self._due = Phase.GATHERING, now + self._limits.task_timeout

    def _measure(self, now: float) -> None:
        """Let all processes measure at once, so that none times how another one starts."""
        self._show("measuring", now)
        for task in self._tasks:
            self._out.append(PublishKey(go_key(task.number), b"", "all are up"))
        self._phase, self._measuring_since = Phase.MEASURING, now

    def _is_gate_open(self, now: float) -> bool:
        for _, process in self._processes():
            if process.ended:
                self._gate.passed(process.worker, now)
        return self._gate.is_open(now)

    def _is_round_over(self) -> bool:
        return not self._reading and all(process.ended for _, process in self._processes())

    def _end_round(self, now: float) -> None:
        for _, process in self._processes():
            if not process.ended:
                process.failure = process.failure or "it does not end"
                self._give_up(process.host, "its agent does not end a task")
        self._reading.clear()
        for task in self._tasks:
            self._out.append(SealRound(task.number, "the round of the node check is over"))
        self._check.report([task.measurement(host) for task in self._tasks for host in task.group])
        self._tasks = ()
        self._next_round(now)

    def _end(self, now: float) -> None:
        for host in self._running:
            self._out.append(KillAgent(host, self._incarnation, "it has not ended by itself"))
        self._running.clear()
        self._agents.clear()
        self._phase, self._due = Phase.OVER, None
        self._out.append(CheckEnded(self.report(now), "the check is over"))

    # ---- tasks ---------------------------------------------------------------------------

    def _processes(self) -> Iterator[tuple[_GroupTask, _Process]]:
        for task in self._tasks:
            for process in task.processes.values():
                yield task, process

    def _new_task(self, group: Group) -> _GroupTask:
        self._last_task += 1
        task = _GroupTask(self._last_task, group)
        for host in group:
            for slot in range(self._slots[host]):
                before = self._waiting.get((host, slot))
                if before is None:
                    worker = contract.worker_id(host, slot, task.number)
                    task.processes[worker] = _Process(worker, host, slot)
                else:
                    worker, done = before.worker, before.done + 1
                    task.processes[worker] = _Process(worker, host, slot, done)
        return task

    def _start(self, task: _GroupTask) -> None:
        """Start the task's processes; those that wait from a round before are assigned to it."""
        ages = {host: age for age, host in enumerate(task.group)}
        seats = [
            Seat(process.worker, process.host, process.slot, (False, ages[process.host]))
            for process in task.processes.values()
        ]
        first = self._agents.get(task.group[0])
        address = first.address if first is not None else "127.0.0.1"
        port = first.ports[0] if first is not None and first.ports else 0
        for worker, place in assign(seats):
            process = task.processes[worker]
            if self._waiting.pop((place.host, place.slot), None) is None:
                order = StartWorkerOrder(worker, place, task.number, 0, address, port)
                self._order(place.host, order, "its node is checked")
            else:
                given = Assignment(
                    task=task.number, rank=place.rank, size=place.size, node=place.node_rank
                )
                key = assignment_key(worker, process.done)
                self._out.append(PublishKey(key, msgspec.json.encode(given), "a further round"))
        for process in task.processes.values():
            if process.host not in self._agents:
                self._failed(task, process, "its agent was lost")

    def _order(self, host: str, order: StartWorkerOrder | StopWorkerOrder, reason: str) -> None:
        if host in self._agents:
            self._out.append(GiveOrder(host, self._incarnation, order, reason))

    def _failed(self, task: _GroupTask, process: _Process, reason: str) -> None:
        """Note that a process has failed, and stop its partners: nobody waits for it in vain."""
        process.failure = process.failure or reason
        if process.host not in self._agents:
            process.ended = True
        self._stop(task, f"stopped: {process.host} failed")

    def _stop(self, task: _GroupTask, reason: str) -> None:
        for process in task.processes.values():
            if not process.ended and not process.failure:
                process.failure = reason
                self._order(process.host, StopWorkerOrder(process.worker, 0.0, reason), reason)

    # ---- what is reported ----------------------------------------------------------------

    def _unfinished(self, worker: str) -> Iterable[tuple[_GroupTask, _Process]]:
        """The task and process of this name, if it has not ended yet."""
        found = ((task, task.processes.get(worker)) for task in self._tasks)
        return [(task, p) for task, p in found if p is not None and not p.ended]

    def _task_ended(self, event: TaskEnded) -> None:
        for task, process in self._unfinished(event.worker):
            if task.number == event.task:
                process.ended = True
                if not process.failure:
                    self._waiting[process.host, process.slot] = process
                    self._read_result(task, process)

    def _exited(self, event: WorkerExited) -> None:
        self._waiting = {k: p for k, p in self._waiting.items() if p.worker != event.worker}
        for task, process in self._unfinished(event.worker):
            process.ended = True
            if event.exit_code:
                self._failed(task, process, _last_words(event))
            elif not process.failure:
                self._read_result(task, process)

    def _read_result(self, task: _GroupTask, process: _Process) -> None:
        key = result_key(task.number, process.worker)
        self._reading.add(key)
        self._out.append(ReadKeys("check", (key,), f"{process.worker} has ended its task"))

    def _results_read(self, event: KeysRead) -> None:
        self._reading.difference_update(event.keys)
        for task, process in self._processes():
            key = result_key(task.number, process.worker)
            if key not in event.keys or process.failure:
                continue
            written, _ = event.entries.get(key, (b"", 0))
            try:
                process.result = msgspec.json.decode(written, type=TaskResult)
            except msgspec.DecodeError:
                self._failed(task, process, "it ended without a usable result")

    def _agent_lost(self, host: str, reason: str) -> None:
        self._give_up(host, reason)
        for task, process in self._processes():
            if process.host == host and not process.ended:
                process.ended = True
                self._failed(task, process, "its agent was lost")

    def _give_up(self, host: str, reason: str) -> None:
        """Use a host's agent no more; its node has failed the check, unless that is over."""
        if host not in self._slots or self._phase in (Phase.CLOSING, Phase.OVER):
            self._agents.pop(host, None)
            return
        self._check.give_up(host, reason)
        self._awaited.discard(host)
        self._agents.pop(host, None)
        if host in self._running:
            self._running.discard(host)
            self._out.append(KillAgent(host, self._incarnation, reason))

    def _show(self, what: str, now: float) -> None:
        seconds = now - (now if self._began is None else self._began)
        self._out.append(ShowLine(f"node check: {what}, after {seconds:.1f} s", "for people"))


def _last_words(event: WorkerExited) -> str:
    """Return a process's exit status and the last line of its traceback."""
    code = event.exit_code
    what = f"exit code {code}" if code > 0 else f"signal {-code}"
    lines = [line.strip() for line in event.log_tail.splitlines() if line.strip()]
    return f"{what}: {lines[-1][:_LAST_WORDS_CHARS]}" if lines else what
