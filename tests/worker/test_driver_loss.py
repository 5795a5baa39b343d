"""Real workers whose driver dies and is followed by the driver of the next term, or by none."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from elastic_driver import contract
from elastic_driver.words.wire_events import WorkerReady
from elastic_driver.worker.checkpoints import folder as folders
from tests.support.coordinator import Coordinator, eventually
from tests.worker import training
from tests.worker.test_recovery import assert_every_step_once_and_equal_everywhere


def ready_events(job: Coordinator, worker: str) -> list[WorkerReady]:
    """Every READY of a worker so far, in order."""
    found = list(job.events)
    return [e for e in found if isinstance(e, WorkerReady) and e.worker == worker]


def waits(job: Coordinator, worker: str) -> bool:
    """Return whether a worker has made no step for a second."""
    return time.time() - float(job.newest(worker)["t"]) > 1.0


def test_a_worker_that_waits_is_ready_for_the_next_driver_too(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.steps, 20) as job:
        job.automatic = False
        workers = job.start(2)
        eventually(lambda: len(job.ready) == 2, "both are READY")
        job.server.stop()
        job.ready.clear()  # the answers were lost with the driver
        job.come_back()
        eventually(lambda: len(job.ready) == 2, "both are READY again")
        for worker in workers:
            first, *later = ready_events(job, worker)
            assert later == [first], "it is the same report"
        job.form()
        assert job.wait(workers) == [0, 0]
        assert_every_step_once_and_equal_everywhere(job, 20)


def test_ready_is_sent_once_while_there_is_one_driver(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.steps, 5) as job:
        workers = job.start(2)
        assert job.wait(workers) == [0, 0]
        assert [len(ready_events(job, worker)) for worker in workers] == [1, 1]


def test_survivors_of_a_worker_that_died_without_a_driver_go_on_with_the_next_one(
    tmp_path: Path,
) -> None:
    with Coordinator(tmp_path, training.steps, 100000) as job:
        alive = job.start(3)
        job.until_step(10, alive)
        job.server.stop()
        job.kill(alive.pop(), notice=False)
        reached = job.newest(alive[0])["step"]
        eventually(lambda: all(waits(job, w) for w in alive), "they wait for a driver")
        job.come_back()
        job.until_step(reached + 10, alive, 2)
        last = min(job.newest(worker)["step"] for worker in alive)
        assert_every_step_once_and_equal_everywhere(job, last)
        assert all(job.said(w).count("the driver does not answer") <= 1 for w in alive)


def test_a_meeting_ends_when_the_next_driver_has_not_its_keys(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.steps, 100000) as job:
        alive = job.start(2)
        job.until_step(1, alive)
        job.automatic = False
        job.function, job.args = training.dies_while_joining, ()
        (lost,) = job.start(1)
        eventually(lambda: lost in job.ready, "it is READY")
        job.leave_now("a newcomer")
        eventually(lambda: len(job.ready) == 3, "all are READY")
        job.form()
        assert job.wait([lost]) == [9]
        job.forget(lost)
        del job.processes[lost]  # it made no step
        job.server.stop()
        job.automatic = True
        back_at = time.monotonic()
        job.come_back()
        job.until_step(job.newest(alive[0])["step"] + 5, alive, 3)
        assert time.monotonic() - back_at < 30, "they did not wait for the lost one"
        assert not job.stepped(2), "no step was made in round 2"
        last = min(job.newest(worker)["step"] for worker in alive)
        assert_every_step_once_and_equal_everywhere(job, last)


def test_a_worker_that_starts_without_a_driver_waits_for_the_next_one(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.steps, 5) as job:
        job.environment = {contract.DRIVER_TIMEOUT: "60"}
        job.server.stop()
        workers = job.start(1)
        eventually((tmp_path / f"{workers[0]}.err").exists, "it has begun")
        job.come_back()
        assert job.wait(workers) == [0]


def test_a_worker_that_finds_no_driver_at_all_ends_with_one_line(tmp_path: Path) -> None:
    with Coordinator(tmp_path, training.steps, 5) as job:
        job.environment = {contract.DRIVER_TIMEOUT: "0.5"}
        job.server.stop()
        workers = job.start(1)
        assert job.wait(workers) == [75]
        (line,) = job.said(workers[0]).splitlines()
        assert "no driver came within --driver-timeout" in line
        job.come_back()


# ---- the next driver does not come -------------------------------------------------------


def leaving(tmp_path: Path, function: Any, *args: Any) -> Coordinator:
    """Return a job whose workers wait a second for the next driver, and have a notice of 20 s."""
    job = Coordinator(tmp_path, function, *args)
    job.environment = {contract.DRIVER_TIMEOUT: "1", contract.LEAVE_NOTICE: "20"}
    return job


def tell_to_leave(job: Coordinator, workers: list[str]) -> None:
    """Do what their agents do when the wait for the next driver is over."""
    for worker in workers:
        os.kill(job.pid(worker), signal.SIGTERM)


def checkpoint_of(folder: Path) -> int:
    """Return the step of the only complete checkpoint."""
    (found,) = [path for path in folders.checkpoints(folder) if folders.is_complete(path)]
    folders.verified(found)
    return folders.version_of(found)


def test_workers_leave_after_a_common_step_with_a_checkpoint_when_no_driver_comes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    with leaving(tmp_path, training.steps_with_checkpoints, str(folder)) as job:
        workers = job.start(3)
        job.until_step(10, workers)
        job.server.stop()
        gone_at = time.time()
        eventually(lambda: all(job.newest(w)["t"] > gone_at + 1 for w in workers), "they train on")
        for worker in workers:  # not all at the same moment
            tell_to_leave(job, [worker])
            eventually(lambda w=worker: "leaving after the next step" in job.said(w), "it says so")
        assert job.wait(workers) == [75, 75, 75]
        last = {job.newest(worker)["step"] for worker in workers}
        assert len(last) == 1, "all left after the same step"
        assert checkpoint_of(folder) == last.pop()
        assert not list(folder.glob("leaving-*"))
        assert_every_step_once_and_equal_everywhere(job, job.newest(workers[0])["step"])
        job.come_back()


def test_survivors_that_wait_write_the_last_commit_when_no_driver_comes(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with leaving(tmp_path, training.steps_with_checkpoints, str(folder)) as job:
        alive = job.start(3)
        job.until_step(10, alive)
        job.server.stop()
        job.kill(alive.pop(), notice=False)
        eventually(lambda: all(waits(job, w) for w in alive), "they wait for a driver")
        tell_to_leave(job, alive)
        assert job.wait(alive) == [75, 75]
        assert checkpoint_of(folder) == max(job.newest(worker)["step"] for worker in alive)
        job.come_back()


def test_workers_without_checkpoints_leave_after_a_common_step_too(tmp_path: Path) -> None:
    with leaving(tmp_path, training.steps, 100000) as job:
        workers = job.start(2)
        job.until_step(10, workers)
        job.server.stop()
        gone_at = time.time()
        eventually(lambda: all(job.newest(w)["t"] > gone_at + 1 for w in workers), "they train on")
        tell_to_leave(job, workers)
        assert job.wait(workers) == [75, 75]
        assert len({job.newest(worker)["step"] for worker in workers}) == 1
        assert "is not on disk: it has no checkpoint_dir" in job.said(workers[0])
        job.come_back()
