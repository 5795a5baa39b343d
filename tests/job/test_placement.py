"""Spares: when they are started, what they take over, and how their own failures count.

Hosts over the number wanted: some have an agent that waits, to replace a host that is lost.
"""

from __future__ import annotations

import pytest

from elastic_driver.job.decisions import StartAgent
from elastic_driver.job.events import RankSlow
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario


def agents(job: Scenario) -> list[str]:
    return [decision.host for decision in job.all(StartAgent)]


def test_an_agent_stands_by_once_the_job_trains_and_starts_no_worker(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=2, max_np=2).training(a=1, b=1, c=1, d=1, steps=0)
    assert agents(job) == ["a", "b"]
    job.step("a.0.1")
    assert agents(job) == ["a", "b", "c"]
    job.wait(60.0)
    assert agents(job) == ["a", "b", "c"]
    assert job.round == (1, "complete")
    assert job.starting == []
    reasons = {host.host: host.reason for host in job.job.status(job.now).hosts}
    assert reasons["c"] == "stands by to replace a host that is lost"
    assert {reasons[host] for host in "abd"} == {""}


def test_a_lost_hosts_slots_are_filled_at_once_and_another_host_stands_by(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=2, max_np=2).training(a=1, b=1, c=1, d=1)
    job.silent.add("b")
    job.agent_lost("b", "power", unreachable=True)
    assert job.starting == ["c.0.1"]
    job.ready("a.0.1", version=3)
    job.ready("c.0.1")
    job.wait(1.0)
    job.ready("a.0.1", version=4)
    assert job.members == ["a.0.1", "c.0.1"]
    job.step("a.0.1")
    assert agents(job) == ["a", "b", "c", "d"]


def test_there_are_as_many_as_the_largest_host_in_use_needs(scenario: MakeScenario) -> None:
    job = scenario(start_np=5, max_np=5).training(a=4, b=1, c=2, d=1, e=1, f=8)
    assert agents(job) == ["a", "b", "c", "d", "e"]


def test_a_plain_job_has_them_too(scenario: MakeScenario) -> None:
    job = scenario(start_np=2, max_np=2)
    job.hosts(a=2, b=2)
    job.wait(9.0)
    assert agents(job) == ["a"]
    job.wait(2.0)
    assert agents(job) == ["a", "b"]


def test_slow_hosts_and_hosts_in_trouble_do_not_stand_by(scenario: MakeScenario) -> None:
    job = scenario(start_np=1, max_np=1).training(a=1, b=1, c=1, steps=0)
    job.job.hosts.distrust("b")
    job.send(ev.DrainRequested("c", "a new fan", None))
    job.step("a.0.1")
    assert agents(job) == ["a"]


def test_a_host_that_comes_back_when_its_place_is_taken_stands_by(
    scenario: MakeScenario,
) -> None:
    job = scenario(start_np=2, max_np=2).training(a=1, b=1, c=1)
    job.silent.add("b")
    job.agent_lost("b", "power", unreachable=True)
    job.ready("a.0.1", version=3)
    job.ready("c.0.1")
    job.wait(1.0)
    job.ready("a.0.1", version=4)
    job.step("a.0.1")
    job.silent.clear()
    job.wait(0.5)
    assert agents(job) == ["a", "b", "c", "b"]
    assert job.members == ["a.0.1", "c.0.1"]
    job.wait(60.0)
    assert job.round == (3, "complete")


def trained(scenario: MakeScenario, hosts: dict[str, int], **settings: int) -> Scenario:
    """A job on these hosts whose spares are ready."""
    total = sum(hosts.values())
    s = scenario(start_np=total, max_np=total, **settings).training(**hosts)
    s.ready(*s.in_state("warming"))
    return s


def test_spares_are_started_on_each_host_once_the_round_has_stepped(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3, spares=1).training(steps=0, a=2, b=1)
    assert s.in_state("warming") == []
    s.step(s.members[0])
    assert s.in_state("warming") == ["a.0.2", "b.0.2"]
    order = s.orders(msg.StartWorkerOrder)[-1]
    assert (order.place, order.round) == (s.world.members[2].place, 2)


def test_a_spare_joins_the_survivors_at_once_at_full_size(scenario: MakeScenario) -> None:
    s = trained(scenario, {"a": 3}, spares=1)
    s.exit("a.2.1", -9)
    assert s.starting == s.in_state("spare") == []
    s.ready("a.0.1", "a.1.1", version=7)
    assert s.round == (2, "complete")
    joined = s.world.members[2]
    assert (joined.worker, joined.version) == ("a.0.2", -1)
    assert (joined.place.slot, joined.place.local_rank) == (2, 2)
    arrived = msg.decode_world(msg.encode_world(s.world))
    assert arrived == s.world
    assert arrived.member("a.0.2") == joined
    assert s.in_state("warming") == []
    s.step(*s.members, step=8)
    assert s.in_state("warming") == ["a.0.3"]


def test_without_a_spare_for_it_a_second_loss_is_repaired_as_ever(scenario: MakeScenario) -> None:
    s = trained(scenario, {"a": 3}, spares=1)
    s.exit("a.1.1", -9)
    s.exit("a.2.1", -9)
    assert s.starting == ["a.2.2"]
    s.ready("a.0.1", version=7)
    assert s.members == ["a.0.1", "a.0.2"]
    s.step(*s.members, step=8)
    assert s.in_state("warming") == []  # a replacement boots
    s.ready("a.2.2")
    s.wait(0.1)
    s.ready(*s.members, version=9)
    s.step(*s.members, step=10)
    assert s.in_state("warming") == ["a.0.3"]


