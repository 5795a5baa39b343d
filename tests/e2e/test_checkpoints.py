"""Durable checkpoints of whole jobs: everybody is killed, the size changes, the disk is full."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from tests.support.job import JOBS, RunningJob, elasticrun

JOB = str(JOBS / "durable.py")


def environment(folder: Path, steps: int, **more: str) -> dict[str, str]:
    return {"CHECKPOINTS": str(folder), "STEPS": str(steps), **more}


def complete(folder: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    return sorted(int(p.parent.name.split("-")[1]) for p in folder.glob("step-*/manifest.json"))


def entered(job: RunningJob) -> list[tuple[int, str]]:
    """(step, weights) whenever a worker entered training, by time."""
    found = re.findall(r"enters step=(\d+) version=(\d+) weights=(\w+)", job.stdout)
    assert all(step == version for step, version, _ in found)
    return [(int(step), weights) for step, _, weights in found]


def final_weights(job: RunningJob) -> set[str]:
    return set(re.findall(r"done step=\d+ size=\d+ weights=(\w+)", job.stdout))


def weights_by_step(job: RunningJob) -> dict[int, set[str]]:
    """All fingerprints that any worker ever had after a step."""
    found: dict[int, set[str]] = {}
    for path in (job.folder / "steps").glob("*.weights"):
        for line in path.read_text().splitlines():
            step, _, weights = line.partition(" ")
            found.setdefault(int(step), set()).add(weights)
    return found


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65536))


def trained_seconds(job: RunningJob) -> float:
    times = [r.t for r in job.steps()]
    return max(times) - min(times) if times else 0.0


def test_a_job_whose_workers_are_all_killed_goes_on_from_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoints = tmp_path / "checkpoints"
    env = environment(checkpoints, 100000)
    with elasticrun("-np", "3", "--", JOB, env=env) as job:
        job.until(lambda: len(complete(checkpoints)) >= 2, "two checkpoints are complete")
        # A job is restarted from nothing only if it is known to have got somewhere.
        job.until(lambda: trained_seconds(job) > 3, "every heartbeat has told of a step")
        members, newest = job.until_size(3), complete(checkpoints)[-1]
        for pid in members:
            job.kill(pid)
        again = job.until_size(3)
        assert not set(again) & set(members)
        resumed = set(entered(job)[3:])
        assert len(resumed) == 1, "all go on from the same step with the same weights"
        ((step, weights),) = resumed
        assert step >= newest
        assert step % 20 == 0
        assert weights in weights_by_step(job)[step], "the state is the one of that step"
        last = min(r.step for r in again.values())
        assert {r.step for r in job.steps()} >= set(range(1, last + 1))
        assert "going on from step" in job.stderr
        written = complete(checkpoints)[-1]
        job.until(lambda: complete(checkpoints)[-1] > written, "checkpoints go on")


@pytest.mark.slow
def test_a_new_job_of_any_size_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    last: set[str] = set()
    for index, workers in enumerate((3, 1, 2)):
        with elasticrun(
            "-np", str(workers), "--", JOB, env=environment(checkpoints, 20 * (index + 1))
        ) as job:
            assert job.wait(60) == 0, job.describe()
            starts = entered(job)
            assert [step for step, _ in starts] == [20 * index] * workers
            if last:
                assert {weights for _, weights in starts} == last
            last = final_weights(job)
            assert len(last) == 1
    assert complete(checkpoints) == [20, 40, 60]


def test_a_newcomer_that_joins_a_resumed_job_starts_with_its_state(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    with elasticrun("-np", "2", "--", JOB, env=environment(checkpoints, 20)) as job:
        assert job.wait(60) == 0, job.describe()
    with elasticrun("-np", "3", "--", JOB, env=environment(checkpoints, 100000)) as job:
        members = job.until_size(3)
        victim = max(members, key=lambda pid: members[pid].rank)
        job.kill(victim)
        again = job.until_size(3)
        assert min(r.step for r in again.values()) > 20
        assert not any(step < 20 for step, _ in entered(job))
        written = complete(checkpoints)[-1]
        job.until(lambda: complete(checkpoints)[-1] >= written + 40, "checkpoints go on")


def test_a_folder_that_cannot_be_used_is_said_and_does_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    env = environment(tmp_path / "a file" / "checkpoints", 60)
    with elasticrun("-np", "2", "--", JOB, env=env) as job:
        assert job.wait(60) == 0, job.describe()
        assert len(final_weights(job)) == 1
        lines = [line for line in job.stderr.splitlines() if "Not a directory" in line]
        assert 1 <= len(lines) <= 4, "said, and not at each of the three checkpoints"
        assert "training goes on" in lines[0]
        assert "Traceback" not in job.stderr


def test_a_full_disk_costs_checkpoints_and_not_the_job(small_disk: Path) -> None:
    checkpoints, filler = small_disk / "checkpoints", small_disk / "filler"
    env = environment(checkpoints, 100000, WIDTH="20000")  # 5 MB each
    with elasticrun("-np", "2", "--", JOB, env=env) as job:
        job.until(lambda: complete(checkpoints), "a checkpoint is complete")
        fill(filler)
        job.until(lambda: "No space left on device" in job.stderr, "the full disk is said")
        last = complete(checkpoints)[-1]
        job.until(lambda: job.steps()[-1].step > last + 60, "training goes on meanwhile")
        filler.unlink()
        job.until(lambda: "checkpoints are written again" in job.stderr, "its end as well")
        assert complete(checkpoints)[-1] > last
        said = [line for line in job.stderr.splitlines() if "is not written" in line]
        assert 1 <= len(said) <= 2, "once, or once for each rank"
        assert job.rounds() == [2], "nobody had to start again"
