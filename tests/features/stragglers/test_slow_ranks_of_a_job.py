"""Slow ranks and the findings of a node check, as a driver logs and shows them."""

from __future__ import annotations

from msgspec.structs import replace

from elastic_driver import contract
from elastic_driver.features.checks.evidence import NodeVerdict, Verdict
from elastic_driver.features.checks.report import CheckReport
from elastic_driver.words.orders import encode
from elastic_driver.words.progress import Progress, Sample
from rendezvous.wire import Set
from tests.runtime.cluster import Cluster
from tests.runtime.jobs import StartJob
from tests.runtime.waiting import until

USUAL, SLOW = 0.1, 0.4


def report(cluster: Cluster, round_id: int, times: dict[str, float], steps: range) -> None:
    for worker, seconds in times.items():
        document = Progress(
            round_id, steps[-1], 0.5, tuple(Sample(s, seconds, seconds) for s in steps)
        )
        cluster.client.batch(Set(contract.worker_progress(worker), encode(document)))


def test_the_driver_logs_a_slow_rank_and_shows_it_in_its_status(start_job: StartJob) -> None:
    job = start_job((("a", 2), ("b", 1)))
    cluster = job.cluster
    cluster.until_workers("a.0.1", "a.1.1", "b.0.1")
    cluster.ready("a.0.1", "a.1.1", "b.0.1")
    round_id = cluster.world(1).round
    assert cluster.status()["slow"] == []
    times = {"a.0.1": USUAL, "a.1.1": USUAL, "b.0.1": SLOW}
    report(cluster, round_id, times, range(1, 31))
    event = cluster.until_event("rank_slow", rank=2, host="b", worker="b.0.1", round=round_id)
    assert event["kind"] == "compute"
    (slow,) = cluster.status()["slow"]
    assert (slow["rank"], slow["host"], slow["worker"]) == (2, "b", "b.0.1")
    assert "rank 2 on b holds the others up" in job.stderr.getvalue()
    report(cluster, round_id, dict.fromkeys(times, USUAL), range(31, 61))
    cluster.until_event("rank_recovered", rank=2, host="b")
    until(lambda: cluster.status()["counters"]["false_alarms"] == 1, "it was a false alarm")


def test_what_the_node_check_found_is_logged_and_shown(start_job: StartJob) -> None:
    good = NodeVerdict("a", Verdict.GOOD, "", 0.1, 0.2, ())
    bad = replace(good, node="x", verdict=Verdict.FAULTY, reason="it does not start")
    checked = CheckReport(rounds=2, seconds=3.0, nodes=(good, bad))
    job = start_job((("a", 1),), node_check=checked)
    event = job.cluster.until_event("nodes_checked")
    assert (
        event["reason"]
        == "node check: 1 good, 1 faulty (x); 2 rounds, 3.0 s, of which the task 0.0 s"
    )
    shown = job.cluster.status()["node_check"]
    assert [(n["node"], n["verdict"]) for n in shown["nodes"]] == [("a", "good"), ("x", "faulty")]


def test_without_a_node_check_there_is_nothing_to_show(start_job: StartJob) -> None:
    job = start_job((("a", 1),))
    job.cluster.until_workers("a.0.1")
    assert job.cluster.status()["node_check"] is None
    assert job.cluster.events()[0]["event"] == "job_started"
    assert all(event["event"] != "nodes_checked" for event in job.cluster.events())
