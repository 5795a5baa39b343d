"""When a training thread has stood still for too long, and where it is seen to stand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import elastic_driver as elastic
from elastic_driver.words.wire_events import WorkerResumed, WorkerStalled
from elastic_driver.worker.heartbeat import watches
from elastic_driver.worker.heartbeat.training_progress import TrainingProgress
from elastic_driver.worker.heartbeat.watches import StallWatch, TrainingThread
from elastic_driver.worker.world import session
from elastic_driver.worker.world.member import JobMembership
from tests.support.job import eventually


def training(*, step_s: float = 1.0, steps: int = 10, limit: float | None = None) -> StallWatch:
    """A thread that has made these steps in round 1, the last one at time 0."""
    progress = TrainingProgress()
    progress.enter(1, 0)
    progress.active_at = -step_s * steps
    for number in range(steps):
        progress.record_step(-step_s * (steps - 1 - number))
    return StallWatch("a.0.1", progress, limit)


def progress_of(stalls: StallWatch) -> TrainingProgress:
    return stalls._progress


@pytest.mark.parametrize(("step_s", "limit"), [(0.01, 60.0), (1.0, 60.0), (10.0, 200.0)])
def test_the_limit_adapts_to_the_usual_step(step_s: float, limit: float) -> None:
    assert training(step_s=step_s).limit() == pytest.approx(limit)


def test_a_slow_first_step_does_not_blow_up_the_limit() -> None:
    stalls = training(step_s=1.0, steps=3)
    progress_of(stalls).step_times.appendleft(300.0)
    assert stalls.limit() == 60.0


@pytest.mark.parametrize(("limit", "least"), [(None, watches.FIRST_STEP_S), (1.0, 5.0)])
def test_in_the_first_step_of_a_process_only_waiting_in_a_collective_is_a_stall(
    limit: float | None,
    least: float,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    progress = TrainingProgress()
    progress.enter(1, 0)
    progress.active_at = 0.0
    monkeypatch.setattr(TrainingThread, "look", lambda _thread: ("elsewhere", ""))
    monkeypatch.setattr(watches.time, "process_time", lambda: 0.0)
    assert StallWatch("a.0.1", progress, limit).check(1e9) is None, "it may compile"
    stalls = StallWatch("a.0.1", progress, limit)
    monkeypatch.setattr(TrainingThread, "look", lambda _thread: ("collective", ""))
    assert stalls.check(least - 0.1) is None
    told = stalls.check(least)
    assert isinstance(told, WorkerStalled)
    assert told.where == "collective"
    capfd.readouterr()


def test_a_process_that_computes_before_its_first_step_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = [0.0]
    monkeypatch.setattr(TrainingThread, "look", lambda _thread: ("collective", ""))
    monkeypatch.setattr(watches.time, "process_time", lambda: used[0])
    progress = TrainingProgress()
    progress.enter(1, 0)
    progress.active_at = 0.0
    stalls = StallWatch("a.0.1", progress, 1.0)
    assert stalls.check(1.0) is None
    used[0] = 20.0  # another thread of it compiles
    assert stalls.check(100.0) is None


def test_the_first_step_of_a_later_round_gets_more_time() -> None:
    for limit, expected in (
        (None, watches.FIRST_STEP_S),
        (2.0, 2.0 * watches.FIRST_STEP_FACTOR),
    ):
        stalls = training(limit=limit)
        progress_of(stalls).enter(2, 10)
        assert stalls.limit() == expected


def test_between_two_rounds_and_where_it_is_switched_off_nothing_is_a_stall() -> None:
    stalls = training()
    progress_of(stalls).leave()
    assert stalls.check(1e9) is None
    assert training(limit=0.0).check(1e9) is None


def test_a_stall_is_told_once_then_each_time_it_has_doubled(capfd: pytest.CaptureFixture) -> None:
    stalls = training(limit=3.0)
    assert stalls.check(2.9) is None
    assert stalls.due(2.0) == pytest.approx(1.0)
    first = stalls.check(3.0)
    assert isinstance(first, WorkerStalled)
    assert (first.worker, first.round, first.seconds) == ("a.0.1", 1, 3.0)
    assert "test_a_stall_is_told_once" in first.stack
    assert stalls.check(5.9) is None
    again = stalls.check(6.0)
    assert isinstance(again, WorkerStalled)
    assert (first.first, again.first) == (0.0, 3.0)
    said = capfd.readouterr().err
    assert said.count("no progress for") == 1
    assert "test_stall_watch.py" in said, "with the stacks"


def test_progress_after_a_stall_is_told(capfd: pytest.CaptureFixture) -> None:
    stalls = training(limit=3.0)
    assert isinstance(stalls.check(3.0), WorkerStalled)
    progress_of(stalls).record_step(3.5)
    assert stalls.check(3.6) == WorkerResumed("a.0.1", 1)
    assert stalls.check(3.7) is None
    assert "no progress" in capfd.readouterr().err


def test_progress_in_another_round_needs_no_word(capfd: pytest.CaptureFixture) -> None:
    stalls = training(limit=3.0)
    stalls.check(3.0)
    progress_of(stalls).enter(2, 10)
    progress_of(stalls).active_at = 4.0
    assert stalls.check(4.1) is None
    capfd.readouterr()


def test_a_thread_that_computes_gets_more_time_unless_the_user_set_a_limit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    used = [0.0]
    monkeypatch.setattr(TrainingThread, "look", lambda _thread: ("elsewhere", ""))
    monkeypatch.setattr(TrainingThread, "cpu_seconds", lambda _thread: used[0])
    adaptive, fixed = training(), training(limit=60.0)
    for stalls in (adaptive, fixed):
        stalls.check(1.0)
    used[0] = 30.0
    assert adaptive.check(61.0) is None
    assert isinstance(fixed.check(61.0), WorkerStalled)
    assert isinstance(adaptive.check(600.0), WorkerStalled)
    capfd.readouterr()


@contextmanager
def thread_in(filename: str) -> Iterator[StallWatch]:
    """A watch on a thread that waits in a function of a file of this name."""
    made: list[StallWatch] = []
    gate = threading.Lock()

    def make() -> None:
        made.append(training(limit=3.0))

    code = compile("def run(make, gate):\n    make()\n    gate.acquire()\n", filename, "exec")
    namespace: dict[str, Callable[..., None]] = {}
    exec(code, namespace)  # noqa: S102 - a frame with a chosen file name
    with gate:
        thread = threading.Thread(target=namespace["run"], args=(make, gate))
        thread.start()
        eventually(lambda: made, within=5, what="the thread waits")
        yield made[0]
    thread.join(5)


@pytest.mark.parametrize(
    ("filename", "where"),
    [
        ("/x/torch/distributed/distributed_c10d.py", "collective"),
        ("/x/torch/nn/parallel/distributed.py", "collective"),
        ("/x/torch/autograd/graph.py", "collective"),
        ("/x/elastic_driver/worker/batching/layout.py", "collective"),
        ("/x/torch/utils/data/dataloader.py", "elsewhere"),
        ("/home/me/train.py", "elsewhere"),
    ],
)
def test_where_a_thread_stands_is_told_by_its_innermost_frame(
    filename: str, where: str, capfd: pytest.CaptureFixture
) -> None:
    with thread_in(filename) as stalls:

        def stands() -> bool:
            news = stalls.check(3.0)
            progress_of(stalls).active_at = 0.0
            stalls._stall = None
            return isinstance(news, WorkerStalled) and news.where == where

        eventually(stands, within=5, what=f"it stands {where}")
    capfd.readouterr()


# ---- what scripts say --------------------------------------------------------------------


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> JobMembership:
    """A process that is in a world, as far as `elastic.busy` and its like can tell."""
    made = JobMembership(None)
    made.progress.enter(1, 0)
    monkeypatch.setattr(session._Session, "membership", made)
    return made


def test_whoever_says_that_it_is_busy_may_be_silent_for_as_long(member: JobMembership) -> None:
    member.progress.record_step(member.progress.active_at + 0.01)
    stalls = StallWatch("a.0.1", member.progress, 1.0)
    with elastic.busy("evaluation", within=100.0):
        began = member.progress.busy_until - 100.0
        assert stalls.check(began + 99.0) is None
        with elastic.busy("a part of it", within=10.0):
            assert stalls.check(began + 99.0) is None, "the later end counts"
        assert stalls.check(began + 99.0) is None
        assert isinstance(stalls.check(began + 101.5), WorkerStalled)
    assert member.progress.busy_until == 0.0


def test_being_busy_ends_with_an_exception_too(member: JobMembership) -> None:
    with pytest.raises(ValueError, match="of the script"), elastic.busy("checkpoint"):
        raise ValueError("of the script")
    assert member.progress.busy_until == 0.0


def test_a_report_is_a_sign_of_life_and_with_a_step_it_counts_as_one(member: JobMembership) -> None:
    before = member.progress.active_at
    elastic.report_progress()
    assert member.progress.active_at >= before
    assert (member.progress.reported_steps, len(member.progress.step_times)) == (0, 0)
    elastic.report_progress(step=1, samples=32)
    assert (member.progress.reported_steps, len(member.progress.step_times)) == (1, 1)
    assert member.progress.steps == 0, "nothing was committed"


def test_outside_of_a_job_both_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session._Session, "membership", None)
    elastic.report_progress(step=1)
    with elastic.busy("evaluation"):
        pass
