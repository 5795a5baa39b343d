"""The driver with a real server, the real core, and agents that speak real HTTP to it."""

from __future__ import annotations

import queue
import threading
from functools import partial

import pytest

from elastic_driver import contract
from elastic_driver.errors import ExitCode
from elastic_driver.runtime import driver as driver_module
from elastic_driver.runtime.results import read_result
from elastic_driver.words.orders import JobSpec, Notice, StartWorkerOrder, decode
from elastic_driver.words.wire_events import ScaleRequested, WorkerReady
from rendezvous.wire import Count, Number, Set
from tests.runtime.cluster import Cluster, beating
from tests.runtime.jobs import StartJob
from tests.runtime.waiting import until

A0, A1, A2 = "a.0.1", "a.1.1", "a.2.1"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: boom'
)


# ---- one job, from hosts to exit status --------------------------------------------------


def test_a_job_goes_from_hosts_to_a_world_to_success_and_leaves_nothing(
    start_job: StartJob,
) -> None:
    job = start_job()
    job.cluster.until_workers(A0, A1)
    spec = job.cluster.client.get(contract.JOB_SPEC)
    assert spec is not None
    assert decode(JobSpec, spec.value).command == ("true",)
    job.cluster.ready(A0, A1)
    world = job.cluster.world(1)
    assert [member.worker for member in world.members] == [A0, A1]
    job.cluster.exits(A0, 0)
    job.cluster.exits(A1, 0)
    outcome = job.outcome()
    assert outcome.exit_code == 0
    assert outcome.failure is None
    left = sorted(path.name for path in job.run_dir.path.iterdir())
    assert left == ["events.jsonl", "journal.db"]
    names = [event["event"] for event in job.logged()]
    assert names[0] == "job_started"
    assert names[-1] == "job_succeeded"
    completed = next(e for e in job.logged() if e["event"] == "round_completed")
    assert (completed["size"], completed["hosts"]) == (2, 1)
    assert "round 1 complete: 2 workers on 1 host" in job.stderr.getvalue()
    assert job.cluster.closed >= 1


def test_agents_get_their_orders_numbered_from_one_in_order(start_job: StartJob) -> None:
    job = start_job()
    job.cluster.until_workers(A0, A1)
    agent = job.cluster.agents["a", 1]
    assert [o.worker for o in agent.orders if isinstance(o, StartWorkerOrder)] == [A0, A1]


def test_a_lost_worker_is_replaced_and_its_keys_are_cleared(start_job: StartJob) -> None:
    job = start_job()
    cluster = job.cluster
    cluster.until_workers(A0, A1)
    cluster.ready(A0, A1)
    cluster.world(1)
    cluster.stepped(A0, 1)
    cluster.progress(A1, 1, 5, 0.01)
    cluster.exits(A1, -9)
    until(lambda: cluster.client.get(contract.JOB_NOTICE), "a notice to leave")
    assert cluster.client.batch(Count(f"workers/{A1}/")) == (Number(0),)
    cluster.ready(A0, left=1, version=5)
    assert [m.worker for m in cluster.world(2).members] == [A0]
    cluster.until_workers(A0, "a.1.2")
    exited = cluster.until_event("worker_exited", worker=A1)
    assert (exited["exit_code"], exited["expected"], exited["rank"]) == (-9, False, 1)


def test_a_closed_round_is_sealed_and_its_keys_are_gone(start_job: StartJob) -> None:
    job = start_job()
    cluster = job.cluster
    cluster.until_workers(A0, A1)
    cluster.ready(A0, A1)
    cluster.world(1)
    cluster.client.set("rounds/1/store", b"x")
    cluster.exits(A1, -9)
    cluster.ready(A0, left=1)
    cluster.until_event("round_closed", round=1)

    def sealed() -> bool:
        (result,) = cluster.client.batch(Count("rounds/1/"))
        return result == Number(0)

    until(sealed, "the round's keys are gone")


# ---- notices at a boundary ---------------------------------------------------------------


def notice_of_a_step(cluster: Cluster) -> Notice | None:
    """Return the newest notice, if it names a step; one that only asks for progress does not."""
    entry = cluster.client.get(contract.JOB_NOTICE)
    notice = None if entry is None else decode(Notice, entry.value)
    return notice if notice and (notice.after_step or 0) < 2**53 else None


def test_growth_names_a_step_beyond_the_furthest_worker_s_newest_word(start_job: StartJob) -> None:
    job = start_job((("a", 1),), start_np=1)
    cluster = job.cluster
    cluster.until_workers(A0)
    cluster.ready(A0)
    cluster.world(1)
    with beating(cluster, {A0: 700}, round_id=1):
        cluster.stepped(A0, 1)
        job.hosts.hosts = (("a", 2),)
        cluster.until_workers(A0, A1)
        cluster.ready(A1)

        notice = until(partial(notice_of_a_step, cluster), "a notice with a step")
    assert notice is not None
    assert notice.round == 1
    assert notice.after_step is not None
    assert 700 < notice.after_step < 900
    cluster.ready(A0, left=1, version=notice.after_step)
    assert cluster.world(2).size == 2