def test_a_spare_helps_only_its_own_host_and_goes_with_it(scenario: MakeScenario) -> None:
    s = trained(scenario, {"a": 1, "b": 1}, spares=1, min_np=1)
    s.exit("b.0.1", -9)
    assert s.in_state("spare") == ["a.0.2"]
    s.agent_lost("a")
    assert s.in_state("spare") == []
    s.agent_up("a", 2)
    assert s.starting == ["a.0.3"]


def test_a_spare_that_uses_a_device_takes_only_its_own_slot(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2, spares=2).training(a=2)
    for name in s.in_state("warming"):
        s.send(ev.WorkerReady(name, 0, -1, True, "started", bound=True))
    s.exit("a.1.1", -9)
    assert s.in_state("spare") == ["a.0.2"]
    assert s.in_state("ready") == ["a.1.2"]
    s.exit("a.1.2", -9)
    assert s.starting == ["a.1.3"]


def test_a_slot_that_comes_free_while_the_job_trains_goes_to_a_spare(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, spares=1).training(a=1)
    s.ready("a.0.2")
    s.hosts(a=2)
    assert s.in_state("ready") == ["a.0.2"]
    s.wait(0.1)
    s.ready("a.0.1", version=5)
    assert s.members == ["a.0.1", "a.0.2"]


def test_a_drained_host_loses_its_spares_and_is_let_go(scenario: MakeScenario) -> None:
    s = trained(scenario, {"a": 1, "b": 1}, spares=1, min_np=1)
    s.send(ev.DrainRequested("b"))
    assert s.in_state("stopping") == ["b.0.2"]
    s.exit("b.0.2", -15)
    s.wait(1000.0)
    s.ready("a.0.1", "b.0.1", version=7)
    s.obey_stops()
    assert [a.host for a in s.announced("host_drained")] == ["b"]


def test_spares_that_fail_are_no_failure_of_the_job_and_come_back_ever_later(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario, {"a": 2}, spares=1, max_restarts=0)
    for number, pause in ((2, 1.0), (3, 2.0), (4, 4.0)):
        s.exit(f"a.0.{number}", -9)
        s.wait(pause - 0.1)
        assert s.in_state("warming") == []
        s.wait(0.2)
        assert s.in_state("warming") == [f"a.0.{number + 1}"]
        s.ready(f"a.0.{number + 1}")
    assert (s.round, s.end) == ((1, "complete"), None)
    assert s.job.status(s.now).counters.failures == 0


def test_a_host_whose_spares_end_before_they_are_ready_gets_no_more(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=2, spares=1).training(a=2)
    for number in (2, 3, 4):
        s.exit(f"a.0.{number}", 1)
        s.wait(100.0)
    assert s.in_state("warming") == []
    assert "gets no more" in s.announced("worker_exited")[-1].reason
    s.exit("a.1.1", -9)
    assert s.starting == ["a.1.2"]


def test_a_host_that_gets_no_more_spares_keeps_the_one_that_it_has(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=1, spares=2).training(a=1)
    s.exit("a.0.2", 1)
    s.wait(1.0)
    s.exit("a.0.3", 1)
    s.wait(2.0)
    s.exit("a.0.4", 1)
    (last,) = s.in_state("warming")
    s.ready(last)
    s.resume()
    s.returns("a")
    s.wait(100.0)
    assert s.in_state("spare") == [last]
    assert s.in_state("warming") == []
    s.exit("a.0.1", -9)
    s.step(last)
    assert len(s.in_state("warming")) == 2  # it was of use, so there may be others


def test_a_silent_spare_is_killed_and_the_round_goes_on(scenario: MakeScenario) -> None:
    s = trained(scenario, {"a": 2}, spares=1)
    s.lost("a.0.2")
    assert s.in_state("stopping") == ["a.0.2"]
    s.exit("a.0.2", -9)
    assert s.in_state("warming") == ["a.0.3"]
    assert s.round == (1, "complete")


def test_spares_stop_when_a_worker_has_finished(scenario: MakeScenario) -> None:
    s = trained(scenario, {"a": 2}, spares=1)
    s.exit("a.0.1", 0)
    assert s.in_state("stopping") == ["a.0.2"]
    s.exit("a.1.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_if_every_worker_is_killed_the_spare_is_in_the_first_round_after(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario, {"a": 2}, spares=1)
    s.exit("a.0.1", -9)
    s.exit("a.1.1", -9)
    assert s.starting == ["a.1.2"]
    s.ready("a.1.2")
    assert s.members == ["a.0.2", "a.1.2"]


def test_a_spare_is_shown_with_no_rank(scenario: MakeScenario) -> None:
    s = trained(scenario, {"a": 2}, spares=1)
    shown = [(m.worker, m.rank, m.state) for m in s.job.status(s.now).members]
    assert shown[-1] == ("a.0.2", -1, "spare")
    assert s.announced("spare_ready")[0].rank is None


def test_a_plain_script_has_no_spares_and_the_user_is_told_once(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2, spares=1, plain_after=5.0)
    s.hosts(a=2)
    s.wait(20.0)
    assert s.round == (1, "complete")
    assert s.in_state("warming") == []
    assert len(s.announced("spares_unused")) == 1


@pytest.mark.parametrize("spares", [1, 3])
def test_a_slow_worker_may_be_replaced_by_a_spare(scenario: MakeScenario, spares: int) -> None:
    s = scenario(start_np=2, max_np=2, spares=spares, replace_slow=True, slow_for=0.0)
    s.hosts(a=1, b=2)
    s.ready(*s.starting)
    s.step(*s.members)
    s.ready(*s.in_state("warming"))
    s.send(RankSlow("a.0.1", 1, 3.0))
    s.wait(0.1)
    assert s.notice.round == 1
    s.ready("a.0.1", "b.0.1", version=5)
    s.obey_stops()
    assert len(s.announced("worker_replaced")) == 1
