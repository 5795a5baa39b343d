"""Hosts that are drained, by request or by a notice to their agent: nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.support.job import (
    JOBS,
    ROOT,
    RunningJob,
    StepRecord,
    assert_no_step_lost_or_repeated,
    elasticrun,
    is_running,
)

TRAIN = str(JOBS / "train.py")
ENV = {"STEPS": "100000"}


def elasticctl(job: RunningJob, *words: str, code: int = 0) -> str:
    """What `elasticctl WORDS…` says about this job (stderr, where it fails)."""
    argv = [sys.executable, "-m", "launcher.ctl", words[0], "--state-dir", str(job.run_dir.parent)]
    ran = subprocess.run(
        [*argv, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == code, ran
    return ran.stderr if code else ran.stdout


def of_host(live: dict[int, StepRecord], host: str) -> set[int]:
    return {pid for pid, record in live.items() if record.worker.rsplit(".", 2)[0] == host}


def agent_of(job: RunningJob, host: str) -> int:
    return int([e for e in job.events("agent_started") if e["host"] == host][-1]["pid"])


def assert_left_well(job: RunningJob, gone: set[int], agent: int) -> None:
    """The host's processes end as they were told to, and nobody takes that for trouble."""
    job.until(lambda: not any(map(is_running, [*gone, agent])), "the host is empty")
    job.until(lambda: job.events("host_drained"), "the log says so")
    ends = [e for e in job.events("worker_exited") if e["pid"] in gone]
    assert [e["expected"] for e in ends] == [True] * len(gone)
    assert not job.events("host_blacklisted")
    assert not job.events("agent_lost")


def assert_common_boundaries(job: RunningJob) -> None:
    """Every rank's last step of a round that is over is the same one."""
    ends: dict[int, dict[int, int]] = {}
    for record in job.steps():
        ends.setdefault(record.round, {})[record.pid] = record.step
    del ends[max(ends)]
    for number, last in ends.items():
        assert len(set(last.values())) == 1, f"round {number} ended at {last}"


def drain_by_request(job: RunningJob, host: str) -> None:
    assert "is being drained" in elasticctl(job, "drain", host, "--reason", "new disks")


def drain_by(number: signal.Signals) -> Any:
    return lambda job, host: job.kill(agent_of(job, host), number)


@pytest.mark.parametrize(
    "drain",
    [drain_by_request, drain_by(signal.SIGUSR1)],
    ids=["request", "SIGUSR1"],
)
def test_a_drained_host_is_left_at_a_boundary_and_the_others_go_on(drain: Any) -> None:
    args = ("-H", "localhost:2,127.0.0.2:1", "-np", "3", "--min-np", "1", "--debug", "--", TRAIN)
    with elasticrun(*args, env=ENV) as job:
        before = job.until_size(3)
        gone, agent = of_host(before, "127.0.0.2"), agent_of(job, "127.0.0.2")
        drain(job, "127.0.0.2")
        after = job.until_size(2)
        assert set(after) == set(before) - gone
        assert_left_well(job, gone, agent)
        reached = max(r.step for r in job.steps())
        job.until(lambda: max(r.step for r in job.steps()) > reached + 50, "training goes on")
        assert_no_step_lost_or_repeated(job, reached)
        assert_common_boundaries(job)
        assert job.rounds() == [3, 2], "nothing is started on the drained host again"


def test_a_spare_slot_is_filled_before_the_drained_host_is_let_go() -> None:
    hosts = "localhost:1,127.0.0.2:1,127.0.0.3:2"
    args = ("-H", hosts, "-np", "2", "--min-np", "1", "--max-np", "2", "--", TRAIN)
    with elasticrun(*args, env=ENV) as job:
        before = job.until_size(2)
        gone, agent = of_host(before, "127.0.0.2"), agent_of(job, "127.0.0.2")
        drain_by_request(job, "127.0.0.2")
        job.until(lambda: len(job.rounds()) == 2, "the world has changed")
        after = job.until_size(2)
        assert len(of_host(after, "127.0.0.3")) == 1
        assert_left_well(job, gone, agent)
        assert job.rounds() == [2, 2], "the world never shrinks"
        assert_no_step_lost_or_repeated(job, min(r.step for r in after.values()))
        assert_common_boundaries(job)


def test_a_drain_that_is_taken_back_brings_the_host_back() -> None:
    args = ("-H", "localhost:1,127.0.0.2:1", "-np", "2", "--min-np", "1", "--", TRAIN)
    with elasticrun(*args, env=ENV) as job:
        before = job.until_size(2)
        drain_by_request(job, "127.0.0.2")
        job.until(lambda: job.events("host_drained"), "the host is empty")
        assert "may be used again" in elasticctl(job, "drain", "127.0.0.2", "--cancel")
        job.until(lambda: job.rounds() == [2, 1, 2], "the host takes part again")
        after = job.until_size(2)
        assert of_host(after, "localhost") == of_host(before, "localhost")
        assert_no_step_lost_or_repeated(job, min(r.step for r in after.values()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_with_a_notice_leaves_at_a_boundary_and_another_takes_its_slot(
    number: signal.Signals,
) -> None:
    # With so long a grace, a worker that overlooks its agent's SIGTERM would be waited for.
    args = ("-np", "3", "--min-np", "1", "--stop-grace", "60", "--debug", "--", TRAIN)
    with elasticrun(*args, env=ENV) as job:
        before = job.until_size(3)
        gone = next(pid for pid, record in before.items() if record.rank == 1)
        job.kill(gone, number)
        job.until(lambda: job.rounds() == [3, 2, 3], "the world is whole again")
        after = job.until_size(3)
        assert set(before) - set(after) == {gone}
        assert [e["pid"] for e in job.events("worker_leaving")] == [gone]
        assert [(e["pid"], e["expected"]) for e in job.events("worker_exited")] == [(gone, True)]
        assert_no_step_lost_or_repeated(job, min(r.step for r in after.values()))
        assert_common_boundaries(job)
        job.process.send_signal(signal.SIGINT)
        assert job.wait(within=30) == 130
        job.assert_nothing_left()


def test_when_all_workers_have_a_notice_nothing_is_lost() -> None:
    args = ("-np", "3", "--min-np", "1", "--debug", "--", TRAIN)
    with elasticrun(*args, env=ENV) as job:
        before = job.until_size(3)
        for pid in before:
            job.kill(pid, signal.SIGTERM)
        job.until(lambda: not any(map(is_running, before)), "all of them are gone")
        after = job.until_size(3)
        assert not set(before) & set(after)
        assert_no_step_lost_or_repeated(job, min(r.step for r in after.values()))
        assert_common_boundaries(job)


def test_a_plain_script_goes_on_without_the_drained_host() -> None:
    plain = str(JOBS / "plain.py")
    args = ("-H", "localhost:1,127.0.0.2:1", "-np", "2", "--min-np", "1", "--", plain)
    with elasticrun(*args, env=ENV) as job:
        job.until(lambda: job.rounds() == [2], "the script runs on both hosts")
        started = job.events("worker_started")
        gone = {e["pid"] for e in started if e["host"] == "127.0.0.2"}
        agent = agent_of(job, "127.0.0.2")
        job.kill(agent, signal.SIGTERM)
        job.until(lambda: job.rounds() == [2, 1], "it runs on one of them")
        assert [e["host"] for e in job.events("worker_started")][2:] == ["localhost"]
        assert_left_well(job, gone, agent)
