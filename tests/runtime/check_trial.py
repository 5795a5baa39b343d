"""Is the host that is slowed for real the one a node check names? A trial, not a test: minutes.

    python -m tests.runtime.check_trial --processor 0.35,0.15,1 --times 5
    python -m tests.runtime.check_trial --link 300,1000 --times 5

`--processor`: names of this machine as hosts, one of them in a control group with that share of one
processor (1: none is slowed). `--link`: nodes of a cluster of network namespaces (root), one of
them sending no more than so many megabits a second (0: none is slowed). Which host it is, chance
decides. Each line tells the load beside it, since everything here shares the processors. Ends with
1 if another host was named, or none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from unittest import mock

from elastic_driver.features.checks.driver import CheckSettings
from elastic_driver.features.checks.evidence import Verdict
from elastic_driver.features.checks.messages import TaskSettings
from launcher.agent.warm.starter import WorkerStarter
from launcher.backends.local import LocalAgent, LocalAgents, LocalBackend
from tests.runtime.checks import check_without_a_job
from tests.support.cluster import Cluster
from tests.support.job import ROOT
from tests.support.slowing import slowed

BAD = ("straggler", "faulty")
_FLAGS = ("--straggler-detection", "--log-format", "json")
Named = dict[str, tuple[str, float | None, float | None]]  # host → verdict, compute, network
Trial = Callable[[str | None, float], Named]  # the slowed host, how much; what came of it


def with_a_quota(hosts: Sequence[str], *, model: bool) -> Trial:
    """Hosts of this machine, one of them in a control group with a quota."""

    def trial(victim: str | None, share: float) -> Named:
        with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
            start = LocalAgents._start

            def start_slowed(agents: LocalAgents, agent: LocalAgent) -> None:
                starter = agents._starter
                if agent.plan.host == victim:  # executed, so that all it runs is in the group
                    agents._starter = WorkerStarter(print)
                start(agents, agent)
                if agent.plan.host == victim:
                    stack.enter_context(slowed(agent.pid, share))
                agents._starter = starter

            stack.enter_context(mock.patch.object(LocalAgents, "_start", start_slowed))
            report = check_without_a_job(
                tuple((host, 1) for host in hosts),
                settings=CheckSettings(task=TaskSettings(model=model)),
                make_backend=LocalBackend,
                folder=Path(folder),
            )
        return {n.node: (n.verdict.value, n.compute, n.network) for n in report.nodes}

    return trial


def with_a_narrow_link(cluster: Cluster, hosts: Sequence[str]) -> Trial:
    """Nodes with networks of their own, one of them behind a token bucket filter."""

    def trial(victim: str | None, megabits: float) -> Named:
        device = ("dev", "eth0", "root")
        limit = ("tbf", "rate", f"{megabits:g}mbit", "burst", "64kb", "latency", "50ms")
        if victim is not None:
            subprocess.run(_tc(cluster, victim, "add", *device, *limit), check=True)
        try:
            check = [sys.executable, "-m", "launcher.ctl", "check", *_FLAGS]
            env = ("env", f"--chdir={ROOT}", f"PYTHONPATH={ROOT}", f"PATH={os.environ['PATH']}")
            ran = cluster.run("head", *env, *check, *hosts, timeout=300)
        finally:
            if victim is not None:
                subprocess.run(_tc(cluster, victim, "del", *device), check=True)
        if not ran.stdout:
            raise RuntimeError(ran.stderr)
        nodes = json.loads(ran.stdout)["nodes"]
        return {n["node"]: (n["verdict"], n["compute"], n["network"]) for n in nodes}

    return trial


def _tc(cluster: Cluster, node: str, what: str, *words: str) -> list[str]:
    return cluster.node(node).inside("tc", "qdisc", what, *words)


def play(trial: Trial, hosts: Sequence[str], amount: float, healthy: float, times: int) -> bool:
    """Some trials of one slow-down; prints a line for each; whether all were right."""
    random, right = Random(f"{amount}"), 0
    for _ in range(times):
        victim = None if amount == healthy else random.choice(list(hosts))
        load, began = os.getloadavg()[0], time.monotonic()
        found = trial(victim, amount)
        named = [host for host, (verdict, _, _) in found.items() if verdict in BAD]
        right += named == ([] if victim is None else [victim])
        undecided = [h for h, (verdict, _, _) in found.items() if verdict == Verdict.UNDECIDED]
        values = " ".join(f"{c or 0:.3f}/{n or 0:.4f}" for _, c, n in found.values())
        print(
            f"slowed {victim} to {amount:g}: named {named}, undecided {undecided}; "
            f"{time.monotonic() - began:.0f} s at load {load:.1f}; compute/network {values}",
            flush=True,
        )
    print(f"{amount:g}: right in {right} of {times}", flush=True)
    return right == times


def main() -> int:
    """Play what the command line asks for; 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.runtime.check_trial")
    parser.add_argument("--processor", default="", help="shares of one processor, 0.35,0.15")
    parser.add_argument("--link", default="", help="megabits a second, 300,1000")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--model", action="store_true", help="as with --straggler-detection")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave nothing behind
    local = ["localhost", *(f"127.0.0.{n}" for n in range(2, given.hosts + 1))]
    right = []
    for share in filter(None, given.processor.split(",")):
        quota = with_a_quota(local, model=given.model)
        right.append(play(quota, local, float(share), 1.0, given.times))
    if given.link:
        with Cluster(given.hosts) as cluster:
            nodes = [f"node{n}" for n in range(given.hosts)]
            for rate in given.link.split(","):
                link = with_a_narrow_link(cluster, nodes)
                right.append(play(link, nodes, float(rate), 0.0, given.times))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
