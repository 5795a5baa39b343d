"""After five seconds the user hears for whom the job waits, and why."""

from __future__ import annotations

import pytest

from elastic_driver.job.hangs import BOOT_S, SILENT_S
from elastic_driver.job.job import Job
from elastic_driver.settings import Settings
from tests.job.scenario import Scenario

TWO = {"start_np": 2, "max_np": 2, "expects": "-np 2 (command line) asks for them"}


def told(job: Scenario) -> list[str]:
    return [announced.reason for announced in job.announced("job_waits")]


def test_hosts_that_are_not_known_are_expected_for_a_reason() -> None:
    job = Scenario(**TWO)
    job.hosts(a=1)
    job.wait(SILENT_S - 0.1)
    assert told(job) == []
    job.wait(60.0)
    (said,) = told(job)
    assert "1 of 2 slots have an agent; only a is known, others are expected" in said
    assert said.endswith("; -np 2 (command line) asks for them")


def test_hosts_without_an_agent_are_named_with_what_keeps_them() -> None:
    job = Scenario(agents=False, **TWO)
    job.hosts(a=1, b=1)
    job.agent_up("a")
    job.wait(SILENT_S)
    (said,) = told(job)
    assert "missing: b (its agent starts)" in said
    other = Scenario(agents=False, **TWO)
    other.silent.add("b")
    other.hosts(a=1, b=1)
    other.agent_up("a")
    other.agent_lost("b", "ssh: no route", unreachable=True)
    other.wait(SILENT_S)
    assert "missing: b (unreachable: ssh: no route" in told(other)[0]


def test_workers_that_boot_for_long_are_named() -> None:
    job = Scenario(**TWO)
    job.hosts(a=1, b=1)
    job.ready("a.0.1")
    job.wait(BOOT_S - 1)
    assert told(job) == []
    job.wait(2)
    assert told(job) == [f"for {BOOT_S:g} s: b.0.1 started, and did not call @elastic.run yet"]


def test_a_job_that_begins_at_once_says_nothing() -> None:
    job = Scenario(**TWO).training(a=1, b=1)
    job.wait(100.0)
    assert told(job) == []


@pytest.mark.parametrize("steps", [0, 1])
def test_a_later_round_with_too_few_workers_says_so(steps: int) -> None:
    job = Scenario(min_np=2, **TWO).training(steps=steps, a=1, b=1)
    job.silent.add("b")
    job.agent_lost("b", "silent", unreachable=True)
    job.ready("a.0.1", version=1)
    job.wait(SILENT_S + 1)
    assert [said for said in told(job) if "missing: b (unreachable: silent" in said]


def test_what_was_told_is_told_no_more_by_the_next_driver() -> None:
    job = Scenario(**TWO)
    job.hosts(a=1)
    job.wait(SILENT_S)
    assert len(told(job)) == 1
    job.job = Job.restored(job.job.snapshot())
    job.wait(60.0)
    assert len(told(job)) == 1
    assert isinstance(job.job.settings, Settings)
