"""What counts as a training thread that sleeps in a collective for good."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import pytest

from elastic_driver.worker.heartbeat import watches
from elastic_driver.worker.heartbeat.watches import TrainingThread
from tests.support.coordinator import eventually


def watched(filename: str, wait: Callable[[], object]) -> TrainingThread:
    """A thread that waits in a function of a file of this name, seen from outside."""
    made: list[TrainingThread] = []
    namespace = {"wait": wait, "made": made, "TrainingThread": TrainingThread}
    code = "def run():\n    made.append(TrainingThread())\n    while not wait(): pass\n"
    exec(compile(code, filename, "exec"), namespace)  # noqa: S102 - a frame with a chosen name
    run = namespace["run"]
    assert callable(run)
    threading.Thread(target=run, daemon=True).start()
    return eventually(lambda: made, "the thread runs")[0]


@pytest.mark.parametrize(
    "filename",
    ["/x/torch/distributed/distributed_c10d.py", "/x/torch/nn/parallel/distributed.py"],
)
def test_a_thread_that_sleeps_in_a_collective_is_counted(filename: str) -> None:
    end = threading.Lock()
    with end:
        thread = watched(filename, end.acquire)
        eventually(lambda: thread.count_asleep() >= 3, "three looks in a row", 5)


def test_a_check_counts_more_if_no_other_thread_could_wake_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = threading.Lock()
    with end:
        thread = watched("/x/torch/distributed/x.py", end.acquire)
        eventually(lambda: thread.count_asleep() > 0, "it sleeps", 5)
        for sleeping, weight in ((True, watches.QUIET_WEIGHT), (False, 1)):
            monkeypatch.setattr(watches, "others_sleep", lambda s=sleeping: s)
            before = thread.count_asleep()
            assert thread.count_asleep() == before + weight


def test_threads_that_run_are_seen() -> None:
    end = threading.Event()
    sleeping = threading.Thread(target=end.wait, daemon=True)
    sleeping.start()
    eventually(watches.others_sleep, "the others sleep", 10)
    hashing = threading.Thread(target=hashlib.sha256, args=(b"x" * 2**29,))
    hashing.start()  # it computes without the interpreter's lock
    eventually(lambda: not watches.others_sleep(), "one of them computes", 10)
    hashing.join()
    end.set()
    sleeping.join()


def test_a_thread_that_waits_elsewhere_is_not() -> None:
    end = threading.Lock()
    with end:
        thread = watched("/x/train.py", end.acquire)
        assert {thread.count_asleep() for _ in range(20)} == {0}


def test_a_thread_that_computes_is_not() -> None:
    end = threading.Event()
    thread = watched("/x/torch/distributed/x.py", end.is_set)
    try:
        looks = []

        def ran() -> bool:
            before = thread.cpu_seconds()
            eventually(lambda: thread.cpu_seconds() > before + 0.01, "it computes", 10)
            looks.append(thread.count_asleep())
            return len(looks) == 5

        eventually(ran, "five looks", 30)
        assert set(looks) == {0}
    finally:
        end.set()
