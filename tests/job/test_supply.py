"""Hosts that are checked before they get workers, while the others train.

Two names of one machine are one host with the slots of both.
"""

from __future__ import annotations

import pytest

from elastic_driver.job.decisions import CheckHosts, EndJob, StartAgent, StopAgent
from elastic_driver.job.events import AgentLost, HostResult, HostsChecked
from elastic_driver.words import orders as msg
from tests.job.scenario import MakeScenario, Scenario


@pytest.fixture
def job(scenario: MakeScenario) -> Scenario:
    """Two checked hosts that train, and room for more."""
    s = scenario(
        start_np=2,
        max_np=6,
        last_call=0.1,
        host_failures=1,
        blacklist_cooldown=(10.0, 600.0),
        checked_hosts=("a", "b"),
    )
    return s.training(a=1, b=1)


def checks(s: Scenario) -> list[tuple[str, ...]]:
    return [tuple(host for host, _slots in check.hosts) for check in s.all(CheckHosts)]


def finish(s: Scenario, *passed: str, failed: tuple[str, ...] = ()) -> None:
    results = [HostResult(h, True, "good") for h in passed]
    results += [HostResult(h, False, "faulty: failed alone") for h in failed]
    s.send(HostsChecked(tuple(results), s.all(CheckHosts)[-1].number))


def started_on(s: Scenario, host: str) -> int:
    return sum(1 for o in s.orders(msg.StartWorkerOrder) if o.place.host == host)


def state_of(s: Scenario, host: str) -> str:
    return next(h.state for h in s.job.status(s.now).hosts if h.host == host)


def test_hosts_that_were_checked_before_the_job_are_not_checked_again(job: Scenario) -> None:
    job.wait(10.0)
    assert checks(job) == []


def test_new_hosts_are_checked_together_before_they_get_workers(job: Scenario) -> None:
    job.hosts(a=1, b=1, c=1)
    job.hosts(a=1, b=1, c=1, d=2)
    assert checks(job) == []
    job.wait(0.1)
    assert checks(job) == [("c", "d")]
    assert job.all(CheckHosts)[0].hosts == (("c", 1), ("d", 2))
    assert (state_of(job, "a"), state_of(job, "c")) == ("usable", "checking")
    job.wait(30.0)
    assert started_on(job, "c") == started_on(job, "d") == 0
    assert job.round == (1, "complete"), "nobody who trains is disturbed"
    finish(job, "c", "d")
    assert (started_on(job, "c"), started_on(job, "d")) == (1, 2)
    assert [a.host for a in job.announced("host_checked")] == ["c", "d"]
    job.wait(30.0)
    assert len(checks(job)) == 1


def test_a_host_that_fails_its_check_is_kept_out_and_checked_again_later(job: Scenario) -> None:
    job.hosts(a=1, b=1, c=1)
    job.wait(0.1)
    finish(job, failed=("c",))
    (blacklisted,) = job.announced("host_blacklisted")
    assert "node check: faulty: failed alone" in blacklisted.reason
    assert state_of(job, "c") == "cool-down"
    job.wait(9.9)
    assert len(checks(job)) == 1
    job.wait(0.3)
    assert checks(job) == [("c",), ("c",)]
    finish(job, "c")
    assert started_on(job, "c") == 1


def test_a_host_is_checked_after_its_cool_down_and_alone(job: Scenario) -> None:
    job.send(AgentLost("b", 1, "power failure"))
    job.send(AgentLost("b", 2, "power failure"))
    assert state_of(job, "b") == "cool-down"
    assert checks(job) == []
    job.wait(11.0)
    assert checks(job) == [("b",)], "not the host that trains"
    before = started_on(job, "b")
    finish(job, "b")
    assert started_on(job, "b") == before + 1


def test_a_host_without_workers_that_is_known_to_be_good_is_the_partner(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, max_np=1, last_call=0.1, checked_hosts=("a", "b"))
    s.training(a=1, b=1)
    s.hosts(a=1, b=1, c=1)
    s.wait(0.1)
    assert checks(s) == [("c", "b")]
    finish(s, "c", failed=("b",))
    assert (state_of(s, "b"), state_of(s, "c")) == ("cool-down", "usable")


def test_one_that_comes_back_is_checked_and_one_that_goes_meanwhile_is_forgotten(
    job: Scenario,
) -> None:
    job.hosts(a=1)
    job.ready(*job.members, version=3)
    job.hosts(a=1, b=1)
    job.wait(0.1)
    assert checks(job) == [("b",)]
    job.hosts(a=1)
    finish(job, "b")
    assert job.announced("host_checked") == []
    job.hosts(a=1, c=1)
    job.wait(0.1)
    assert checks(job) == [("b",), ("c",)]


