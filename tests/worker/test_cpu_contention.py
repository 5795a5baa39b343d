"""What other programs take from a measurement, as the kernel tells it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_driver.worker.heartbeat import training_progress as progress
from tests.support.slowing import slowed


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize("timer", [progress.cpu_of_thread, progress.cpu_of_process])
def test_the_time_at_work_is_told_and_no_more_is_lost_than_has_passed(
    timer: Callable[[], progress.CpuAccount],
) -> None:
    began, account = time.perf_counter(), timer()
    before = account()
    spin(0.05)
    told = account().since(before)
    passed = time.perf_counter() - began
    assert told.ran > 0.04
    assert told.waited >= 0.0
    assert told.ran + told.waited < passed + 0.05, "this process has other threads, that sleep"


def test_the_work_of_other_threads_belongs_to_the_process_and_not_to_the_thread() -> None:
    own, everybody = progress.cpu_of_thread(), progress.cpu_of_process()
    before = own(), everybody()
    done, seen = threading.Event(), threading.Event()

    def work() -> None:
        spin(0.1)
        done.set()
        seen.wait(10)

    other = threading.Thread(target=work)
    other.start()
    assert done.wait(60)
    told = own().since(before[0]), everybody().since(before[1])
    seen.set()
    other.join()
    assert told[0].ran < 0.09 < told[1].ran


def test_where_the_kernel_says_nothing_all_of_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_THIS_THREAD", tmp_path / "none")
    account = progress.cpu_of_thread()
    before = account()
    spin(0.01)
    assert account().since(before) == (0.0, 0.0, 0)


def test_time_lost_to_a_quota_counts() -> None:
    """Two threads that want a tenth of a processor lose time to each other, and to the quota."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until we have a quota
        account = progress.cpu_of_thread()
        before = account()
        spin(0.05)
        os._exit(0 if account().since(before).waited == 0.0 else 1)
    os.close(reading)
    with slowed(child, 0.1) as how:
        os.close(writing)
        _, status = os.waitpid(child, 0)
    if how != "quota":
        pytest.skip("no control group could be made here")
    assert os.waitstatus_to_exitcode(status) == 0
