"""A real `elasticrun` on the head of a cluster, watched by worker and host in place of by pid.

Every node counts its processes for itself, so a pid says nothing here; what a worker has done
stands in its step records under its own name, which never comes twice.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from elastic_driver.contract import host_of_worker
from tests.support.cluster import Cluster
from tests.support.job import ROOT, RunningJob, StepRecord, eventually
from tests.support.processes import read_each, signal_each

HEARTBEAT_S = 3.0
BEGINS_S = 150.0  # for several machines that share two processors to import torch


class ClusterJob(RunningJob):
    """A job whose driver runs on `head`."""

    cluster: Cluster
    inside: tuple[str, ...] = ()  # the command that has started `elasticrun`

    def together(self, size: int, *, above: int = 0, within: float = BEGINS_S) -> list[StepRecord]:
        """Wait until `size` workers have each finished two steps of one round above `above`."""

        def look() -> list[StepRecord] | None:
            records = self.steps()
            newest = max((r.round for r in records), default=0)
            if newest <= above:
                return None
            done: dict[str, list[StepRecord]] = {}
            for record in records:
                if record.round == newest and record.size == size:
                    done.setdefault(record.worker, []).append(record)
            full = [found[-1] for found in done.values() if len(found) >= 2]
            return full if len(full) == size else None

        return self.until(look, f"{size} workers train together after round {above}", within)

    def known_to_train(self) -> None:
        """Wait until the driver knows of the first step; until then, a resumed one ends the round,
        because it may never have begun.
        """
        self.until(lambda: self.events("state_synced"), "the driver knows of the first step")

    def newest_round(self) -> int:
        """The newest round in which a step was finished."""
        return max((r.round for r in self.steps()), default=0)

    def first_step_after(self, round_id: int, hosts: set[str]) -> float:
        """When the last of these hosts had finished its first step after this round (unix s)."""
        first: dict[str, float] = {}
        for record in self.steps():
            if record.round > round_id:
                first.setdefault(host_of_worker(record.worker), record.t)
        return max(first[host] for host in hosts)

    def wait_event(self, name: str, host: str, since: float = 0.0) -> dict[str, Any]:
        """The first event of this name about this host after `since` (unix s)."""

        def look() -> dict[str, Any] | None:
            found = (e for e in self.events(name) if e["host"] == host and e["t"] >= since)
            return next(found, None)

        return self.until(look, f"{name} of {host}")

    def check_steps(self, lost_hosts: set[str]) -> None:
        """No step was lost or done twice, and no world of the past went on beside a newer one.

        What a worker of a lost host alone had finished when it was lost does not count: its
        state died with it.
        """
        records = self.steps()
        last_of = {r.worker: r for r in records}
        rounds_of: dict[int, set[int]] = {}
        began: dict[int, float] = {}
        for r in records:
            began.setdefault(r.round, r.t)
            died = host_of_worker(r.worker) in lost_hosts and last_of[r.worker] == r
            if not died:
                rounds_of.setdefault(r.step, set()).add(r.round)
        twice = {step: rounds for step, rounds in rounds_of.items() if len(rounds) > 1}
        assert twice == {}, f"steps done in several rounds: {twice}"
        missing = set(range(1, max(rounds_of) + 1)) - set(rounds_of)
        assert not missing, f"steps lost: {sorted(missing)}"
        late = [r for r in records if any(n > r.round and t < r.t for n, t in began.items())]
        # A host that is frozen between a step's end and its record writes it when it thaws.
        in_time = {(r.round, r.step) for r in records if r not in late}
        late = [r for r in late if last_of[r.worker] != r or (r.round, r.step) not in in_time]
        assert not late, f"steps of a round that was over: {late}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to `elasticrun` itself, as a user on head would."""
        mark = str(self.run_dir.parent)
        for process, words in read_each(
            self.cluster.node("head").processes(), psutil.Process.cmdline
        ):
            if words[1:3] == ["-m", "launcher.cli"] and mark in words:
                signal_each([process], number)

    def kill_driver(self) -> None:
        """Kill `elasticrun` alone; agents and workers may live on."""
        self.signal(signal.SIGKILL)
        if not self.inside:
            self.process.wait(10)

    def resume(self) -> None:
        """Start the next driver, and wait until it has begun."""
        before = len(self.events("driver_resumed"))
        self.start("--resume")
        self.until(lambda: len(self.events("driver_resumed")) > before, "the next driver begins")

    def train_on(self, workers: int, steps: int = 20) -> None:
        """Wait until this many workers have each finished so many more steps."""
        before = {r.worker: r.step for r in self.steps()}

        def look() -> bool:
            newest = {r.worker: r.step for r in self.steps()}
            ahead = [w for w, step in newest.items() if step >= before.get(w, 0) + steps]
            return len(ahead) >= workers

        self.until_without_driver(look, f"{workers} workers train on")

    def start(self, *args: str) -> None:
        """Start `elasticrun` for this run again, on head; its output follows that of the last."""
        run = ("--run-id", self.run_id, "--state-dir", str(self.run_dir.parent))
        argv = [sys.executable, "-m", "launcher.cli", *run, *args]
        out, err = self.folder / "stdout", self.folder / "stderr"
        self.process = self.cluster.start("head", argv, out=out, err=err, env=self.environ)

    def left_behind(self) -> dict[str, object]:
        """What is left of the job on each node that is up: processes, files of ours."""
        found: dict[str, object] = {}
        for node in self.cluster.nodes.values():
            if node.is_up:
                files = [name for name in node.files() if name.startswith("elastic-")]
                processes = [str(process) for process in node.processes()]
                if files or processes:
                    found[node.name] = (files, processes)
        return found

    def until_nothing_is_left(self, within: float = 15.0) -> None:
        """Wait until no process and no file of the job is left on any node."""
        eventually(
            lambda: not self.left_behind(),
            within=within,
            what="nothing is left on any host",
            context=lambda: f"{self.left_behind()}\n{self.describe()}",
        )

    def close(self) -> None:
        """End `elasticrun`; what it started goes with the cluster."""
        signal_each(self.cluster.node("head").processes(), signal.SIGKILL)
        self.process.wait(10)


