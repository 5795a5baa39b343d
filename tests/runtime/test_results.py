"""The result of a job: of each slot of its last round, bounded, and read from the log."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import asdict

from elastic_driver.job.decisions import Announce, EndJob
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.runtime.results import (
    ALL_WORDS_CHARS,
    LINE_CHARS,
    WORDS_CHARS,
    JobResult,
    WorkerResults,
    read_result,
)
from elastic_driver.words.findings import Failure
from elastic_driver.words.log_lines import KINDS
from elastic_driver.words.orders import World
from elastic_driver.words.wire_events import WorkerExited
from elastic_driver.words.world import Member, SlotInfo

BOOM = "noise\nTraceback (most recent call last):\n  File 'x'\nValueError: boom"


def world_of(round_id: int, *workers: str) -> World:
    size = len(workers)
    places = [SlotInfo("a", n, n, n, 0, size, size, 1, 0, 1) for n in range(size)]
    return World(round_id, [Member(w, p) for w, p in zip(workers, places, strict=True)], "ready")


def announced(name: str, worker: str, rank: int = 0, **detail: bool) -> Announce:
    host, slot, _ = worker.rsplit(".", 2)
    return Announce(KINDS[name](**detail), "why", 1, host, int(slot), rank, 7, worker)


def run(
    results: WorkerResults,
    worker: str,
    code: int,
    *,
    rank: int = 0,
    tail: str = "",
    told: bool = False,
) -> None:
    """Have a worker start at 10 s and end at 14.5 s."""
    results.note(announced("worker_started", worker, rank), None, 10.0)
    exited = announced("worker_exited", worker, rank, expected=told)
    results.note(exited, WorkerExited(worker, code, tail), 14.5)


def ended(results: WorkerResults) -> JobResult:
    return results.of_job(EndJob(0, "all finished"), 20.0)


def test_every_worker_has_its_exit_code_times_and_last_words_by_rank() -> None:
    results = WorkerResults()
    run(results, "b.0.1", 0, rank=1)
    run(results, "a.0.1", 3, rank=0, tail=BOOM)
    first, second = ended(results).workers
    assert (first.worker, first.exit_code, first.pid, first.rank) == ("a.0.1", 3, 7, 0)
    assert (first.ended, first.seconds) == (14.5, 4.5)
    assert first.last_words == BOOM.removeprefix("noise\n")
    assert (second.worker, second.exit_code, second.last_words) == ("b.0.1", 0, "")


def test_a_worker_that_is_lost_with_its_host_has_no_exit_code() -> None:
    results = WorkerResults()
    results.note(announced("worker_started", "a.0.1"), None, 10.0)
    results.note(announced("worker_lost", "a.0.1"), None, 12.0)
    (lost,) = ended(results).workers
    assert (lost.exit_code, lost.reason, lost.seconds) == (None, "why", 2.0)


def test_a_worker_that_hung_has_the_code_it_was_killed_with() -> None:
    results = WorkerResults()
    results.note(announced("worker_started", "a.0.1"), None, 10.0)
    results.world_published(world_of(1, "a.0.1"))
    results.note(announced("worker_hung", "a.0.1"), None, 12.0)
    exited = announced("worker_exited", "a.0.1", expected=True)
    results.note(exited, WorkerExited("a.0.1", -9, ""), 12.5)
    (hung,) = ended(results).workers
    assert (hung.exit_code, hung.seconds) == (-9, 2.5)


def test_failures_that_the_job_went_on_from_are_no_results_but_finished_workers_are() -> None:
    results = WorkerResults()
    results.world_published(world_of(1, "a.0.1", "a.1.1", "a.2.1"))
    run(results, "a.0.1", 0)
    run(results, "a.1.1", 1, tail=BOOM)
    results.world_published(world_of(2, "a.2.1"))
    run(results, "a.3.1", -15, told=True)  # stopped before it took part
    run(results, "a.2.1", 0)
    assert [r.worker for r in ended(results).workers] == ["a.0.1", "a.2.1"]


def test_a_slot_has_one_result_however_often_its_workers_fail() -> None:
    results = WorkerResults()
    for number in range(1000):
        run(results, f"a.0.{number}", 1, tail=BOOM)
    assert [r.worker for r in ended(results).workers] == ["a.0.999"]


def test_the_last_words_of_ten_thousand_workers_are_bounded() -> None:
    results = WorkerResults()
    for slot in range(10_000):
        run(results, f"a.{slot}.1", 1, rank=slot, tail="x" * 5000 + "\n" + "y" * 5000)
    words = [len(r.last_words) for r in ended(results).workers]
    assert len(words) == 10_000
    assert max(words) == WORDS_CHARS
    assert sum(words) <= ALL_WORDS_CHARS + WORDS_CHARS + 10_000 * LINE_CHARS


def test_the_results_are_read_again_from_the_log_of_the_last_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_result(path) is None
    log = EventLog(path, clock=lambda: 20.0, on_broken=print)
    log.open()
    log.append("job_started")
    log.append("job_failed", reason="an earlier run", exit_code=1)
    log.append("job_started")
    log.append("worker_exited", worker="a.0.1", exit_code=3, expected=False)
    assert read_result(path) is None, "it runs, or its driver was killed"
    results = WorkerResults()
    run(results, "a.0.1", 3, tail=BOOM)
    failure = Failure("a.0.1", 0, "a", 7, 3, BOOM)
    result = results.of_job(EndJob(3, "rank 0 failed", failure), 20.0)
    for worker in result.workers:
        log.append("worker_result", **asdict(worker))
    log.append("job_failed", reason="rank 0 failed", exit_code=3, first_failure=result.failure)
    log.close()
    with path.open("ab") as file:
        file.write(b'{"cut')
    assert read_result(path) == result


def test_a_job_that_was_stopped_before_it_had_a_world_lists_its_workers() -> None:
    results = WorkerResults()
    run(results, "a.0.1", -2, told=True)
    assert [(w.worker, w.exit_code) for w in ended(results).workers] == [("a.0.1", -2)]
