"""Faults of hosts and links: a job on hosts in namespaces, started over ssh."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

import psutil

from tests.chaos.faults import Arena, Fault, rogue_clients
from tests.chaos.plan import Plan
from tests.chaos.trial import Trial
from tests.cluster.trials import KINDS, Kind
from tests.support.cluster import Cluster, Node
from tests.support.cluster_job import ClusterJob, elasticrun_on
from tests.support.job import ROOT, StepRecord, eventually

FINAL_S = 30.0


@dataclass
class HostsArena(Arena):
    """A job on the hosts of a cluster."""

    job: ClusterJob

    @property
    def node(self) -> Node:
        """One of the hosts."""
        nodes = self.job.cluster.nodes
        return self.random.choice([node for name, node in nodes.items() if name != "head"])

    def beside(self, *argv: str) -> list[str]:
        """A command that runs on one of the hosts."""
        return self.node.inside("env", f"PYTHONPATH={ROOT}", *argv, cwd=str(ROOT))


def kill_worker(arena: HostsArena) -> None:
    """A worker dies."""
    node = arena.node
    # A host that an earlier fault has slowed down may be lost late, and has none for a while.
    workers = arena.job.until(lambda: node.running("train.py"), f"{node.name} has a worker")
    with contextlib.suppress(psutil.NoSuchProcess):
        arena.random.choice(workers).kill()


def kill_driver(arena: HostsArena) -> None:
    """The driver dies, and another one goes on with the job at once."""
    arena.job.kill_driver()
    arena.job.start("--resume")


def stop_driver(arena: HostsArena) -> None:
    """The driver is stopped for a while; nobody is to be lost by it."""
    arena.job.signal(signal.SIGSTOP)
    time.sleep(arena.held)
    arena.job.signal(signal.SIGCONT)
    arena.job.process.send_signal(signal.SIGCONT)  # nsenter, which stops with its child


def _of_kind(kind: Kind, arena: HostsArena) -> None:
    """One of the faults of `tests.cluster.trials`, on one of the hosts."""
    with kind.fault(arena.node):
        time.sleep(arena.held)


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


HOST_FAULTS: dict[str, Fault] = {
    **{fault.__name__: fault for fault in (kill_worker, kill_driver, stop_driver, rogue_clients)},
    **{name: partial(_of_kind, kind) for name, kind in KINDS.items() if name != "clock"},
}


class HostsTrial(Trial):
    """A plan that is being run against a job on hosts; a pid says nothing there."""

    arena: HostsArena

    def all_live(self, _records: Iterable[StepRecord]) -> bool:
        """A worker that has finished a step of the newest round counts as living."""
        return True

    def processes(self) -> dict[int, str]:
        """The driver, and the agents of all hosts, by pid on this machine."""
        found = {}
        for node in self.arena.job.cluster.nodes.values():
            for process in node.processes():
                words = _words(process)
                if words[1:3] == ["-m", "launcher.cli"]:
                    found[process.pid] = "driver"
                elif "launcher.agent" in words:
                    found[process.pid] = "agent"
        return found

    def end(self) -> None:
        """End the job, and see that no step was lost and nothing is left."""
        job = self.arena.job
        hosts = {name for name in job.cluster.nodes if name != "head"}
        job.signal(signal.SIGINT)
        self.judge_end(
            128 + signal.SIGINT,
            lambda: eventually(lambda: not job.left_behind(), within=FINAL_S, what="nothing left"),
            lambda: job.check_steps(hosts),
        )


def on_hosts(plan: Plan, stack: contextlib.ExitStack) -> HostsTrial:
    """A job on as many hosts as the plan says; the driver is on `head`."""
    cluster = stack.enter_context(Cluster(plan.hosts))
    slots = plan.workers // plan.hosts
    size = ("-np", str(plan.workers), "--min-np", "1", "--max-restarts", "1000000")
    hosts = ("-H", f"node[0-{plan.hosts - 1}]:{slots}")
    job = stack.enter_context(elasticrun_on(cluster, *size, *hosts, steps=10**8))
    return HostsTrial(plan, HostsArena(job, Random(plan.seed), plan.held), HOST_FAULTS)