def test_growth_before_any_step_does_not_wait_for_words_that_do_not_come(
    start_job: StartJob,
) -> None:
    job = start_job((("a", 1),), start_np=1)
    cluster = job.cluster
    cluster.until_workers(A0)
    cluster.ready(A0)
    cluster.world(1)
    job.hosts.hosts = (("a", 2),)
    cluster.until_workers(A0, A1)
    cluster.ready(A1)

    notice = until(partial(notice_of_a_step, cluster), "a notice with a step", timeout=3.0)
    assert notice is not None
    assert notice.after_step == 2


def test_the_driver_goes_on_while_its_rendezvous_is_stalled_in_a_planned_change(
    start_job: StartJob,
) -> None:
    job = start_job((("a", 1),), start_np=1)
    cluster, released = job.cluster, threading.Event()
    cluster.until_workers(A0)
    cluster.ready(A0)
    cluster.world(1)
    cluster.stepped(A0, 1)
    job.hosts.hosts = (("a", 2),)
    cluster.until_workers(A0, A1)
    server, loop = job.driver._resources.server, job.driver._loop
    assert server is not None
    assert loop is not None
    assert loop.job is not None
    boundary = loop.job.boundary

    async def stall() -> None:
        assert released.wait(60.0)

    try:
        server.spawn(stall())
        job.driver.post(WorkerReady(A1, 0, -1, True, "waits"))
        until(lambda: boundary.asked, "the members are asked how far they are")
        replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        job.driver.ask_status(replies.put)
        assert replies.get(timeout=8.0)  # seconds; it once waited 10 for the rendezvous
    finally:
        released.set()
    cluster.ready(A0, left=1, version=2)
    assert cluster.world(2, within=30.0).size == 2


def test_a_worker_that_writes_nonsense_as_its_progress_harms_nobody(start_job: StartJob) -> None:
    job = start_job((("a", 1),), start_np=1)
    cluster = job.cluster
    cluster.until_workers(A0)
    cluster.ready(A0)
    cluster.world(1)
    cluster.client.set(contract.worker_progress(A0), b'{"round":1,"step":"far"}')
    job.hosts.hosts = (("a", 2),)
    cluster.until_workers(A0, A1)
    cluster.ready(A1)
    until(lambda: cluster.client.get(contract.JOB_NOTICE), "a notice")
    cluster.ready(A0, left=1, version=2)
    assert cluster.world(2).size == 2


