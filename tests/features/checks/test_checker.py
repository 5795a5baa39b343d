"""The machine of a node check, with a clock that moves only when told."""

from __future__ import annotations

import msgspec

from elastic_driver.contract import FIRST_OF_CHECKS
from elastic_driver.features.checks.evidence import Verdict
from elastic_driver.features.checks.machine import (
    SHUTDOWN_S,
    STOP_S,
    CheckDecision,
    CheckEnded,
    CheckLimits,
    NodeChecker,
)
from elastic_driver.features.checks.messages import TaskEnded, TaskResult
from elastic_driver.features.checks.report import CheckReport
from elastic_driver.job.decisions import GiveOrder, KillAgent, StartAgent, StopAgent
from elastic_driver.job.events import AgentLost, Tick
from elastic_driver.kernel.services import KeysRead, ReadKeys
from elastic_driver.words.orders import StartWorkerOrder
from elastic_driver.words.wire_events import AgentReady, Event, WorkerExited

LIMITS = CheckLimits(start_timeout=60.0, task_timeout=120.0)


class Nodes:
    """A check of some nodes; `report` is what it found, once it is over."""

    def __init__(self, *hosts: str) -> None:
        self.now = 100.0
        self.machine = NodeChecker([(host, 1) for host in hosts], number=2, limits=LIMITS)
        self.decided: list[CheckDecision] = []
        self.report: CheckReport | None = None
        self.results = dict.fromkeys(hosts, msgspec.json.encode(TaskResult(1.0, 0.5)))
        self.send(Tick())

    def send(self, event: Event | TaskEnded | KeysRead) -> None:
        """Hand an event over, and answer what the machine wants to read."""
        decisions = self.machine.handle(event, self.now)
        assert self.machine.check() == []
        self.decided += decisions
        for decision in decisions:
            if isinstance(decision, ReadKeys):
                (key,) = decision.keys
                host = key.rpartition("/")[2].partition(".")[0]
                found = {key: (self.results[host], 1)}
                self.send(KeysRead("check", decision.keys, found, 0.0))
            elif isinstance(decision, CheckEnded):
                self.report = decision.report

    def up(self, *hosts: str) -> None:
        for host in hosts:
            self.send(AgentReady(host, FIRST_OF_CHECKS + 2, 1, host, (5000,)))

    def lost(self, *hosts: str) -> None:
        for host in hosts:
            self.send(AgentLost(host, FIRST_OF_CHECKS + 2, "it has ended"))

    def workers(self) -> dict[str, StartWorkerOrder]:
        """The newest start order for each host."""
        orders = (d for d in self.decided if isinstance(d, GiveOrder))
        return {d.host: d.order for d in orders if isinstance(d.order, StartWorkerOrder)}

    def of(self, kind: type[CheckDecision]) -> list[str]:
        """The hosts of all decisions of a kind."""
        return [d.host for d in self.decided if isinstance(d, kind)]  # type: ignore[union-attr]

    def let_pass(self) -> None:
        """Let time pass until the machine wants to be called."""
        due = self.machine.deadline()
        assert due is not None
        self.now = due
        self.send(Tick())


def test_healthy_nodes_run_one_task_and_their_agents_end() -> None:
    nodes = Nodes("a", "b")
    assert nodes.of(StartAgent) == ["a", "b"]
    nodes.up("a", "b")
    for order in nodes.workers().values():
        assert order.round > FIRST_OF_CHECKS
        nodes.send(TaskEnded(order.worker, order.round))
    assert sorted(nodes.of(StopAgent)) == ["a", "b"]
    assert nodes.report is None
    nodes.lost("a", "b")
    assert nodes.report is not None
    assert nodes.report.named(Verdict.GOOD) == ("a", "b")
    assert nodes.machine.deadline() is None


def test_a_task_that_runs_out_of_time_fails_and_an_agent_that_does_not_end_it_is_killed() -> None:
    nodes = Nodes("a")
    nodes.up("a")
    nodes.let_pass()
    assert nodes.now == 100.0 + LIMITS.task_timeout
    nodes.let_pass()
    assert nodes.now == 100.0 + LIMITS.task_timeout + STOP_S
    assert nodes.of(KillAgent) == ["a"]
    assert nodes.report is not None
    assert nodes.report.named(Verdict.FAULTY) == ("a",)


def test_an_agent_that_does_not_come_up_costs_its_node_the_verdict_and_holds_nobody_up() -> None:
    nodes = Nodes("a", "b")
    nodes.up("a")
    nodes.let_pass()
    assert nodes.of(KillAgent) == ["b"]
    order = nodes.workers()["a"]
    nodes.send(WorkerExited(order.worker, 0, ""))
    nodes.lost("a")
    assert nodes.report is not None
    assert [n.reason for n in nodes.report.nodes][1] == (
        "its agent did not come up within 60 s (--start-timeout)"
    )


def test_a_process_without_a_usable_result_has_failed() -> None:
    nodes = Nodes("a")
    nodes.results["a"] = b"[]"
    nodes.up("a")
    nodes.send(WorkerExited(nodes.workers()["a"].worker, 0, ""))
    nodes.lost("a")
    assert nodes.report is not None
    assert "it ended without a usable result" in nodes.report.nodes[0].reason


def test_agents_that_do_not_end_by_themselves_are_killed() -> None:
    nodes = Nodes("a", "b")
    nodes.up("a", "b")
    for order in nodes.workers().values():
        nodes.send(TaskEnded(order.worker, order.round))
    nodes.lost("b")
    before = nodes.now
    nodes.let_pass()
    assert nodes.now == before + SHUTDOWN_S
    assert nodes.of(KillAgent) == ["a"]
    assert nodes.report is not None