@contextlib.contextmanager
def elasticrun_on(
    cluster: Cluster,
    *args: str,
    steps: int = 100_000,
    width: int = 50,
    inside: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    defaults: bool = False,
) -> Iterator[ClusterJob]:
    """Start `elasticrun ARGS… -- train.py` on the cluster's head, as what `inside` starts.

    With `defaults`, no heartbeat timeout and no cool-down is given.
    """
    run_id = f"t{uuid.uuid4().hex[:10]}"
    folder = Path(cluster.folder, run_id)
    (folder / "steps").mkdir(parents=True)
    worker_env = {
        "STEPS": str(steps),
        "STEP_MS": "20",
        "WIDTH": str(width),
        "STEP_RECORDS": str(folder / "steps"),
        "OMP_NUM_THREADS": "1",
    }
    argv = [
        *(*inside, sys.executable, "-m", "launcher.cli", "--run-id", run_id),
        *("--state-dir", str(folder / "state"), "--debug"),
        *(() if defaults else ("--heartbeat-timeout", str(HEARTBEAT_S))),
        *(() if defaults else ("--blacklist-cooldown-range", "1", "4")),
        *(word for item in worker_env.items() for word in ("--env", "=".join(item))),
        *args,
        *("--", str(ROOT / "tests" / "e2e" / "jobs" / "train.py")),
    ]
    environ = {"HOME": str(folder), **(env or {})}
    out, err = folder / "stdout", folder / "stderr"
    process = cluster.start("head", argv, out=out, err=err, env=environ)
    job = ClusterJob(process, run_id, folder, environ=environ)
    job.cluster, job.inside = cluster, inside
    try:
        yield job
    finally:
        job.close()


def now() -> float:
    """Unix seconds, as in the event log and the step records."""
    return time.time()
