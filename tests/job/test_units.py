"""Whole node units, and bounds on the number of hosts: by value, then as conversations."""

from __future__ import annotations

import pytest

from elastic_driver.job import units
from elastic_driver.job.decisions import SealRound
from elastic_driver.job.events import EventBatch
from elastic_driver.settings import Settings
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario


@pytest.mark.parametrize(
    ("hosts", "unit", "least", "most", "expected"),
    [
        ("abc", 1, 1, None, "abc"),
        ("abc", 2, 1, None, "ab"),
        ("abcde", 2, 1, 3, "ab"),
        ("abcdef", 3, 1, 5, "abc"),
        ("abcdef", 3, 1, None, "abcdef"),
        ("a", 2, 1, None, ""),
        ("abc", 1, 4, None, ""),
        ("abc", 2, 3, None, ""),  # 3 are needed and only 2 fit
        ("abcd", 2, 3, None, "abcd"),
        ("", 1, 1, None, ""),
    ],
)
def test_hosts_in_whole_units(
    hosts: str, unit: int, least: int, most: int | None, expected: str
) -> None:
    settings = Settings(node_unit=unit, min_hosts=least, max_hosts=most)
    assert "".join(units.whole(hosts, settings)) == expected


@pytest.mark.parametrize(
    ("unit", "least", "hosts", "said"),
    [
        (1, 1, 0, ""),
        (2, 1, 2, ""),
        (2, 1, 1, "1 host has workers, 2 are needed (in units of 2)"),
        (2, 3, 3, "3 hosts have workers, 4 are needed (in units of 2)"),
        (1, 2, 1, "1 host has workers, 2 are needed"),
    ],
)
def test_a_shortage_of_hosts_is_put_into_words(
    unit: int, least: int, hosts: int, said: str
) -> None:
    assert units.shortage(hosts, Settings(node_unit=unit, min_hosts=least)) == said


def test_a_surplus_host_waits_and_joins_with_the_next_one(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, node_unit=2).training(a=1, b=1)
    s.hosts(a=1, b=1, c=1)
    s.ready("c.0.1")
    s.wait(5.0)
    assert (s.members, s.round) == (["a.0.1", "b.0.1"], (1, "complete"))
    s.hosts(a=1, b=1, c=1, d=1)
    s.ready("d.0.1")
    s.wait(1.0)
    assert s.notice.after_step is not None
    s.ready("a.0.1", "b.0.1", version=3)
    assert s.members == ["a.0.1", "b.0.1", "c.0.1", "d.0.1"]


def test_a_standby_takes_the_place_of_a_lost_host_at_once(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, node_unit=2).training(a=1, b=1)
    s.hosts(a=1, b=1, c=1)
    s.ready("c.0.1")
    s.agent_lost("b")
    s.ready("a.0.1", version=4)
    assert s.members == ["a.0.1", "c.0.1"]


def test_of_three_survivors_two_train_on_and_the_third_stands_by(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, node_unit=2).training(a=1, b=1, c=1, d=1)
    s.agent_lost("b")
    s.ready("a.0.1", "c.0.1", "d.0.1", version=4)
    assert s.members == ["a.0.1", "c.0.1"]
    assert s.job.workers.workers["d.0.1"].state.value == "ready"
    s.step("a.0.1", "c.0.1", step=5)
    s.agent_up("b", 2)
    s.ready("b.0.2")
    s.wait(1.0)
    s.ready("a.0.1", "c.0.1", version=9)
    assert sorted(s.members) == ["a.0.1", "b.0.2", "c.0.1", "d.0.1"]


def test_a_standby_that_took_part_once_does_not_hold_up_the_end(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, node_unit=2).training(a=1, b=1, c=1, d=1)
    s.agent_lost("b")
    s.ready("a.0.1", "c.0.1", "d.0.1", version=4)
    s.exit("a.0.1", 0)
    s.exit("c.0.1", 0)
    s.obey_stops()
    assert s.end is not None
    assert s.end.exit_code == 0


def test_the_host_that_holds_the_newest_state_is_among_those_that_train_on(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=4, node_unit=2).training(a=1, b=1, c=1, d=1)
    s.agent_lost("b")
    s.ready("a.0.1", version=4)
    s.ready("c.0.1", version=4)
    s.ready("d.0.1", version=5)
    assert s.members == ["a.0.1", "d.0.1"]


