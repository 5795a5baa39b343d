"""Checks nodes before a job trains on them: runs the tasks that `policies.nodecheck.check` plans.

`elasticrun --network-check` runs one before the driver starts, `elasticctl check` without a job.
Agents are started on all hosts; each round, the processes of a group meet through the
rendezvous, run `worker.nodecheck.task` and report. A task that fails, falls silent or runs out of
time
is a failed one; what that means is decided in the core. Times are seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.core.documents import JobSpec, StartWorkerOrder, StopWorkerOrder
from elastic_driver.core.events import AgentLost, AgentReady, WorkerExited, WorkerReady
from elastic_driver.core.rules.ranks import Seat, assign
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
    TaskSettings,
    go_key,
    result_key,
)
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.runtime.backend import MakeBackend
from elastic_driver.runtime.check_fleet import CheckFleet, News
from elastic_driver.runtime.host_lists import Hosts
from elastic_driver.runtime.run_dir import RunDir

PACKAGES = Path(__file__).resolve().parents[2]
TASK = (sys.executable, "-m", "elastic_driver.worker.nodecheck.serve")
# What it imports, and the model's part, which takes as long again.
PRELOAD = ("elastic_driver.worker.nodecheck.task",)
PRELOAD_MODEL = (*PRELOAD, "torch._dynamo")
STOP_S = 10.0  # for an agent to report the end of a process that is killed
_LAST_WORDS_CHARS = 200


class CheckSettings(Struct, frozen=True, kw_only=True):
    """How a check is to be run."""

    stragglers: bool = True  # look for slow nodes too
    start_timeout: float = 60.0  # for an agent to come up
    task_timeout: float = 120.0  # for one round's task, its start included
    heartbeat_timeout: float = 30.0
    task: TaskSettings = TaskSettings()
    command: tuple[str, ...] = TASK  # what a process of a task runs
    warm: int | None = None  # processes that have imported torch in advance, as `JobSpec.warm`
    env: dict[str, str] = {}  # added to the agents' environment for it


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

    def again(self) -> _Process:
        """The same process in its next task."""
        return _Process(self.worker, self.host, self.slot, self.done + 1)


@dataclass(slots=True)
class _Task:
    """One group's task in one round."""

    number: int
    group: Group
    processes: dict[str, _Process] = field(default_factory=dict)  # worker → process

    def measurement(self, host: str) -> Measurement:
        """A node is as fast as its slowest process, and fails with its first."""
        own = [process for process in self.processes.values() if process.host == host]
        failure = next((process.failure for process in own if process.failure), "")
        results = [process.result for process in own if process.result is not None]
        if failure or not results:
            return failed(host, failure or "it was not started")
        bandwidths = [r.bandwidth for r in results if r.bandwidth is not None]
        latencies = [r.latency for r in results if r.latency is not None]
        return Measurement(
            host,
            max(r.compute for r in results),
            max(r.network for r in results),
            bandwidth=min(bandwidths, default=None),
            latency=max(latencies, default=None),
            linked=all(r.linked for r in results),
        )


