"""Is the rank that is slowed for real the one a running job names? A trial, not a test: minutes.

    python -m tests.e2e.slow_rank_trial --processor 2,3,6 --ranks 2,3,4 --times 3
    python -m tests.e2e.slow_rank_trial --rate 20mbit,50mbit --loss 5 --times 3
    python -m tests.e2e.slow_rank_trial --calm 100 --busy 2

`--processor`: how many times slower one rank becomes, by a quota (cgroup v1, as root). Of a step's
work a part is asleep, so that all ranks together leave room on this machine, and nobody but the
slowed one waits for a processor. `--rate`, `--loss` (percent), `--delay` (milliseconds): nodes of a
cluster of network namespaces (root), the link of one of them shaped. `--calm`: seconds of jittered
steps in which nothing is done to anybody, and alarms are counted. `--busy`: loops beside it.

One job for each number of ranks and for the cluster; rank or host are drawn, each as often as any
other. A line for each time tells who was named after how many steps, at what load; the last ones
how many were right: the right rank, of the right kind, within 30 steps, and nobody else until the
alarm was withdrawn. Ends with 1 if one was not right, or if there was a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NamedTuple, TypeVar

from tests.support import shaping
from tests.support.cluster import Cluster, Node
from tests.support.cluster_job import elasticrun_on
from tests.support.job import JOBS, RunningJob, elasticrun
from tests.support.slowing import slowed

PACED = str(JOBS / "paced.py")
WITHIN_STEPS = 30
GIVEN_UP_S = 40.0
CALM_STEPS = 60  # between two trials, and at least
CALM_S = 6.0
WIDTH = 25_000  # 2 MB of gradients a step

T = TypeVar("T")
Slowing = Callable[[], "AbstractContextManager[object]"]
Shape = Callable[[Node], "AbstractContextManager[object]"]


class Result(NamedTuple):
    """A line for the end, and whether all of it is as it should be."""

    line: str
    right: bool


@dataclass
class Tally:
    """What came of one way to slow somebody."""

    right: int = 0
    steps: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def result(self, what: str) -> Result:
        """For the end."""
        times = self.right + len(self.wrong)
        steps = " ".join(map(str, sorted(self.steps)))
        wrong = f"; wrong: {'; '.join(self.wrong)}" if self.wrong else ""
        line = f"{what}: right in {self.right} of {times}, named after steps: {steps}{wrong}"
        return Result(line, not self.wrong)


def step_at(job: RunningJob, moment: float) -> int:
    """The newest step that somebody had finished at this moment (unix s)."""
    return max((r.step for r in job.steps() if r.t <= moment), default=0)


def alarms(job: RunningJob, since: float) -> list[dict[str, Any]]:
    """Who was named after this moment (unix s)."""
    return [e for e in job.events("rank_slow") if e["t"] >= since]


def calm(job: RunningJob) -> None:
    """Wait until nobody has been named for a while, nor is."""

    def look() -> bool:
        ended = [e["t"] for e in job.events("rank_recovered")]
        if len(ended) < len(job.events("rank_slow")):
            return False
        since = max([begun, *ended])
        return time.time() - since > CALM_S and step_at(job, time.time()) > (
            step_at(job, since) + CALM_STEPS
        )

    begun = time.time()
    job.until(look, "some calm steps", within=120.0)


def once(job: RunningJob, host: str, kind: str, slowing: Slowing, tally: Tally) -> None:
    """Slow one rank, see who is named, and that it is over soon after the slowing is."""
    calm(job)
    load = os.getloadavg()[0]

    def named() -> dict[str, Any] | None:
        found = (e for e in alarms(job, begun) if (e["host"], e["kind"]) == (host, kind))
        return next(found, None)

    def withdrawn() -> float | None:
        event = named()
        found = (e["t"] for e in job.events("rank_recovered"))
        return next((t for t in found if event and t > event["t"]), None)

    begun = time.time()
    step = step_at(job, begun)
    with slowing():
        waits_for(job, named, GIVEN_UP_S)
        waits_for(job, lambda: step_at(job, time.time()) > step + WITHIN_STEPS, GIVEN_UP_S)
    ended, event = time.time(), named()
    over = waits_for(job, withdrawn, GIVEN_UP_S) if event else None
    others = [
        f"rank {e['rank']} ({e['kind']}, {e['ratio']})"
        for e in alarms(job, begun)
        if e != event and (over is None or e["t"] <= over)
    ]
    said = f"{host}: nobody named it in {step_at(job, ended) - step} steps"
    right = False
    if event is not None:
        took = step_at(job, event["t"]) - step
        tally.steps.append(took)
        right = took <= WITHIN_STEPS and not others and over is not None
        said = (
            f"{host}: named after {took} steps and {event['t'] - begun:.1f} s as {event['ratio']} "
            f"x, withdrawn after {over - ended if over else float('nan'):.1f} s"
        )
    tally.right += right
    line = f"{said}, others {others}; load {load:.1f}"
    if not right:
        tally.wrong.append(line)
    print("   ", line, flush=True)


def waits_for(job: RunningJob, look: Callable[[], T | None], within: float) -> T | None:
    """What `look` comes to in that time."""
    with contextlib.suppress(AssertionError):
        return job.until(look, "", within=within)
    return None


def drawn(random: Random, of: int, times: int) -> list[int]:
    """Each of so many as often as any other, in an order that is nobody's."""
    rounds = [random.sample(range(of), of) for _ in range(-(-times // of))]
    return [number for numbers in rounds for number in numbers][:times]


# ---- by its processor --------------------------------------------------------------------


def processor(given: argparse.Namespace, ranks: int) -> Iterator[Result]:
    """One rank after the other gets less of a processor than the others."""
    hosts = [f"127.0.0.{n}" for n in range(2, ranks + 1)]
    listed = ",".join(f"{host}:1" for host in ("localhost", *hosts))
    random = Random(ranks)
    env = {"WORK_MS": str(given.work_ms), "JITTER": "0.1", "IDLE": str(given.idle)}
    with elasticrun("-H", listed, "-np", str(ranks), "--", PACED, env=env) as job:
        workers = job.until_size(ranks, steps=20, within=120.0)
        of_rank = {r.rank: (pid, r.worker.rsplit(".", 2)[0]) for pid, r in workers.items()}
        for factor in given.processor:
            tally, share = Tally(), (1 - given.idle) / factor
            for rank in drawn(random, ranks, given.times):
                pid, host = of_rank[rank]
                once(job, host, "compute", partial(slowed, pid, share, given.period), tally)
            yield tally.result(f"{ranks} ranks, {factor:g} x slower")


# ---- by its link -------------------------------------------------------------------------


def links(given: argparse.Namespace) -> Iterator[Result]:
    """One host's link after the other's is shaped."""
    ways: dict[str, Shape] = {}
    for rate in given.rate:
        ways[rate] = partial(shaping.narrow, rate=rate)
    for percent in given.loss:
        ways[f"{percent:g} % lost"] = partial(shaping.losing, percent=percent)
    for ms in given.delay:
        ways[f"{ms:g} ms late"] = partial(shaping.late, seconds=ms / 1000)
    if not ways:
        return
    hosts, random = max(given.ranks), Random(1)
    listed = f"node[0-{hosts - 1}]:1"
    with (
        Cluster(hosts) as cluster,
        elasticrun_on(cluster, "-np", str(hosts), "-H", listed, width=WIDTH) as job,
    ):
        job.together(hosts)
        for what, way in ways.items():
            tally = Tally()
            for number in drawn(random, hosts, given.times):
                node = cluster.node(f"node{number}")
                once(job, node.name, "network", partial(way, node), tally)
            yield tally.result(f"{hosts} hosts, {what}")


# ---- nobody ------------------------------------------------------------------------------


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Other programs on this machine, that come and go."""
    loop = "import random, time\nwhile True:\n  end = time.time() + random.expovariate(1)\n"
    loop += "  while time.time() < end: pass\n  time.sleep(random.expovariate(1))"
    loops = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in loops:
            process.kill()
            process.wait()


def nobody(given: argparse.Namespace) -> Iterator[Result]:
    """Jittered steps; who is named all the same."""
    ranks = max(given.ranks)
    env = {"WORK_MS": str(given.work_ms), "JITTER": str(given.jitter), "IDLE": str(given.idle)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(busy_loops(given.busy))
        launch = partial(elasticrun, "-np", str(ranks), "--", PACED, env=env)
        jobs = [stack.enter_context(launch()) for _ in range(given.jobs)]
        for job in jobs:
            job.until_size(ranks, steps=20, within=200.0)
        begun = time.time()
        first = sum(step_at(job, begun) for job in jobs)
        until = time.monotonic() + given.calm
        jobs[0].until(lambda: time.monotonic() > until, "the time is over", within=given.calm + 60)
        steps = sum(step_at(job, time.time()) for job in jobs) - first
        each = given.calm * given.jobs / max(steps, 1)
        found = [e["reason"] for job in jobs for e in alarms(job, begun)]
        line = (
            f"{given.jobs} jobs of {ranks} ranks, {given.calm / 60 * given.jobs:.1f} minutes, "
            f"{steps} jittered steps of {each * 1000:.0f} ms, {given.busy} other programs: "
            f"{len(found)} alarms {found}; load {os.getloadavg()[0]:.1f}"
        )
        yield Result(line, not found)


def main() -> int:
    """Play what the command line asks for; 1 if something was wrong."""

    def numbers(words: str) -> list[float]:
        return [float(word) for word in words.split(",") if word]

    parser = argparse.ArgumentParser(prog="python -m tests.e2e.slow_rank_trial")
    parser.add_argument("--processor", type=numbers, default=[], metavar="FACTOR,…")
    parser.add_argument("--rate", type=lambda w: w.split(","), default=[], metavar="20mbit,…")
    parser.add_argument("--loss", type=numbers, default=[], metavar="PERCENT,…")
    parser.add_argument("--delay", type=numbers, default=[], metavar="MS,…")
    parser.add_argument("--calm", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--ranks", type=lambda w: [int(n) for n in w.split(",")], default=[4])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--work-ms", type=float, default=20.0, help="a step")
    parser.add_argument("--period", type=float, default=0.1, help="of the quota, seconds")
    parser.add_argument("--busy", type=int, default=0, help="other programs")
    parser.add_argument("--jobs", type=int, default=1, help="at once, with --calm")
    parser.add_argument("--jitter", type=float, default=0.25, help="sigma of a step's time")
    parser.add_argument("--idle", type=float, default=0.75, help="part of the work that is asleep")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave nothing behind
    trials = [processor(given, ranks) for ranks in given.ranks if given.processor]
    trials += [links(given), *([nobody(given)] if given.calm else [])]
    results = list(itertools.chain(*trials))
    for result in results:
        print(result.line, flush=True)
    return int(not all(result.right for result in results))


if __name__ == "__main__":
    sys.exit(main())
