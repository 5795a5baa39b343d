"""Checks of hosts while a job runs: in the background, cancelled with the job, kept with it."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import msgspec
import pytest

from elastic_driver.core.decisions import CheckHosts
from elastic_driver.core.events import HostResult, HostsChecked
from elastic_driver.errors import ClusterError
from elastic_driver.policies.nodecheck.check import Measurement, NodeVerdict, Verdict
from elastic_driver.policies.nodecheck.report import CheckReport
from elastic_driver.runtime.host_checks import HostChecks
from elastic_driver.runtime.host_lists import Hosts


def verdict(node: str, of: Verdict = Verdict.GOOD, seconds: float = 1.0) -> NodeVerdict:
    reason = "" if of is Verdict.GOOD else "failed alone"
    return NodeVerdict(node, of, reason, seconds, 0.0, (Measurement(node, seconds, 0.0),))


FIRST = CheckReport(rounds=1, seconds=2.0, nodes=(verdict("a"), verdict("b")))


class FakeChecker:
    """A check that ends when it is told to, or is cancelled."""

    def __init__(self, report: CheckReport | Exception) -> None:
        self.report, self.go, self.cancelled = report, threading.Event(), False

    def run(self) -> CheckReport:
        assert self.go.wait(10)
        if self.cancelled:
            raise ClusterError("the node check was cancelled")
        if isinstance(self.report, Exception):
            raise self.report
        return self.report

    def cancel(self) -> None:
        self.cancelled = True
        self.go.set()


class Checks:
    """HostChecks with a fake checker, and what it was asked for."""

    def __init__(
        self, folder: Path, report: CheckReport | Exception, *, exclude: bool = False
    ) -> None:
        self.checker, self.said = FakeChecker(report), list[str]()
        self.asked: list[tuple[Hosts, tuple[NodeVerdict, ...]]] = []
        self.posted: queue.SimpleQueue[HostsChecked] = queue.SimpleQueue()
        self.file = folder / "node_check.json"
        self.kept: list[CheckReport] = []

        def make(hosts: Hosts, known: tuple[NodeVerdict, ...]) -> FakeChecker:
            self.asked.append((hosts, known))
            return self.checker

        self.checks = HostChecks(
            FIRST,
            make,  # type: ignore[arg-type]
            exclude_stragglers=exclude,
            file=self.file,
            keep=self.kept.append,
            say=self.said.append,
        )

    def start(self, number: int = 1) -> None:
        self.checks.start(CheckHosts((("b", 2), ("c", 2)), "new", number), self.posted.put)

    def results(self) -> tuple[HostResult, ...]:
        self.checker.go.set()
        return self.posted.get(timeout=10).results


SECOND = CheckReport(
    rounds=2, seconds=3.0, nodes=(verdict("b", Verdict.STRAGGLER, 5.0), verdict("c"))
)


def test_what_is_found_is_posted_and_added_to_what_was_known(tmp_path: Path) -> None:
    job = Checks(tmp_path, SECOND)
    job.start()
    assert job.results() == (
        HostResult("b", True, "straggler: failed alone"),
        HostResult("c", True, "good"),
    )
    assert job.asked == [((("b", 2), ("c", 2)), FIRST.nodes)]
    report = job.checks.report
    assert [(n.node, n.verdict.value) for n in report.nodes] == [
        ("a", "good"),
        ("b", "straggler"),
        ("c", "good"),
    ]
    assert [m.compute for m in report.nodes[1].history] == [1.0, 5.0]
    assert msgspec.json.decode(job.file.read_bytes(), type=CheckReport) == report
    assert job.said == [SECOND.summary()]
    assert job.kept == [SECOND]


def test_a_slow_host_is_kept_out_where_that_is_asked_for(tmp_path: Path) -> None:
    job = Checks(tmp_path, SECOND, exclude=True)
    job.start()
    assert job.results()[0] == HostResult("b", False, "straggler: failed alone")


def test_a_check_that_cannot_be_made_passes_nobody(tmp_path: Path) -> None:
    job = Checks(tmp_path, ClusterError("no port is free"))
    job.start()
    assert job.results() == tuple(
        HostResult(host, False, "it could not be made: no port is free") for host in "bc"
    )
    assert job.checks.report == FIRST


@pytest.mark.parametrize("started", [False, True])
def test_it_ends_with_the_job_and_nothing_is_posted_then(tmp_path: Path, started: bool) -> None:
    job = Checks(tmp_path, SECOND)
    if started:
        job.start()
    before = threading.active_count()
    job.checks.stop()
    job.checks.stop()
    assert threading.active_count() == before - started
    job.start()
    assert job.posted.empty()
    assert threading.active_count() == before - started


def test_a_second_check_is_refused_while_one_is_going_on(tmp_path: Path) -> None:
    job = Checks(tmp_path, SECOND)
    job.start(1)
    job.start(2)
    refused = job.posted.get(timeout=10)
    assert refused.number == 2
    assert [r.passed for r in refused.results] == [False, False]
    assert "another check is going on" in refused.results[0].reason
    assert len(job.asked) == 1
    assert job.results()[1] == HostResult("c", True, "good")
    job.checks.stop()
    assert job.posted.empty()


def test_a_check_that_breaks_in_an_unforeseen_way_is_answered_too(tmp_path: Path) -> None:
    job = Checks(tmp_path, OSError(28, "No space left on device"))
    job.start()
    assert [r.passed for r in job.results()] == [False, False]
    assert any("OSError: [Errno 28]" in line for line in job.said)


def test_what_comes_after_the_end_of_the_job_is_neither_kept_nor_said(tmp_path: Path) -> None:
    job = Checks(tmp_path, SECOND)
    job.start()
    job.checker.cancel = job.checker.go.set  # type: ignore[method-assign]  # it is done just then
    job.checks.stop()
    assert (job.checks.report, job.said, job.file.exists()) == (FIRST, [], False)
    assert job.kept == []
    assert job.posted.empty()


def test_a_folder_that_is_gone_costs_the_file_and_not_the_check(tmp_path: Path) -> None:
    job = Checks(tmp_path / "gone", SECOND)
    job.start()
    assert len(job.results()) == 2
    assert any("cannot keep what the check found" in line for line in job.said)