def test_fewer_than_a_unit_wait_and_then_give_up_with_the_reason(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, node_unit=2, elastic_timeout=50.0).training(a=1, b=1)
    s.hosts(a=1)
    s.ready("a.0.1", "b.0.1", version=3)
    s.wait(20.0)
    assert s.end is None
    assert s.job.effects.waiting == "1 host has workers, 2 are needed (in units of 2)"
    s.hosts(a=1, e=1)
    s.ready("e.0.1")
    assert s.members == ["a.0.1", "e.0.1"]
    s.hosts(a=1)
    s.wait(1.0)
    s.ready("a.0.1", "e.0.1", version=9)
    s.wait(60.0)
    assert s.end is not None
    assert "1 host has workers, 2 are needed (in units of 2) for 50 s" in s.end.reason


def test_too_few_hosts_at_the_start_run_out_of_time(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, node_unit=2, start_timeout=10.0)
    s.hosts(a=4)
    assert s.starting == []
    s.wait(10.0)
    assert s.end is not None
    assert s.end.exit_code == 75
    assert "1 host has workers, 2 are needed" in s.end.reason


def test_no_world_has_more_hosts_than_the_most(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, min_hosts=2, max_hosts=2).training(a=1, b=1)
    s.hosts(a=1, b=1, c=1)
    assert "c" not in s.job.fleet.agents
    s.hosts(a=1, c=1)
    s.ready("c.0.1")
    s.wait(1.0)
    s.ready("a.0.1", "b.0.1", version=3)
    assert s.members == ["a.0.1", "c.0.1"]


def test_hosts_of_a_unit_share_the_workers_that_are_wanted(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, max_np=4, node_unit=2)
    s.hosts(a=4, b=4)
    assert s.starting == ["a.0.1", "a.1.1", "b.0.1", "b.1.1"]


def test_workers_that_crowd_one_host_make_room_for_a_second(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2, node_unit=2).training(a=1, b=1)
    s.hosts(a=2)
    s.ready("a.0.1", "b.0.1", version=3)
    s.obey_stops()
    assert s.job.workers.active() == 2  # both on a, for there is no other host
    s.hosts(a=2, c=2)
    s.obey_stops()
    s.ready("c.0.1")
    assert s.members == ["a.0.1", "c.0.1"]


def test_a_crowded_host_makes_room_for_hosts_that_come_up_at_the_same_moment(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3, node_unit=3).training(a=2, b=2, c=2)
    s.agents = False
    for host in "abc":
        s.agent_lost(host, "the agent exited")
    s.agent_up("a", 2)
    assert s.starting == ["a.0.2", "a.1.1"]
    both = [ev.AgentReady(host, 2, 1, f"at {host}", (5000,)) for host in "bc"]
    s.decisions += s.job.handle(EventBatch(tuple(both)), s.now)
    s.ready(*s.starting)
    assert s.members == ["a.0.2", "b.0.2", "c.0.2"]


def test_a_plain_job_is_not_restarted_for_a_host_that_makes_no_unit(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, node_unit=2)
    s.hosts(a=1, b=1)
    s.wait(20.0)
    assert s.job.outcome.kind.value == "plain"
    s.hosts(a=1, b=1, c=1)
    s.wait(5.0)
    assert s.round == (1, "complete")
    s.hosts(a=1, b=1, c=1, d=1)
    s.wait(5.0)
    s.obey_stops()
    assert len(s.members) == 4
    assert s.all(SealRound)


def test_a_plain_job_grows_where_a_new_round_has_more_workers(scenario: MakeScenario) -> None:
    s = scenario(agents=False, start_np=2, min_np=2, max_np=3, node_unit=2)
    s.send(ev.ScaleRequested(2))
    s.hosts(a=2, b=1, c=1)
    s.agent_up("a")
    s.agent_lost("b", "its power is off", unreachable=True)
    s.agent_up("c")
    s.wait(20.0)
    assert (s.job.outcome.kind.value, s.members) == ("plain", ["a.0.1", "c.0.1"])
    s.agent_up("b", 2)
    s.send(ev.ScaleRequested(3))
    s.wait(1.0)
    s.obey_stops()
    assert s.members == ["a.0.2", "a.1.1", "b.0.1"]
    assert s.wait(100.0) == []


def test_a_plain_job_does_not_look_for_other_hosts_while_agents_are_awaited(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, node_unit=2)
    s.hosts(a=1, b=1, c=3)
    s.wait(20.0)
    assert s.members == ["a.0.1", "b.0.1"]
    before = s.round
    s.resume()
    for host in "cba":
        s.returns(host)
        s.wait(0.5)
    assert s.round == before