def test_an_answer_that_comes_twice_or_late_changes_nothing(job: Scenario) -> None:
    job.hosts(a=1, b=1, c=1)
    job.wait(0.1)
    (first,) = job.all(CheckHosts)
    finish(job, "c")
    failures = tuple(HostResult(host, False, "faulty") for host in "abc")
    job.send(HostsChecked(failures, first.number))
    job.hosts(a=1, b=1, c=1, d=1)
    job.wait(0.1)
    job.send(HostsChecked((HostResult("d", True, "good"),), first.number))
    assert state_of(job, "d") == "checking", "that was the answer to another check"
    finish(job, "d")
    assert [a.host for a in job.announced("host_checked")] == ["c", "d"]
    assert job.announced("host_blacklisted") == []


def test_what_a_check_found_before_a_host_was_away_does_not_count(job: Scenario) -> None:
    job.hosts(a=1, b=1, c=1, d=1)
    job.wait(0.1)
    job.hosts(a=1, b=1)
    job.hosts(a=1, b=1, c=1, d=1)
    finish(job, "c", failed=("d",))
    assert job.announced("host_checked") == job.announced("host_blacklisted") == []
    assert (started_on(job, "c"), state_of(job, "d")) == (0, "checking")
    job.wait(0.1)
    assert checks(job) == [("c", "d"), ("c", "d")]
    finish(job, "c", "d")
    assert (started_on(job, "c"), started_on(job, "d")) == (1, 1)


def test_a_host_without_a_result_is_not_let_in(job: Scenario) -> None:
    job.hosts(a=1, b=1, c=1, d=1)
    job.wait(0.1)
    finish(job, "c")
    assert (started_on(job, "c"), started_on(job, "d")) == (1, 0)
    assert state_of(job, "d") == "cool-down"


def test_hosts_that_come_during_a_check_wait_for_the_next_one(job: Scenario) -> None:
    job.hosts(a=1, b=1, c=1)
    job.wait(0.1)
    job.hosts(a=1, b=1, c=1, d=1)
    job.wait(1.0)
    assert checks(job) == [("c",)]
    finish(job, "c")
    job.wait(0.1)
    assert checks(job)[-1] == ("d",)
    assert started_on(job, "d") == 0


def test_without_a_check_before_the_job_there_is_none_later(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=2).training(a=1)
    s.hosts(a=1, b=1)
    assert started_on(s, "b") == 1
    assert checks(s) == []


# ---- hosts that join: the job checks them before it starts ---------------------------------


@pytest.fixture
def joining(scenario: MakeScenario) -> Scenario:
    """A job for two to four hosts with two slots each, of which none has been checked."""
    sizes = {"start_np": 4, "start_min_np": 4, "min_np": 4, "max_np": 8}
    return scenario(**sizes, min_hosts=2, max_hosts=4, start_timeout=60.0, checked_hosts=())


def test_the_first_check_waits_for_enough_hosts_and_then_a_moment_for_more(
    joining: Scenario,
) -> None:
    joining.hosts(a=2)
    joining.wait(10.0)
    assert checks(joining) == []
    joining.hosts(a=2, b=2)
    joining.wait(1.0)
    joining.hosts(a=2, b=2, c=2)
    assert checks(joining) == []
    joining.wait(1.0)
    assert checks(joining) == [("a", "b", "c")]
    finish(joining, "a", "b", failed=("c",))
    assert [started_on(joining, host) for host in "abc"] == [2, 2, 0]
    joining.hosts(a=2, b=2, c=2, d=2)
    joining.wait(0.1)
    assert checks(joining)[1:] == [("d",)], "as any host that comes later"


def test_the_first_check_begins_at_once_when_no_more_hosts_can_come(joining: Scenario) -> None:
    joining.hosts(a=2, b=2, c=2, d=2)
    assert checks(joining) == [("a", "b", "c", "d")]


def test_a_long_first_check_takes_nothing_from_the_time_for_the_start(joining: Scenario) -> None:
    joining.wait(50.0)
    joining.hosts(a=2, b=2, c=2, d=2)
    joining.wait(300.0)
    joining.agents = False
    finish(joining, "a", "b", "c", "d")
    joining.wait(59.0)
    assert joining.job.ending.end is None
    joining.wait(2.0)
    assert joining.job.ending.end is not None


def test_too_few_hosts_end_the_job_after_the_start_timeout(joining: Scenario) -> None:
    joining.hosts(a=2)
    joining.wait(61.0)
    assert checks(joining) == []
    (end,) = joining.all(EndJob)
    assert (end.exit_code, "2 are needed for 60 s" in end.reason) == (75, True)


def test_a_job_that_needs_a_host_that_failed_ends_at_once_if_no_other_may_join(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, start_min_np=2, min_hosts=2, max_hosts=2, checked_hosts=())
    s.hosts(a=1, b=1)
    finish(s, "a", failed=("b",))
    (end,) = s.all(EndJob)
    assert end.exit_code == 75
    assert "1 of 2 hosts failed the node check (b faulty: failed alone); 1 left" in end.reason


