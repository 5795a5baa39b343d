"""SIGTERM to every process of a job, as batch systems and service managers send it.

In whatever order it comes, once or twice: one leaving, with a checkpoint of the last common step,
from which the job goes on to the weights of a job that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.job import JOBS, RunningJob, elasticrun
from tests.support.processes import descendants

JOB = str(JOBS / "loader.py")
HOSTS = ("-H", "localhost:1,127.0.0.2:1", "-np", "2", "--min-np", "1", "--debug")
MANY = 100_000
MOST = 1_000  # steps that are made in the seconds of a test

Times = Callable[[RunningJob], list[tuple[float, int]]]  # of the signals: seconds, pid


def environment(folder: Path, steps: int, loaders: int, **more: str) -> dict[str, str]:
    return {"CHECKPOINTS": str(folder), "STEPS": str(steps), "LOADERS": str(loaders), **more}


def roles(job: RunningJob) -> dict[str, list[int]]:
    """The pids of the job's processes, by what they are."""
    driver = psutil.Process(job.process.pid)
    workers, agents = list(job.live()), job.agents()
    loaders = [child.pid for worker in workers for child in descendants(worker)]
    known = {*workers, *agents, *loaders}
    others = [child.pid for child in descendants(driver.pid) if child.pid not in known]
    return {
        "driver": [driver.pid],
        "agents": agents,
        "workers": workers,
        "loaders": loaders,
        "others": others,
    }


def began_at(pid: int) -> float | None:
    """When a process began; None once it has ended, as those of a discovery script soon do."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(psutil.Process(pid).create_time())
    return None


def in_order(*first: str, apart: float) -> Times:
    """These roles first, the others `apart` seconds later."""

    def times(job: RunningJob) -> list[tuple[float, int]]:
        found = roles(job)
        return [(apart * (role not in first), pid) for role in found for pid in found[role]]

    return times


def shuffled(seed: int, spread: float, again: bool) -> Times:
    """Each process at a time of its own, within `spread` seconds; `again`: twice."""

    def times(job: RunningJob) -> list[tuple[float, int]]:
        chance = random.Random(seed)
        pids = [pid for found in roles(job).values() for pid in found]
        return [(chance.uniform(0, spread), pid) for pid in pids for _ in range(1 + again)]

    return times


def send(job: RunningJob, times: list[tuple[float, int]]) -> None:
    began = time.monotonic()
    starts = {pid: began_at(pid) for _, pid in times}
    for at, pid in sorted(times):
        time.sleep(max(0.0, began + at - time.monotonic()))  # it is the time that is tested
        if starts[pid] is not None and began_at(pid) == starts[pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def weights(job: RunningJob) -> str:
    found = set(re.findall(r"done step=\d+ weights=(\w+)", job.stdout))
    assert len(found) == 1, job.describe()
    return found.pop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The weights after each step of a job that nobody disturbs, and that reads by itself."""
    folder = tmp_path_factory.mktemp("undisturbed")
    env = environment(folder / "none", MOST, 0, TRAIL=str(folder / "trail"), STEP_MS="0")
    with elasticrun(*HOSTS, "--", JOB, env=env) as job:
        assert job.wait(100) == 0, job.describe()
    lines = (folder / "trail").read_text().splitlines()
    return {int(step): found for step, found in map(str.split, lines)}


def assert_leaves_well(
    folder: Path, undisturbed: dict[int, str], times: Times, loaders: int, **more: str
) -> None:
    checkpoints = folder / "checkpoints"
    env = environment(checkpoints, MANY, loaders, **more)
    with elasticrun(*HOSTS, "--", JOB, env=env) as job:
        job.until_size(2)
        job.until(lambda: max(r.step for r in job.steps()) >= 20, "it trains")
        send(job, times(job))
        assert job.wait(60) == 143, job.describe()
        job.assert_nothing_left()
        last = job.stderr.splitlines()[-1]
        found = re.search(r"the state of step (\d+) is in .*started again, the job goes on", last)
        assert found, job.describe()
        step = int(found[1])
        sizes = {record.size for record in job.steps()}
        assert sizes == {2}, f"no world of another size has trained: {sizes}\n{job.describe()}"
        assert step == max(r.step for r in job.steps()), job.describe()
        assert not job.events("worker_lost", "agent_lost", "worker_hung")
    end = step + 20
    with elasticrun(*HOSTS, "--", JOB, env=environment(checkpoints, end, loaders)) as job:
        assert job.wait(60) == 0, job.describe()
        assert f"enters step={step} size=2" in job.stdout
        assert weights(job) == undisturbed[end]


@pytest.mark.parametrize("loaders", [pytest.param(0, marks=pytest.mark.night), 2])
@pytest.mark.parametrize(
    "first",
    [
        ("driver",),
        ("agents",),
        ("workers",),
        ("workers", "loaders"),
        ("driver", "agents", "workers", "loaders", "others"),
    ],
    ids="-".join,
)
def test_whoever_is_told_first(
    tmp_path: Path, undisturbed: dict[int, str], first: tuple[str, ...], loaders: int
) -> None:
    assert_leaves_well(tmp_path, undisturbed, in_order(*first, apart=1.5), loaders)


def test_the_processes_of_loaders_may_be_told_first(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    assert_leaves_well(tmp_path, undisturbed, in_order("loaders", apart=1.5), 2)


def test_what_fails_after_the_notice_fails_because_of_it(
    tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    assert_leaves_well(tmp_path, undisturbed, in_order("workers", apart=1.5), 0, HELPER="1")


@pytest.mark.parametrize(
    ("seed", "again"), [(1, False), pytest.param(2, True, marks=pytest.mark.night), (3, True)]
)
def test_in_any_order_and_twice(
    tmp_path: Path, undisturbed: dict[int, str], seed: int, again: bool
) -> None:
    assert_leaves_well(tmp_path, undisturbed, shuffled(seed, 4.0, again), 2)


@pytest.mark.parametrize("loaders", [0, 2])
def test_elasticrun_may_be_killed_meanwhile(tmp_path: Path, loaders: int) -> None:
    """Slurm kills what a batch script leaves behind, and bash dies of SIGTERM at once."""
    checkpoints = tmp_path / "checkpoints"
    env = environment(checkpoints, MANY, loaders)
    args = (*HOSTS, "--grace-period", "20")
    with elasticrun(*args, "--", JOB, env=env) as job:
        job.until_size(2)
        job.until(lambda: max(r.step for r in job.steps()) >= 20, "it trains")
        found = roles(job)
        times = [(0.0, pid) for role in ("loaders", "workers", "agents") for pid in found[role]]
        job.process.kill()
        job.process.wait(10)
        send(job, times)
        job.until_without_driver(lambda: not job.processes(), "all of its processes have ended")
        (folder,) = checkpoints.glob("step-*")
        step = int(folder.name.split("-")[1])
        assert {r.step for r in job.live().values()} <= {step}, job.describe()
        assert step == max(r.step for r in job.steps()), job.describe()
