"""Checks of hosts while a job runs: in the background, cancelled with the job, kept with it."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import msgspec
import pytest

from elastic_driver.errors import ClusterError
from elastic_driver.features.checks.driver import CheckSettings, NodeChecks
from elastic_driver.features.checks.evidence import Measurement, NodeVerdict, Verdict
from elastic_driver.features.checks.machine import NodeChecker
from elastic_driver.features.checks.report import CheckReport
from elastic_driver.job.decisions import CheckHosts
from elastic_driver.job.events import HostResult, HostsChecked
from elastic_driver.runtime.run_dir import RunDir
from tests.runtime.waiting import until


def verdict(node: str, of: Verdict = Verdict.GOOD, seconds: float = 1.0) -> NodeVerdict:
    reason = "" if of is Verdict.GOOD else "failed alone"
    return NodeVerdict(node, of, reason, seconds, 0.0, (Measurement(node, seconds, 0.0),))


FIRST = CheckReport(rounds=1, seconds=2.0, nodes=(verdict("a"), verdict("b")))


class Checks:
    """The checks of a run whose server and backend do nothing, and what came of them."""

    def __init__(self, folder: Path, *, exclude: bool = False) -> None:
        self.said, self.kept = list[str](), list[CheckReport]()
        self.posted: queue.SimpleQueue[HostsChecked] = queue.SimpleQueue()
        self.file = folder / "node_check.json"
        self.go, self.closed = threading.Event(), 0
        self.checks = NodeChecks(
            CheckSettings(exclude_stragglers=exclude),
            make_backend=lambda _endpoint, _token_file: self,  # type: ignore[arg-type,return-value]
            folder=RunDir(folder, "node-check"),
            file=self.file,
            keep=self.kept.append,
            say=self.said.append,
        )
        self.checks.report = FIRST
        self.checks.open(self, "secret")  # type: ignore[arg-type]

    url = "http://127.0.0.1:1"
    known_by = ""

    def post(self, _operations: object) -> None:
        """As a server does."""

    def close(self, _grace: float) -> None:
        """As a backend does: it takes as long as the test wants."""
        assert self.go.wait(10)
        self.closed += 1

    def begin(self, number: int = 1) -> NodeChecker:
        asked = CheckHosts((("b", 2), ("c", 2)), "new", number)
        return self.checks.begin(
            asked.hosts, lambda found: self.posted.put(self.checks.verdict(asked, found))
        )

    def end(self, report: CheckReport) -> None:
        self.checks.end(report)

    def results(self) -> tuple[HostResult, ...]:
        self.go.set()
        answer = self.posted.get(timeout=10)
        assert answer.number == 1
        return answer.results


SECOND = CheckReport(
    rounds=2, seconds=3.0, nodes=(verdict("b", Verdict.STRAGGLER, 5.0), verdict("c"))
)


def test_what_is_found_is_posted_and_added_to_what_was_known(tmp_path: Path) -> None:
    job = Checks(tmp_path)
    checker = job.begin()
    assert [verdict.node for verdict in checker.report(0.0).nodes] == ["b", "c"]
    assert job.checks.backend is job
    job.end(SECOND)
    assert job.results() == (
        HostResult("b", True, "straggler: failed alone"),
        HostResult("c", True, "good"),
    )
    report = job.checks.report
    assert report is not None
    assert [(n.node, n.verdict.value) for n in report.nodes] == [
        ("a", "good"),
        ("b", "straggler"),
        ("c", "good"),
    ]
    assert [m.compute for m in report.nodes[1].history] == [1.0, 5.0]
    assert msgspec.json.decode(job.file.read_bytes(), type=CheckReport) == report
    assert job.said == [SECOND.summary()]
    assert [kept.nodes for kept in job.kept] == [SECOND.nodes]
    assert job.closed == 1
    assert list((tmp_path / "node-check").iterdir()) == []


def test_a_slow_host_is_kept_out_where_that_is_asked_for(tmp_path: Path) -> None:
    job = Checks(tmp_path, exclude=True)
    job.begin()
    job.end(SECOND)
    assert job.results()[0] == HostResult("b", False, "straggler: failed alone")


def test_a_check_that_cannot_be_made_passes_nobody(tmp_path: Path) -> None:
    checks = Checks(tmp_path).checks
    asked = CheckHosts((("b", 2), ("c", 2)), "new", 1)
    assert checks.verdict(asked, ClusterError("no port is free")).results == tuple(
        HostResult(host, False, "it could not be made: no port is free") for host in "bc"
    )


def test_hosts_without_slots_are_not_checked(tmp_path: Path) -> None:
    job = Checks(tmp_path)
    with pytest.raises(ClusterError, match="there are no hosts to check"):
        job.checks.begin((("b", 0),), print)
    assert job.checks.backend is None


def test_a_second_check_is_refused_while_one_is_going_on(tmp_path: Path) -> None:
    job = Checks(tmp_path)
    job.begin(1)
    with pytest.raises(ClusterError, match="another check is going on"):
        job.begin(2)
    job.end(SECOND)
    with pytest.raises(ClusterError, match="another check is going on"):
        job.begin(2)
    job.results()
    job.checks.stop()


def test_a_check_ends_with_the_job_and_nothing_is_kept_then(tmp_path: Path) -> None:
    job = Checks(tmp_path)
    job.begin()
    job.go.set()
    job.checks.stop()
    job.checks.stop()
    assert job.closed == 1
    with pytest.raises(ClusterError):
        job.begin()


def test_what_comes_after_the_end_of_the_job_is_neither_kept_nor_said(tmp_path: Path) -> None:
    job = Checks(tmp_path)
    job.begin()
    job.end(SECOND)
    stopping = threading.Thread(target=job.checks.stop)
    stopping.start()
    until(lambda: job.checks.stopped, "the job has ended")
    job.go.set()
    stopping.join(10)
    assert (job.checks.report, job.said, job.file.exists()) == (FIRST, [], False)
    assert job.kept == []
    assert job.posted.empty()


def test_a_folder_that_is_gone_costs_the_file_and_not_the_check(tmp_path: Path) -> None:
    job = Checks(tmp_path)
    job.file = tmp_path / "gone" / "node_check.json"
    job.checks.file = job.file
    job.begin()
    job.end(SECOND)
    assert len(job.results()) == 2
    assert any("cannot keep what the check found" in line for line in job.said)


def test_a_backend_that_fails_to_close_costs_neither_the_answer_nor_the_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = Checks(tmp_path)

    def close(_grace: float) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checks, "close", close)
    checks.begin()
    checks.end(SECOND)
    assert [result.host for result in checks.results()] == ["b", "c"]
    assert "no space left on device" in checks.said[0]
    checks.begin(2)
