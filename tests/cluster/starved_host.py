"""A host gets too few processors while its workers train: one of them must move.

    python -m tests.cluster.starved_host --times 2

With `--auto-scale` and under the Brain: four workers on two of three hosts, and processes that keep
all processors of this machine busy. The processes of the first host together get a part of one
processor. Needs root. Prints the seconds until a worker has moved; ends with 1 if none did, or if a
step was lost or done twice.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

from elastic_driver.contract import host_of_worker
from tests.support.brain import elasticbrain_on
from tests.support.cluster import Cluster, why_not
from tests.support.cluster_job import ClusterJob, elasticrun_on

HOSTS = ("-H", "node0:2,node1:2,node2:1")
SIZE = ("--min-np", "4", "--max-np", "4")
WIDTH = 20_000  # of the model: a step takes some milliseconds of a processor
SHARE = 0.25  # of one processor, for the starved host
WITHIN_S = 150.0  # `LASTS_S`, begun anew whenever the machine is idle for a moment


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Keep all processors of this machine busy."""
    argv = ["nice", "-n", "5", sys.executable, "-c", "while True: pass"]
    burning = [subprocess.Popen(argv) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


@contextlib.contextmanager
def job_of(mode: str, cluster: Cluster) -> Iterator[ClusterJob]:
    """A job of four workers."""
    with contextlib.ExitStack() as stack:
        args: tuple[str, ...] = ("--auto-scale", "-np", "4", *HOSTS)
        if mode == "brain":
            args = stack.enter_context(elasticbrain_on(cluster, *HOSTS))
        yield stack.enter_context(elasticrun_on(cluster, *args, *SIZE, width=WIDTH))


def places(job: ClusterJob) -> Counter[str]:
    """The number of workers on each host, in the newest round with a step."""
    newest = job.newest_round()
    return Counter(host_of_worker(w) for w in {r.worker for r in job.steps() if r.round == newest})


def trial(mode: str) -> float:
    """Starve a host; return the seconds until a worker has moved and all train again."""
    with Cluster(3) as cluster, busy(), job_of(mode, cluster) as job:
        job.together(4)
        assert places(job) == {"node0": 2, "node1": 2}, places(job)
        with cluster.node("node0").slow_cpu(SHARE):
            began = time.monotonic()
            job.until(lambda: job.events("host_starved"), "a starved host", WITHIN_S)
            moved = {"node0": 1, "node1": 2, "node2": 1}
            job.until(lambda: places(job) == moved, "a worker moves", WITHIN_S)
            took = time.monotonic() - began
        assert {event["host"] for event in job.events("host_starved")} == {"node0"}
        assert not job.events("worker_lost", "agent_lost")
        job.check_steps(set())
        return took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"no cluster can be made here: {reason}")
        return 1
    status = 0
    for mode in ("auto-scale", "brain"):
        for _ in range(options.times):
            try:
                print(f"{mode}: a worker moved after {trial(mode):.1f} s", flush=True)
            except AssertionError as error:
                print(f"{mode}: {error}", flush=True)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
