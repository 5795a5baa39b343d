"""The job uses the slots that the Brain grants, each grant once, and never more than that."""

from __future__ import annotations

from collections import Counter

from elastic_driver.job.events import HostsGranted
from elastic_driver.job.workers import OCCUPYING
from tests.job.scenario import MakeScenario, Scenario


def grant(s: Scenario, number: int, **slots: int) -> None:
    s.send(HostsGranted(number, tuple(slots.items()), f"a test grants {number}"))


def trained(s: Scenario) -> Scenario:
    """All workers that were started are members and have finished a step."""
    s.ready(*s.starting)
    s.wait(1.0)
    s.ready(*(name for name in s.members if s.job.rounds.current.state.value != "complete"))
    s.step(*s.members)
    return s


def used(s: Scenario) -> dict[str, int]:
    """The slots with a process, by host."""
    return dict(Counter(worker.host for worker in s.job.workers.having(*OCCUPYING)))


def test_a_job_trains_on_the_slots_of_its_first_grant(scenario: MakeScenario) -> None:
    s = scenario(start_np=1)
    grant(s, 3, a=2, b=1)
    trained(s)
    assert s.world.size == 3
    assert s.job.status(s.now).grant == 3
    assert s.announced("hosts_granted")[-1].reason == "3 slots: a test grants 3"


def test_a_smaller_grant_takes_workers_away_and_counts_as_no_reset(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, reset_limit=0)
    grant(s, 1, a=2, b=1)
    trained(s)
    grant(s, 2, a=1)
    s.ready(*s.members, version=5)
    s.obey_stops()
    s.wait(1.0)
    assert used(s) == {"a": 1}
    assert s.world.size == 1
    status = s.job.status(s.now)
    assert (status.exit_code, status.counters.resets) == (None, 0)


def test_a_slot_that_has_to_be_given_up_is_not_filled_again(scenario: MakeScenario) -> None:
    s = scenario(start_np=1)
    grant(s, 1, a=2)
    trained(s)
    grant(s, 2, a=1)
    s.exit(s.members[0], -9)
    s.obey_stops()
    s.wait(5.0)
    assert used(s).get("a", 0) <= 1


def test_an_older_or_repeated_grant_changes_nothing(scenario: MakeScenario) -> None:
    s = scenario(start_np=1)
    grant(s, 5, a=2)
    trained(s)
    for number in (5, 4):
        grant(s, number, a=2, b=2)
        assert s.job.status(s.now).ignored == f"grant {number} is stale: grant 5 was carried out"
    assert set(s.job.hosts.known) == {"a"}


def test_a_grant_without_hosts_lets_the_job_wait_until_the_next_one(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, start_timeout=60.0)
    grant(s, 1)
    s.wait(30.0)
    assert s.starting == []
    grant(s, 2, a=1)
    assert len(s.starting) == 1


def test_hosts_that_a_discovery_finds_are_no_hosts_of_a_job_with_a_grant(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1)
    grant(s, 1, a=1)
    s.hosts(a=4, b=4)
    assert {name: host.slots for name, host in s.job.hosts.known.items()} == {"a": 1}
    assert "the Brain grants" in s.job.status(s.now).ignored


def test_a_resumed_driver_knows_its_newest_grant(scenario: MakeScenario) -> None:
    s = scenario(start_np=1)
    grant(s, 7, a=1, b=1)
    trained(s)
    s.resume()
    s.returns("a")
    s.returns("b")
    grant(s, 7, a=4)
    assert s.job.status(s.now).grant == 7
    assert {name: host.slots for name, host in s.job.hosts.known.items()} == {"a": 1, "b": 1}