def test_a_spare_host_takes_the_place_of_one_that_failed(joining: Scenario) -> None:
    joining.hosts(a=2, b=2, c=2, d=2)
    joining.hosts(a=2, b=2, c=2, d=2, e=2)
    finish(joining, "a", failed=("b", "c", "d"))
    assert joining.job.ending.end is None
    joining.wait(0.1)
    assert checks(joining)[1:] == [("e", "a")]
    finish(joining, "e", "a")
    assert (started_on(joining, "a"), started_on(joining, "e")) == (2, 2)


TWO = {"start_np": 2, "max_np": 2, "one_host_per_machine": True}


def places(job: Scenario) -> list[tuple[str, int, int]]:
    """Where the workers are that have a place: host, slot, local size."""
    workers = job.job.workers.workers.values()
    return sorted((w.host, w.place.local_rank, w.place.local_size) for w in workers if w.place)


def known(job: Scenario) -> dict[str, int]:
    return {name: host.slots for name, host in job.job.hosts.known.items()}


def removed(job: Scenario) -> list[tuple[str | None, str]]:
    return [(event.host, event.reason) for event in job.announced("host_removed")]


@pytest.fixture
def twice(scenario: MakeScenario) -> Scenario:
    """A job that names one machine twice; its agents come up when a test says so."""
    job: Scenario = scenario(agents=False, **TWO)
    job.machines = {"a": "m", "b": "m", "c": "n"}
    return job


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_first_name_has_the_slots_of_both(twice: Scenario, order: str) -> None:
    twice.hosts(a=1, b=1)
    for host in order:
        twice.agent_up(host)
    assert known(twice) == {"a": 2}
    assert {host for host, _, _ in places(twice)} == {"a"}
    assert sorted(rank for _, rank, _ in places(twice)) == [0, 1]
    ((host, reason),) = removed(twice)
    assert host == "b"
    assert "the same machine as a" in reason
    assert [stop.host for stop in twice.all(StopAgent)] == ["b"]


def test_the_name_at_work_stays_when_an_earlier_one_comes_up_later(twice: Scenario) -> None:
    twice.hosts(a=1, b=2)
    twice.agent_up("b")
    twice.ready(*twice.starting)
    twice.agent_up("a")
    assert known(twice) == {"b": 3}
    assert {host for host, _, _ in places(twice)} == {"b"}


def test_hosts_of_other_machines_and_of_unknown_ones_stay_apart(twice: Scenario) -> None:
    twice.hosts(a=1, c=1, d=1, e=1)
    for host in "ac":
        twice.agent_up(host)
    assert known(twice) == {"a": 1, "c": 1, "d": 1, "e": 1}
    twice.machines["a"] = ""
    twice.hosts(a=1, b=1, c=1)
    assert removed(twice) == [(name, "discovery no longer reports it") for name in "de"]


def test_names_are_kept_apart_where_that_is_wanted(scenario: MakeScenario) -> None:
    job: Scenario = scenario(start_np=2, max_np=2)
    job.machines = {"a": "m", "b": "m"}
    job.hosts(a=1, b=1)
    assert known(job) == {"a": 1, "b": 1}
    assert {host for host, _, _ in places(job)} == {"a", "b"}


def test_later_answers_of_discovery_count_for_both_names(twice: Scenario) -> None:
    twice.hosts(a=1, b=1)
    twice.agent_up("a")
    twice.agent_up("b")
    starts = len(twice.all(StartAgent))
    twice.hosts(b=2, a=1)
    assert known(twice) == {"a": 3}
    twice.hosts(b=2)
    assert known(twice) == {"a": 2}, "b is listed, and a is b"
    twice.hosts(c=1)
    assert known(twice) == {"c": 1}
    assert {start.host for start in twice.all(StartAgent)[starts:]} <= {"c"}


def test_three_names_are_one_host_and_a_snapshot_keeps_that(twice: Scenario) -> None:
    twice.machines["d"] = "m"
    twice.hosts(a=1, b=1, c=1, d=1)
    for host in "dba":
        if host in twice.job.fleet.agents:
            twice.agent_up(host)
    assert len([name for name in known(twice) if name != "c"]) <= 2
    twice.job = type(twice.job).restored(twice.job.snapshot())
    before = known(twice)
    twice.hosts(a=1, b=1, c=1, d=1)
    assert known(twice) == before


def test_a_name_that_means_another_machine_now_stands_for_itself(twice: Scenario) -> None:
    twice.hosts(a=1, b=1)
    twice.agent_up("a")
    twice.agent_up("b")
    assert known(twice) == {"a": 2}
    twice.machines["a"] = "new"
    twice.agent_lost("a")
    twice.agent_up("a", twice.job.fleet.agents["a"].incarnation)
    assert known(twice) == {"a": 1, "b": 1}
