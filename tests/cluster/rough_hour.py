"""Train for an hour on an overloaded machine with bad links; nobody is to be lost wrongly.

    python -m tests.cluster.rough_hour                      an hour at four times the load
    python -m tests.cluster.rough_hour --minutes 5

Four hosts with a worker each, default flags. Every link loses 2 of 100 packets, and delays each by
up to 50 ms. Processes that only compute keep the load average at `--load` for each processor. Every
minute or so the driver is stopped for 3 s. Needs root. Ends with 1 if an agent or a worker was
lost, a round changed, or a step was lost or done twice.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

from tests.support.cluster import Cluster, why_not
from tests.support.cluster_job import ClusterJob, elasticrun_on, now
from tests.support.shaping import rough

HOSTS = ("node0", "node1", "node2", "node3")
FOUR = ("-np", "4", "--min-np", "1", "-H", "node[0-3]:1")
DELAY_S, LOST_PERCENT = 0.05, 2.0
STOPPED_S = 3.0
BETWEEN_S = (40.0, 80.0)  # between two stops of the driver
COMPUTE = "while True: sum(range(100_000))"
LOOK_S = 5.0


@dataclass
class Load(contextlib.AbstractContextManager["Load"]):
    """Keeps the load average of this machine at `goal`, with processes that compute."""

    goal: float
    seen: list[float] = field(default_factory=list)
    _burning: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def adjust(self) -> None:
        """Start or end a process, if the load average asks for it."""
        load = os.getloadavg()[0]
        self.seen.append(load)
        if load < self.goal:
            argv = ["nice", "-n", "5", sys.executable, "-c", COMPUTE]
            self._burning.append(subprocess.Popen(argv))
        elif load > self.goal + 2 and self._burning:
            self._end(self._burning.pop())

    def __exit__(self, *_: object) -> None:
        while self._burning:
            self._end(self._burning.pop())

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()


def stop_driver(job: ClusterJob) -> None:
    """Stop the driver for a while."""
    job.signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)  # the length of the fault
    job.signal(signal.SIGCONT)
    job.process.send_signal(signal.SIGCONT)  # nsenter, which stops with its child


def train(job: ClusterJob, load: Load, seconds: float) -> int:
    """Train for so long; return how often the driver was stopped."""
    stops, end, due = 0, now() + seconds, now() + BETWEEN_S[0]
    told = now()
    while now() < end:
        load.adjust()
        if now() >= due:
            stop_driver(job)
            stops, due = stops + 1, now() + random.uniform(*BETWEEN_S)
        if now() >= told + 60:
            told = now()
            step, suspected = max(r.step for r in job.steps()), len(job.events("agent_suspected"))
            left = (end - told) / 60
            print(f"{left:4.0f} min left: step {step}, load {load.seen[-1]:.1f}, {stops} stops,"
                  f" {suspected} suspicions", flush=True)  # fmt: skip
        time.sleep(LOOK_S)
    return stops


def main() -> int:
    """Train, and say what happened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=4.0, help="for each processor")
    args = parser.parse_args()
    if reason := why_not():
        print(f"cannot be tried here: {reason}", file=sys.stderr)
        return 75
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(len(HOSTS)))
        job = stack.enter_context(elasticrun_on(cluster, *FOUR, defaults=True))
        before = job.together(len(HOSTS), within=300)[0].round
        for host in HOSTS:
            stack.enter_context(rough(cluster.node(host), DELAY_S, LOST_PERCENT))
        load = stack.enter_context(Load(args.load * (os.cpu_count() or 1)))
        stops = train(job, load, args.minutes * 60)
        lost = job.events("agent_lost", "worker_lost", "worker_exited")
        same = job.newest_round() == before
        job.check_steps(set())
        suspected, cleared = job.events("agent_suspected"), job.events("agent_cleared")
    usual = statistics.median(load.seen)
    print(f"{args.minutes:g} minutes, load {usual:.1f} (median), driver stopped {stops} times:"
          f" {len(lost)} lost, round {'unchanged' if same else 'changed'},"
          f" {len(suspected)} suspicions, {len(cleared)} cleared")  # fmt: skip
    for event in lost:
        print(event)
    return int(bool(lost) or not same)


if __name__ == "__main__":
    sys.exit(main())
