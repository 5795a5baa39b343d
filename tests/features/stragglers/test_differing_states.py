"""Ranks that hold different states: from their heartbeats to a repair or an end of the job."""

from __future__ import annotations

from elastic_driver import contract
from elastic_driver.words.orders import StateQuestion, decode_question, encode
from elastic_driver.words.progress import Progress, StateMark
from elastic_driver.words.wire_events import LeafMark, StateDescribed, WorkerEnding
from rendezvous.wire import Set
from tests.runtime.cluster import Cluster
from tests.runtime.jobs import JobUnderTest, StartJob
from tests.runtime.waiting import until

WORKERS = ("a.0.1", "a.1.1", "b.0.1")
LR = "learning rate of group 0 of 'optimizer'"


def mark(cluster: Cluster, round_id: int, step: int, digests: dict[str, str]) -> None:
    """A heartbeat of each worker, with the mark of this step."""
    for worker, digest in digests.items():
        marks = (StateMark(step, digest),)
        document = encode(Progress(round_id, step, 0.1, marks=marks, commits=step))
        cluster.client.batch(Set(contract.worker_progress(worker), document))


def question(cluster: Cluster, round_id: int) -> StateQuestion:
    """The question of this round, once it is there."""

    def look() -> StateQuestion | None:
        entry = cluster.client.get(contract.JOB_STATE)
        asked = None if entry is None else decode_question(entry.value)
        return asked if asked is not None and asked.round == round_id else None

    asked = until(look, f"a question about round {round_id}")
    assert asked is not None
    return asked


def describe(cluster: Cluster, asked: StateQuestion, values: dict[str, str]) -> None:
    for worker, value in values.items():
        leaves = (LeafMark("weight", "aa", "7"), LeafMark(LR, value, value))
        event = StateDescribed(worker, asked.round, asked.step, leaves)
        cluster.client.post_json("/v1/events", encode(event))


def trains(start_job: StartJob, **settings: object) -> tuple[JobUnderTest, int]:
    """Three members, of which none is new: the second round of their job."""
    job = start_job((("a", 2), ("b", 1)), **settings)
    cluster = job.cluster
    cluster.until_workers(*WORKERS)
    cluster.ready(*WORKERS)
    number = cluster.world(1).round
    cluster.ready(*WORKERS, left=number, version=0)
    number = cluster.world(number + 1).round
    for worker in WORKERS:
        cluster.stepped(worker, number)
    return job, number


def test_a_difference_after_a_change_is_shown_and_the_next_world_is_to_be_repaired(
    start_job: StartJob,
) -> None:
    job, number = trains(start_job)
    cluster = job.cluster
    mark(cluster, number, 4, {"a.0.1": "aa", "a.1.1": "aa", "b.0.1": "bb"})
    asked = question(cluster, number)
    assert asked == StateQuestion(number, 4, ("a.0.1", "b.0.1"))
    describe(cluster, asked, {"a.0.1": "0.02", "b.0.1": "0.01"})
    event = cluster.until_event("state_differs", round=number, step=4, action="repair")
    assert event["leaf"] == LR
    assert event["values"] == [
        {"ranks": [0, 1], "value": "0.02"},
        {"ranks": [2], "value": "0.01"},
    ]
    reason = f"{LR} is 0.02 on ranks 0, 1 and 0.01 on rank 2"
    shown = f"elasticrun: the ranks hold different states after step 4 ({reason}; all ranks take"
    until(lambda: shown in job.stderr.getvalue(), shown)
    cluster.ready(*WORKERS, left=number, version=6)
    world = cluster.world(number + 1)
    assert (world.repair, world.size) == (True, 3)
    for worker in WORKERS:
        cluster.stepped(worker, world.round, 7)
    mark(cluster, world.round, 8, dict.fromkeys(WORKERS, "cc"))
    mark(cluster, world.round, 9, {"a.0.1": "dd", "a.1.1": "ee", "b.0.1": "dd"})
    asked = question(cluster, world.round)
    describe(cluster, asked, {"a.0.1": "1", "a.1.1": "2"})
    result = job.outcome()
    assert result.exit_code == 65
    assert f"after step 9: {LR} is 1 on ranks 0, 2 and 2 on rank 1" in result.reason
    assert "job failed: the ranks hold different states after step 9" in job.stderr.getvalue()


def test_a_difference_at_the_very_end_is_found_before_the_job_can_succeed(
    start_job: StartJob,
) -> None:
    job, number = trains(start_job)
    for worker in WORKERS:
        digest = "bb" if worker == "b.0.1" else "aa"
        job.cluster.post(WorkerEnding(worker, number, marks=(StateMark(50, digest),)))
    result = job.outcome()
    assert result.exit_code == 65
    assert "after step 50: ranks 0, 1 and rank 2 differ" in result.reason


def test_ranks_that_do_not_commit_alike_are_named(start_job: StartJob) -> None:
    job, number = trains(start_job)
    for worker, commits in zip(WORKERS, (30, 0, 30), strict=True):
        reported = None if commits else 30
        found = Progress(
            number, commits, 0.1, reported=reported, commits=commits, optimizer_steps=30
        )
        job.cluster.client.batch(Set(contract.worker_progress(worker), encode(found)))
    event = job.cluster.until_event("commits_differ", round=number, kind="no_commits", ranks="1")
    assert event["reason"].startswith("rank 1 has trained at least 8 steps in this round")
    until(lambda: "the ranks do not commit alike (rank 1" in job.stderr.getvalue(), "a line")
