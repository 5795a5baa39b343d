"""Some hundred seeds at each run, and proof that the simulation notices a broken core."""

from __future__ import annotations

import pytest

from elastic_driver.job.membership import Membership
from elastic_driver.job.plain import Plain
from elastic_driver.job.rounds import Rounds
from tests.job.broken import BROKEN, Break
from tests.sim.broken_resumes import BROKEN_RESUMES
from tests.sim.runner import SeedFailed, run_seed

SEEDS = 240
PER_TEST = 40


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_when_faults_stop_the_job_grows_to_its_best_size_and_succeeds(first: int) -> None:
    _run_all(range(first, first + PER_TEST))


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_drivers_die_at_any_moment_and_the_next_one_goes_on(first: int) -> None:
    outcomes = [run_seed(seed, mortal=True) for seed in range(first, first + PER_TEST)]
    assert sum(outcome.died for outcome in outcomes) > PER_TEST
    assert any(outcome.refused for outcome in outcomes), "no order of an earlier driver came late"


def test_a_seed_replays_exactly() -> None:
    assert run_seed(7) == run_seed(7)
    assert run_seed(7, mortal=True) == run_seed(7, mortal=True)


def test_slow_workers_are_replaced_in_some_seeds() -> None:
    assert any(run_seed(seed).replaced for seed in range(SEEDS))  # the first ends the search


def test_spares_take_over_in_some_seeds() -> None:
    assert any(run_seed(seed).promoted for seed in range(SEEDS))


def test_ranks_that_differ_are_repaired_in_some_seeds() -> None:
    assert any(run_seed(seed).repaired for seed in range(SEEDS))


def test_a_core_that_forgets_to_repair_its_ranks_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rounds, "want_repair", lambda _self, _reason: None)
    _assert_found_out(range(100), "quiet, but the members hold the states|failed without a reason")


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_rule_is_caught_by_an_invariant(
    break_it: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    _assert_found_out(range(100), BROKEN[break_it])


def test_a_core_that_forgets_who_holds_the_state_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Membership, "_state_holders", lambda _self, _ready: [])
    _assert_found_out(range(400), "alone holds version")


def test_a_core_that_does_not_wait_for_the_last_process_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(plain: Plain, now: float) -> tuple[()]:
        plain.rounds.open_next(now, "nobody is waited for")
        return ()

    monkeypatch.setattr(Plain, "_watch_stopping", hasty)
    _assert_found_out(range(60), "Violation|ValueError")


@pytest.mark.parametrize("break_it", BROKEN_RESUMES, ids=lambda broken: broken.__name__)
def test_a_broken_rule_of_resuming_is_found_out(
    break_it: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    _assert_found_out(range(200), BROKEN_RESUMES[break_it], mortal=True)


def _assert_found_out(seeds: range, why: str, *, mortal: bool = False) -> None:
    with pytest.raises(SeedFailed, match=why) as failure:
        _run_all(seeds, mortal=mortal)
    assert "replay: python -m tests.sim --seed" in str(failure.value)
    assert failure.value.trace


def _run_all(seeds: range, *, mortal: bool = False) -> None:
    for seed in seeds:
        run_seed(seed, mortal=mortal)
