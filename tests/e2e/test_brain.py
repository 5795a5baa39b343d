"""Jobs that share hosts by a Brain, which may be killed, stopped and started again."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_driver.contract import host_of_worker
from tests.e2e.test_control import ctl
from tests.support.brain import RunningBrain, elasticbrain
from tests.support.job import JOBS, RunningJob, elasticrun, eventually

pytest.importorskip("scipy")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SETTLED_S = 12.0  # without a change: the jobs have found their sizes
TRAIN = "--", str(JOBS / "train.py")


def env(curve: str = "", steps: int = 1_000_000, ms: int = 50) -> dict[str, str]:
    return {"STEPS": str(steps), "STEP_MS": str(ms), "CURVE": curve}


def sizes(*jobs: RunningJob) -> list[int]:
    """The number of workers that each job trains with now."""
    found = []
    for job in jobs:
        newest = job.live().values()
        last = max((record.round for record in newest), default=0)
        found.append(sum(record.round == last for record in newest))
    return found


def most_at_once(*jobs: RunningJob) -> Counter[str]:
    """The largest number of workers of all jobs that have trained on a host at the same time."""
    turns: list[tuple[float, int, str]] = []
    for job in jobs:
        by_worker: dict[tuple[str, int], list[float]] = {}
        for record in job.steps():
            by_worker.setdefault((record.worker, record.pid), []).extend((record.began, record.t))
        for (worker, _pid), times in by_worker.items():
            host = host_of_worker(worker)
            turns += [(min(times), 1, host), (max(times), -1, host)]
    most, now = Counter[str](), Counter[str]()
    for _at, change, host in sorted(turns):
        now[host] += change
        most[host] = max(most[host], now[host])
    return most


class Held:
    """Tells whether a condition has held for some seconds."""

    def __init__(self, look: Callable[[], bool], seconds: float) -> None:
        self._look, self._seconds, self._since = look, seconds, time.monotonic()

    def long_enough(self) -> bool:
        if not self._look():
            self._since = time.monotonic()
        return time.monotonic() - self._since >= self._seconds


def longest_gap(job: RunningJob, since: float) -> float:
    """The longest time between two steps of the job, whoever made them."""
    times = sorted(record.t for record in job.steps() if record.t >= since)
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


@pytest.mark.timeout(450)
@pytest.mark.night  # how fast the jobs are decides, and other tests change that
def test_three_jobs_get_what_helps_most_and_the_rest_shares_the_slots_of_one_that_ends(
    tmp_path: Path,
) -> None:
    hosts = "localhost:2,127.0.0.2:2,127.0.0.3:2,127.0.0.4:1,127.0.0.5:1"
    curves = "1 2 3 4 5 6 7 8", "1 2 2 2 2 2 2 2", "1 1.8 2.4 2.2 2 1.8 1.6 1.4"
    # Other tests run beside this one, and must not change how fast the jobs are.
    calm = {"UNWRAPPED": "1", "NICE": "-15"}
    with contextlib.ExitStack() as stack:
        brain = stack.enter_context(elasticbrain(tmp_path, "-H", hosts))
        a, b, c = (
            stack.enter_context(elasticrun(*brain.for_jobs, *TRAIN, env=env(curve, ms=200) | calm))
            for curve in curves
        )
        context = lambda: f"{sizes(a, b, c)}\n{brain.said()}"  # noqa: E731
        held = Held(lambda: sizes(a, b, c) == [3, 2, 3], SETTLED_S)
        eventually(held.long_enough, within=300, what="3, 2 and 3 workers", context=context)
        ended = time.monotonic()
        c.process.send_signal(signal.SIGTERM)
        assert c.wait() == 143
        gone = time.monotonic()
        rest = lambda: sizes(a, b) == [6, 2]  # noqa: E731
        eventually(rest, within=30, what="6 and 2 workers", context=context)
        assert time.monotonic() - gone < 5.0, f"after {time.monotonic() - ended:.1f} s\n{context()}"
        most = most_at_once(a, b, c)
        slots = {name: int(n) for name, n in (each.split(":") for each in hosts.split(","))}
        assert all(most[host] <= slots[host] for host in slots), most


def test_a_brain_that_is_killed_again_and_again_costs_no_step_and_gives_no_slot_twice(
    tmp_path: Path,
) -> None:
    chance = random.Random(4)
    with contextlib.ExitStack() as stack:
        brain = stack.enter_context(elasticbrain(tmp_path, "-H", "localhost:2,127.0.0.2:2"))
        a, b = (
            stack.enter_context(elasticrun(*brain.for_jobs, *TRAIN, env=env(ms=30)))
            for _ in range(2)
        )
        eventually(lambda: sizes(a, b) == [2, 2], within=120, what="two each", context=brain.said)
        since = time.time()
        for wish in ("3", "1", "auto", "3", "1", "auto"):  # slots move all the time
            where = "--state-dir", str(a.run_dir.parent), "--run-id", a.run_id
            ctl("scale", wish, *where)
            time.sleep(chance.uniform(0.0, 2.0))  # a random moment, on purpose
            brain.kill()
            brain.start_again()
        eventually(lambda: _heard_by(brain, 2), within=20, what="both are heard")
        began = time.monotonic()
        b.process.send_signal(signal.SIGTERM)
        b.wait()
        eventually(lambda: sizes(a) == [4], within=30, what="all slots", context=brain.said)
        assert time.monotonic() - began < 10 + 10, "plans flow again"
        assert all(most_at_once(a, b)[host] <= 2 for host in ("localhost", "127.0.0.2"))
        assert a.events("driver_resumed") == []
        assert longest_gap(a, since) < 3.0


def _heard_by(brain: RunningBrain, jobs: int) -> bool:
    states = [job["state"] for job in brain.status()["jobs"]]
    return states == ["live"] * jobs


def test_a_driver_that_is_killed_and_resumed_keeps_its_slots_under_the_brain(
    tmp_path: Path,
) -> None:
    with contextlib.ExitStack() as stack:
        brain = stack.enter_context(elasticbrain(tmp_path, "-H", "localhost:2,127.0.0.2:2"))
        a, b = (
            stack.enter_context(
                elasticrun(*brain.for_jobs, *TRAIN, env=env(ms=30) | {"UNWRAPPED": "1"})
            )
            for _ in range(2)
        )
        eventually(lambda: sizes(a, b) == [2, 2], within=120, what="two each", context=brain.said)
        a.kill_driver()
        a.start("--resume")
        a.until(lambda: a.events("driver_resumed"), "the next driver")
        eventually(lambda: _heard_by(brain, 2), within=20, what="both are heard")
        eventually(lambda: sizes(a, b) == [2, 2], within=20, what="two each", context=brain.said)
        b.process.send_signal(signal.SIGTERM)
        b.wait()
        eventually(lambda: sizes(a) == [4], within=30, what="all slots", context=brain.said)


def test_a_brain_that_is_stopped_for_a_while_finds_its_jobs_as_they_are(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        brain = stack.enter_context(elasticbrain(tmp_path, "-H", "localhost:2"))
        job = stack.enter_context(elasticrun(*brain.for_jobs, *TRAIN, env=env(ms=30)))
        job.until_size(2, 120)
        since = time.time()
        brain.process.send_signal(signal.SIGSTOP)
        job.until(lambda: "is away; the job keeps its slots" in job.stderr, "a line about it", 60)
        before = set(job.live())
        job.kill(max(before))
        job.until(lambda: len(set(job.live()) - before) == 1, "a worker in its place", 60)
        job.until_size(2)
        brain.process.send_signal(signal.SIGCONT)
        job.until(lambda: "is back" in job.stderr, "a line that it is back", 60)
        eventually(lambda: _heard_by(brain, 1), within=20, what="it is heard")
        eventually(lambda: sizes(job) == [2], within=20, what="both train", context=job.describe)
        assert longest_gap(job, since) < 20.0
