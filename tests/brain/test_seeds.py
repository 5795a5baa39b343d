"""Random clusters under the Brain: no slot in two jobs, whatever happens (`tests.brain.seeds`)."""

from __future__ import annotations

import pytest

from elastic_driver.brain import algorithm as limits
from elastic_driver.brain.jobs import Job
from tests.brain.seeds import run_seed

SEEDS = 80
PER_TEST = 20


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_no_slot_is_in_two_jobs_and_all_jobs_run_when_the_faults_stop(first: int) -> None:
    outcomes = [run_seed(seed) for seed in range(first, first + PER_TEST)]
    for kind in ("grants", "refused", "brains", "silent", "runs", "hosts", "cut", "late"):
        assert sum(getattr(each, kind) for each in outcomes) > PER_TEST, f"few {kind}"
    for kind in ("memory", "starved"):
        assert sum(getattr(each, kind) for each in outcomes) > PER_TEST / 4, f"few {kind}"


def test_a_seed_replays_exactly() -> None:
    assert run_seed(7) == run_seed(7)


def test_a_brain_that_does_not_wait_until_a_job_has_let_go_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Job, "claims", lambda job: dict(job.granted))
    with pytest.raises(AssertionError, match=r"processes on \d slots.*replay: python -m tests"):
        _run_all(range(40))


def test_a_brain_that_forgets_silent_jobs_at_once_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(job: Job, at: float) -> None:
        job.silent_at = job.gone_at = at

    monkeypatch.setattr(Job, "fall_silent", hasty)
    with pytest.raises(AssertionError, match="processes on"):
        _run_all(range(40))


def test_a_brain_that_takes_a_silent_driver_for_dead_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sure(job: Job, at: float) -> None:
        job.silent_at, job.gone_at = at, at + job.report.lives_on

    monkeypatch.setattr(Job, "fall_silent", sure)
    with pytest.raises(AssertionError, match="processes on"):
        _run_all(range(40))


def test_a_brain_that_gives_hosts_without_the_memory_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "memory_limits", lambda _job, _hosts: {})
    with pytest.raises(AssertionError, match=r"it has the memory for|waits"):
        _run_all(range(40))


def _run_all(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed)