def test_orders_read_long_ago_do_not_pile_up(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_driver.runtime.executor.KEPT_ORDERS", 3)
    job = start_job()
    cluster = job.cluster
    cluster.until_workers(A0, A1)  # orders 1 and 2
    cluster.ready(A0, A1)
    cluster.world(1)  # order 3: the ranks
    cluster.stepped(A0, 1)
    assert cluster.client.get(contract.agent_order("a", 1, 1)) is not None
    cluster.exits(A1, -9)
    cluster.until_workers(A0, "a.1.2")  # order 4: its replacement
    assert cluster.client.get(contract.agent_order("a", 1, 1)) is None
    assert cluster.client.get(contract.agent_order("a", 1, 4)) is not None


# ---- leases and agents -------------------------------------------------------------------


def test_a_worker_whose_lease_expires_is_told_to_be_killed(start_job: StartJob) -> None:
    job = start_job(heartbeat_timeout=0.3)
    cluster = job.cluster
    cluster.until_workers(A0, A1)
    cluster.ready(A0, A1)
    cluster.world(1)
    cluster.client.batch(Set(contract.worker_lease(A1), b"", 0.1))
    event = cluster.until_event("worker_hung", worker=A1)
    assert "--heartbeat-timeout" in event["reason"]
    until(lambda: A1 not in cluster.workers(), "its agent has stopped it")


def test_an_agent_whose_lease_expires_is_killed_and_started_again(start_job: StartJob) -> None:
    job = start_job()
    cluster = job.cluster
    cluster.until_workers(A0, A1)
    cluster.client.batch(Set(contract.agent_lease("a", 1), b"", 0.1))
    cluster.until_event("agent_lost", host="a")
    until(lambda: ("a", 2) in cluster.agents, "the agent's second incarnation")
    assert cluster.killed == [("a", 1)]
    until(lambda: cluster.client.batch(Count("agents/a.1/")) == (Number(0),), "its orders are gone")


def test_an_agent_that_cannot_be_started_is_a_reason_not_a_crash(start_job: StartJob) -> None:
    cluster = Cluster()
    cluster.unreachable.add("b")
    job = start_job((("a", 1), ("b", 1)), cluster=cluster, start_timeout=0.5)
    lost = cluster.until_event("agent_lost", host="b")
    assert "cannot be reached" in lost["reason"]
    outcome = job.outcome()
    assert outcome.exit_code == ExitCode.UNAVAILABLE
    assert "--start-timeout" in job.stderr.getvalue()


def test_a_driver_without_hosts_gives_up_at_the_start_timeout(start_job: StartJob) -> None:
    job = start_job((), start_np=1, start_timeout=0.3)
    assert job.outcome().exit_code == ExitCode.UNAVAILABLE


# ---- failures and what is said -----------------------------------------------------------


def test_when_every_worker_raises_the_same_its_traceback_is_shown_once_and_last(
    start_job: StartJob,
) -> None:
    job = start_job((("a", 3),), settle=0.3)
    cluster = job.cluster
    cluster.until_workers(A0, A1, A2)
    for worker in (A0, A1, A2):
        cluster.exits(worker, 1, TRACEBACK)
    outcome = job.outcome()
    assert outcome.exit_code == 1
    assert outcome.failure is not None
    said = job.stderr.getvalue()
    assert said.count("Traceback") == 1
    *_, raised, first, why = said.splitlines()
    assert raised == "ValueError: boom"
    assert [w.exit_code for w in outcome.workers] == [1, 1, 1]
    assert {w.last_words for w in outcome.workers} == {TRACEBACK}
    read = read_result(job.run_dir.events_file)
    assert read is not None
    assert (read.failure, read.workers) == (outcome.failure, outcome.workers)
    *_, last, end = (event["event"] for event in job.logged())
    assert (last, end) == ("worker_result", "job_failed")
    assert "rank 0 on host a (worker a.0.1, pid " in first
    assert "exit code 1" in first
    assert why.startswith("elasticrun: job failed: ")


def test_a_failure_is_shown_while_the_job_waits_and_is_not_repeated_at_its_end(
    start_job: StartJob,
) -> None:
    job = start_job()
    cluster = job.cluster
    cluster.until_workers(A0, A1)
    cluster.ready(A0, A1)
    cluster.world(1)
    cluster.exits(A0, 1, TRACEBACK)
    until(lambda: "ValueError: boom" in job.stderr.getvalue(), "the traceback", timeout=2.0)
    cluster.exits(A1, 1, TRACEBACK)
    assert job.outcome().exit_code == 1
    said = job.stderr.getvalue()
    assert said.count("Traceback") == 1
    assert "last words of rank 0 (a.0.1): see above" in said
    assert "first failure: rank 0 on host a" in said.splitlines()[-2]


def test_a_failure_the_job_survives_is_shown_when_it_goes_on(start_job: StartJob) -> None:
    job = start_job()
    cluster = job.cluster
    cluster.until_workers(A0, A1)
    cluster.ready(A0, A1)
    cluster.world(1)
    cluster.stepped(A0, 1)
    cluster.exits(A1, 1, f"noise before\n{TRACEBACK}")
    cluster.until_event("worker_exited", worker=A1)
    assert "Traceback" not in job.stderr.getvalue()
    cluster.ready(A0, left=1, version=1)
    cluster.world(2)
    until(lambda: "ValueError: boom" in job.stderr.getvalue(), "the traceback")
    assert "noise before" not in job.stderr.getvalue()


def test_a_bug_of_the_driver_s_still_stops_the_agents_and_ends_with_70(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job()
    job.cluster.until_workers(A0, A1)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(driver_module.Job, "handle", broken)
    job.cluster.ready(A0)
    outcome = job.outcome()
    assert outcome.exit_code == ExitCode.BUG
    assert "ZeroDivisionError: a bug" in job.stderr.getvalue()
    assert job.cluster.closed >= 1
    assert not job.run_dir.token_file.exists()


def test_what_comes_while_a_bug_ends_the_driver_is_answered_and_nothing_twice(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_job()
    job.cluster.until_workers(A0, A1)
    answered, close = list[str](), job.driver._resources.close

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    def late(*how: object, **more: object) -> object:
        assert job.driver.deliver(ScaleRequested(2), lambda: answered.append("second"))
        return close(*how, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(job.driver._resources, "close", late)
    monkeypatch.setattr(driver_module.Job, "handle", broken)
    assert job.driver.deliver(ScaleRequested(2), lambda: answered.append("first"))
    assert job.outcome().exit_code == ExitCode.BUG
    assert answered == ["first", "second"]