class NodeChecker:
    """One check of some hosts; `run` once.

    Args:
        hosts: (host, processes): as many processes as it has devices to check.
        settings: how to check.
        starter: makes the object that starts agents.
        run_dir: a folder of its own for token and endpoint.
        bind: numeric address and port of the check's rendezvous.
        say: told in a line what is going on, some lines a round.
        known: verdicts of an earlier check of the same cluster.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        settings: CheckSettings,
        starter: MakeBackend,
        run_dir: RunDir,
        bind: tuple[str, int] = ("127.0.0.1", 0),
        say: Callable[[str], None] = lambda _line: None,
        known: Sequence[NodeVerdict] = (),
    ) -> None:
        self._processes = dict(hosts)
        self._settings, self._say = settings, say
        self._check = NodeCheck(tuple(self._processes), stragglers=settings.stragglers, known=known)
        self._tasks = 0
        self._waiting: dict[tuple[str, int], _Process] = {}  # host, slot → waits for its next task
        self._began = 0.0
        self._task_seconds = 0.0
        self._fleet = CheckFleet(
            hosts=tuple(self._processes),
            spec=self._spec(run_dir.run_id),
            settings=settings.task,
            starter=starter,
            run_dir=run_dir,
            bind=bind,
            status=self._status,
        )
        self._shown = b"{}"  # replaced, never changed: another thread reads it

    def run(self) -> CheckReport:
        """Check until every verdict is final; raises ElasticError where that cannot begin."""
        self._began = time.monotonic()
        self._show()
        with self._fleet:
            self._await_agents()
            up = f"{len(self._fleet.agents)} of {len(self._processes)} nodes"
            self._tell(f"agents are up on {up}")
            while groups := self._check.plan():
                self._tell(self._describe(groups))
                self._check.report(self._play(groups))
                self._show()
        return self.report("done")

    def cancel(self) -> None:
        """Have `run` raise ClusterError soon; may be called by any thread."""
        self._fleet.cancel()

    def report(self, state: str = "checking") -> CheckReport:
        """What is known so far."""
        return CheckReport(
            state=state,
            rounds=len(self._check.rounds),
            seconds=time.monotonic() - self._began,
            task_seconds=self._task_seconds,
            nodes=self._check.verdicts(),
            checked_at=time.time() if state == "done" else None,
            task=self._settings.task.summary,
        )

    # ---- rounds --------------------------------------------------------------------------

    def _await_agents(self) -> None:
        """Wait until every agent is up; those that do not come are given up."""
        awaited = set(self._processes)
        deadline = time.monotonic() + self._settings.start_timeout
        while awaited:
            event = self._fleet.hear(deadline)
            if event is None:
                for host in awaited:
                    within = f"within {self._settings.start_timeout:g} s (--start-timeout)"
                    self._give_up(host, f"its agent did not come up {within}")
                return
            if isinstance(event, AgentReady):
                awaited.discard(event.host)
            elif isinstance(event, AgentLost):
                awaited.discard(event.host)
                self._give_up(event.host, event.reason)

    def _play(self, groups: Iterable[Group]) -> list[Measurement]:
        """Run one round's tasks at the same time; what came of them, node by node."""
        tasks = [self._start(group) for group in groups]
        timeout = self._settings.task_timeout
        deadline = time.monotonic() + timeout
        self._open_gate(tasks, deadline)
        began = time.monotonic()
        self._listen(tasks, deadline)
        self._task_seconds += time.monotonic() - began
        for task in tasks:
            self._stop(task, f"not done within {timeout:g} s (--check-timeout)")
        self._listen(tasks, time.monotonic() + STOP_S)
        for task in tasks:
            for process in task.processes.values():
                if not process.ended:
                    self._give_up(process.host, "its agent does not end a task")
            self._fleet.forget(contract.round_prefix(task.number))
        return [task.measurement(host) for task in tasks for host in task.group]

    def _start(self, group: Group) -> _Task:
        self._tasks += 1
        task = _Task(self._tasks, group)
        seats = [
            Seat(self._who(host, slot), host, slot, (False, age))
            for age, host in enumerate(group)
            for slot in range(self._processes[host])
        ]
        first = self._fleet.agents.get(group[0])
        address = first.address if first is not None else "127.0.0.1"
        port = first.ports[0] if first is not None and first.ports else 0
        for worker, place in assign(seats):
            waits = self._waiting.pop((place.host, place.slot), None)
            if waits is None:
                task.processes[worker] = _Process(worker, place.host, place.slot)
                order = StartWorkerOrder(worker, place, task.number, 0, address, port)
                self._fleet.order(place.host, order)
            else:
                task.processes[worker] = process = waits.again()
                given = Assignment(
                    task=task.number, rank=place.rank, size=place.size, node=place.node_rank
                )
                self._fleet.assign(worker, process.done, given)
        for process in task.processes.values():
            if process.host not in self._fleet.agents:
                self._failed(task, process, "its agent was lost")
        return task

    def _who(self, host: str, slot: int) -> str:
        """The process that is to do the next task: one that waits for it, or a new one."""
        waits = self._waiting.get((host, slot))
        return contract.worker_id(host, slot, self._tasks) if waits is None else waits.worker

    def _open_gate(self, tasks: Sequence[_Task], deadline: float) -> None:
        """Let everybody measure once all are up, so that nobody times how another one starts."""
        processes = {w: p for task in tasks for w, p in task.processes.items()}
        gate = StartingGate(processes)
        while not gate.is_open(time.monotonic()):
            until = deadline if gate.opens_at is None else min(deadline, gate.opens_at)
            event = self._fleet.hear(until)
            if event is None:
                break
            self._take(event, tasks)
            up = event.worker if isinstance(event, WorkerReady) else None
            for worker, process in processes.items():
                if worker == up or process.ended:
                    gate.passed(worker, time.monotonic())
        self._tell("measuring")
        for task in tasks:
            self._fleet.publish(go_key(task.number))

    def _listen(self, tasks: Sequence[_Task], deadline: float) -> None:
        """Until every process has ended, or the deadline."""
        while any(not p.ended for task in tasks for p in task.processes.values()):
            event = self._fleet.hear(deadline)
            if event is None:
                return
            self._take(event, tasks)

    def _take(self, event: News | AgentLost, tasks: Sequence[_Task]) -> None:
        if isinstance(event, TaskEnded):
            for task in tasks:
                process = task.processes.get(event.worker)
                if task.number == event.task and process is not None and not process.ended:
                    self._done(task, process)
        elif isinstance(event, AgentLost):
            self._give_up(event.host, event.reason)
            for task in tasks:
                self._lose(task, event.host)
        elif isinstance(event, WorkerExited):
            self._waiting = {k: p for k, p in self._waiting.items() if p.worker != event.worker}
            for task in tasks:
                process = task.processes.get(event.worker)
                if process is not None and not process.ended:
                    self._ended(task, process, event)

    def _done(self, task: _Task, process: _Process) -> None:
        """It waits for its next task, unless it is being stopped."""
        process.ended = True
        if not process.failure:
            self._waiting[process.host, process.slot] = process
            self._succeeded(task, process)

    def _ended(self, task: _Task, process: _Process, event: WorkerExited) -> None:
        process.ended = True
        if event.exit_code:
            self._failed(task, process, _last_words(event))
        elif not process.failure:
            self._succeeded(task, process)

    def _succeeded(self, task: _Task, process: _Process) -> None:
        written = self._fleet.read(result_key(task.number, process.worker))
        try:
            process.result = msgspec.json.decode(written or b"", type=TaskResult)
        except msgspec.DecodeError:
            self._failed(task, process, "it ended without a usable result")

    def _lose(self, task: _Task, host: str) -> None:
        for process in task.processes.values():
            if process.host == host and not process.ended:
                process.ended = True
                self._failed(task, process, "its agent was lost")

    def _failed(self, task: _Task, process: _Process, reason: str) -> None:
        """A process has failed; nobody waits for it in vain."""
        process.failure = process.failure or reason
        if process.host not in self._fleet.agents:
            process.ended = True
        self._stop(task, f"stopped: {process.host} failed")

    def _stop(self, task: _Task, reason: str) -> None:
        for process in task.processes.values():
            if not process.ended and not process.failure:
                process.failure = reason
                self._fleet.order(process.host, StopWorkerOrder(process.worker, 0.0, reason))

    def _give_up(self, host: str, reason: str) -> None:
        if host in self._processes:
            self._check.give_up(host, reason)
            self._fleet.give_up(host)

    # ---- words ---------------------------------------------------------------------------

    def _spec(self, run_id: str) -> JobSpec:
        return JobSpec(
            run_id=run_id,
            command=self._settings.command,
            cwd=str(PACKAGES),
            env=self._settings.env,
            heartbeat_timeout=self._settings.heartbeat_timeout,
            grace_period=0.0,
            max_restarts=0,
            local_ranks_filter=(),  # what tasks print is for the report, not for the terminal
            warm=self._settings.warm,
            preload=PRELOAD_MODEL if self._settings.task.model else PRELOAD,
            rehearse=False,  # a task warms up by itself before it measures
        )

    def _describe(self, groups: tuple[Group, ...]) -> str:
        number = len(self._check.rounds) + 1
        nodes = sum(map(len, groups))
        return f"round {number}, {nodes} nodes in {len(groups)} groups"

    def _tell(self, what: str) -> None:
        self._say(f"node check: {what}, after {time.monotonic() - self._began:.1f} s")

    def _show(self) -> None:
        self._shown = msgspec.json.encode(self.report())

    def _status(self) -> bytes:
        return self._shown


def _last_words(event: WorkerExited) -> str:
    """Why a process ended: the last line of its traceback, or its exit status."""
    code = event.exit_code
    what = f"exit code {code}" if code > 0 else f"signal {-code}"
    lines = [line.strip() for line in event.log_tail.splitlines() if line.strip()]
    return f"{what}: {lines[-1][:_LAST_WORDS_CHARS]}" if lines else what
