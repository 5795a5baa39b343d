"""Slow workers are replaced on another host, one at a time, and never without somebody ready."""

from __future__ import annotations

from elastic_driver.job.events import RankRecovered, RankSlow
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario

SLOW_FOR, PAUSE = 5.0, 60.0


def slow(s: Scenario, worker: str, *, wait: float = SLOW_FOR) -> None:
    s.send(RankSlow(worker, s.job.rounds.current.number, 3.0))
    s.wait(wait)


def recovered(s: Scenario, worker: str) -> None:
    s.send(RankRecovered(worker, s.job.rounds.current.number))


def leave(s: Scenario, version: int) -> None:
    """Every running member arrives at the boundary, and who has to go goes."""
    s.wait(0.1)
    assert s.notice.after_step is not None
    s.ready(*s.in_state("running"), version=version)
    s.obey_stops()
    s.step(*s.members)


def stopped(s: Scenario) -> list[str]:
    return [order.worker for order in s.orders(msg.StopWorkerOrder)]


def idle_host(scenario: MakeScenario, **more: object) -> Scenario:
    """Two members on a and b, and a free slot on c."""
    settings = {"start_np": 2, "max_np": 2, "replace_slow": True, **more}
    return scenario(**settings).training(a=1, b=1, c=1)


def test_the_replacement_is_ready_before_the_slow_worker_leaves(scenario: MakeScenario) -> None:
    s = idle_host(scenario)
    slow(s, "b.0.1", wait=4.9)
    assert s.starting == []
    s.wait(0.1)
    assert s.starting == ["c.0.1"]
    (begun,) = s.announced("replacement_started")
    assert (begun.worker, begun.what.facts()) == ("b.0.1", {"target": "c"})
    assert begun.reason == "on c: it took 3.0 times the usual time on b"
    s.wait(30.0)
    assert s.round == (1, "complete")
    assert stopped(s) == []
    s.ready("c.0.1")
    leave(s, version=9)
    assert s.members == ["a.0.1", "c.0.1"]
    assert [member.version for member in s.world.members] == [9, -1]
    assert stopped(s) == ["b.0.1"]
    (done,) = s.announced("worker_replaced")
    assert (done.worker, done.what.facts()) == ("b.0.1", {"replacement": "c.0.1"})
    assert s.job.outcome.budget.failures == 0
    s.wait(1000.0)
    assert s.round == (2, "complete")


def test_unless_asked_for_nobody_is_replaced(scenario: MakeScenario) -> None:
    s = idle_host(scenario, replace_slow=False)
    slow(s, "b.0.1", wait=1000.0)
    assert (s.starting, s.round) == ([], (1, "complete"))


def test_a_rank_that_recovers_in_time_is_not_replaced(scenario: MakeScenario) -> None:
    s = idle_host(scenario)
    slow(s, "b.0.1", wait=4.9)
    recovered(s, "b.0.1")
    s.wait(1000.0)
    assert (s.starting, s.round) == ([], (1, "complete"))


def test_a_rank_that_recovers_while_its_replacement_boots_stays(scenario: MakeScenario) -> None:
    s = idle_host(scenario)
    slow(s, "b.0.1")
    recovered(s, "b.0.1")
    assert stopped(s) == ["c.0.1"]
    assert [a.reason for a in s.announced("replacement_abandoned")] == ["it is no longer slow"]
    s.obey_stops()
    s.wait(1000.0)
    assert s.round == (1, "complete")
    slow(s, "b.0.1")
    assert s.starting == ["c.0.2"], "slow once more, and its host is no worse than before"


def test_without_a_free_slot_elsewhere_nothing_happens_and_that_is_said_once(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=2, replace_slow=True).training(a=1, b=2)
    slow(s, "b.0.1")
    s.wait(100.0)
    assert (s.starting, s.round) == ([], (1, "complete"))
    (said,) = s.announced("worker_not_replaced")
    assert said.worker == "b.0.1"
    assert "--max-np" in said.reason
    s.hosts(a=1, b=2, c=1)
    assert s.starting == ["c.0.1"], "a host that comes later has room"


def test_where_any_number_of_workers_is_wanted_there_is_no_room(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, replace_slow=True).training(a=1, b=1)
    slow(s, "b.0.1")
    assert len(s.announced("worker_not_replaced")) == 1


def test_a_slow_host_does_not_get_the_worker_of_another_one(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, max_np=3, replace_slow=True).training(a=1, b=2, c=2)
    assert s.members == ["a.0.1", "b.0.1", "b.1.1"]
    slow(s, "b.0.1", wait=1.0)
    slow(s, "a.0.1", wait=4.0)
    assert s.starting == ["c.0.1"]
    s.ready("c.0.1")
    leave(s, version=4)
    slow(s, "c.0.1", wait=PAUSE + SLOW_FOR)
    assert s.starting == [], "its host, b, was slow"
    assert s.announced("worker_not_replaced")[-1].worker == "c.0.1"


def test_a_slow_host_is_the_last_choice_for_as_long_as_it_has_not_recovered(
    scenario: MakeScenario,
) -> None:
    s = idle_host(scenario)
    slow(s, "a.0.1")
    s.ready("c.0.1")
    leave(s, version=9)
    s.hosts(a=1, b=1, c=1, d=1)
    assert [h.reason for h in s.job.status(s.now).hosts if h.host == "a"] == [
        "slow: the last choice"
    ]
    s.hosts(a=1, c=1, d=1)
    assert s.starting == ["d.0.1"], "d came later, but was never slow"
    s.hosts(a=1, c=1)
    assert s.starting == ["a.0.2"], "better than none"


def test_whoever_looked_after_a_drained_host_lets_it_count_again(scenario: MakeScenario) -> None:
    s = idle_host(scenario)
    slow(s, "b.0.1")
    s.ready("c.0.1")
    leave(s, version=9)
    s.send(ev.DrainRequested("b", "a new fan"))
    s.send(ev.DrainCancelled("b", "it is in"))
    slow(s, "c.0.1", wait=PAUSE)
    assert s.starting == ["b.0.2"]


def test_workers_of_one_host_follow_each_other_and_another_host_waits(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=4, max_np=4, replace_slow=True).training(a=1, b=2, c=1, d=2, e=2)
    slow(s, "b.0.1")
    s.ready("d.0.1")
    leave(s, version=4)
    slow(s, "b.1.1")
    assert s.starting == ["d.1.1"]
    s.ready("d.1.1")
    leave(s, version=8)
    slow(s, "c.0.1", wait=PAUSE - 1.0)
    assert s.starting == []
    s.wait(1.0)
    assert s.starting == ["e.0.1"]


def test_a_failure_meanwhile_keeps_the_slow_worker_in_the_world(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, max_np=3, replace_slow=True).training(a=1, b=1, c=1, d=1)
    slow(s, "b.0.1")
    assert s.starting == ["d.0.1"]
    s.exit("c.0.1", -9)
    s.ready("a.0.1", "b.0.1", version=5)
    assert s.members == ["a.0.1", "b.0.1"]
    assert len(s.announced("replacement_abandoned")) == 1
    s.ready("d.0.1")
    s.wait(0.1)
    s.ready("a.0.1", "b.0.1", version=6)
    assert s.members == ["a.0.1", "b.0.1", "d.0.1"], "the replacement came just in time"


def test_a_member_lost_while_they_change_places_leaves_the_slow_one_and_its_state_in(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=3, max_np=3, min_np=3, replace_slow=True).training(a=1, b=1, c=1, d=1)
    slow(s, "b.0.1")
    s.ready("d.0.1")
    s.wait(0.1)
    assert s.notice.after_step is not None
    s.ready("b.0.1", version=7)
    s.exit("c.0.1", -9)
    s.ready("a.0.1", version=6)
    assert s.members == ["a.0.1", "b.0.1", "d.0.1"]
    assert max(member.version for member in s.world.members) == 7


def test_a_replacement_that_fails_to_start_leaves_the_world_as_it_was(
    scenario: MakeScenario,
) -> None:
    s = idle_host(scenario, start_timeout=40.0)
    s.agents = False
    s.agent_lost("c", "the agent exited")  # it stood by
    slow(s, "b.0.1")
    s.agent_lost("c", "ssh: connection refused")
    assert [a.reason for a in s.announced("replacement_abandoned")] == [
        "host c cannot be used any more"
    ]
    s.wait(30.0)
    assert s.round == (1, "complete")
    assert s.in_state("running") == ["a.0.1", "b.0.1"]


def test_a_replacement_that_never_gets_ready_is_given_up(scenario: MakeScenario) -> None:
    s = idle_host(scenario, start_timeout=40.0)
    slow(s, "b.0.1")
    s.wait(40.0)
    assert s.announced("replacement_abandoned")[0].reason == "no replacement is ready within 40 s"
    assert stopped(s) == ["c.0.1"]
    s.obey_stops()
    assert s.round == (1, "complete")
    s.wait(PAUSE - 1.0)
    assert s.starting == []
    s.wait(1.0)
    assert s.starting == ["c.0.2"], "another try, a minute later"


def test_no_replacement_uses_up_the_last_change_of_the_reset_limit(scenario: MakeScenario) -> None:
    s = idle_host(scenario, reset_limit=1)
    slow(s, "b.0.1")
    assert (s.starting, s.end) == ([], None)
    assert "reset limit" in s.announced("worker_not_replaced")[0].reason


def test_a_world_of_whole_units_stays_one(scenario: MakeScenario) -> None:
    s = idle_host(scenario, min_hosts=2, max_hosts=2, node_unit=2)
    slow(s, "b.0.1")
    s.ready("c.0.1")
    leave(s, version=3)
    assert s.members == ["a.0.1", "c.0.1"]
    half = scenario(start_np=3, max_np=3, replace_slow=True, max_hosts=2).training(a=1, b=2, c=2)
    slow(half, "b.0.1")
    assert half.starting == [], "b would stay for its other worker, and be a third host"


def two_hosts(scenario: MakeScenario) -> Scenario:
    """Two members on each of the two hosts that a world needs, and two free slots on a."""
    settings = {"start_np": 4, "max_np": 4, "min_hosts": 2, "replace_slow": True}
    s = scenario(**settings).training(a=4, b=2)
    assert s.members == ["a.0.1", "a.1.1", "b.0.1", "b.1.1"]
    return s


def test_the_last_worker_that_stays_on_a_needed_host_is_not_replaced(
    scenario: MakeScenario,
) -> None:
    s = two_hosts(scenario)
    s.send(ev.WorkerLeaving("b.0.1", 600.0, "it got SIGTERM"))
    slow(s, "b.1.1")
    assert s.announced("replacement_started") == []
    s.ready("a.2.1")
    leave(s, version=3)
    assert s.members == ["a.0.1", "a.1.1", "a.2.1", "b.1.1"]


def test_who_becomes_the_last_on_a_needed_host_stays_though_its_replacement_is_ready(
    scenario: MakeScenario,
) -> None:
    s = two_hosts(scenario)
    slow(s, "b.1.1")
    s.ready("a.2.1")
    s.send(ev.WorkerLeaving("b.0.1", 600.0, "it got SIGTERM"))
    leave(s, version=3)
    assert s.members == ["a.0.1", "a.1.1", "a.2.1", "b.1.1"]
    (told,) = s.announced("replacement_abandoned")
    assert told.reason == "without it there are too few hosts"


def test_more_workers_are_not_kept_waiting_for_a_replacement(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=4, replace_slow=True)
    s.send(ev.ScaleRequested(2))
    s.training(a=1, b=1, c=1, d=1)
    slow(s, "b.0.1")
    assert s.starting == ["c.0.1"]
    s.send(ev.ScaleRequested(4))
    assert sorted(s.starting) == ["c.0.1", "d.0.1"]
    assert s.announced("replacement_abandoned")[0].reason == "more workers are wanted"


def test_a_verdict_of_an_earlier_round_is_dropped(scenario: MakeScenario) -> None:
    s = idle_host(scenario)
    s.send(RankSlow("b.0.1", 7, 3.0))
    s.send(RankRecovered("b.0.1", 1))
    assert s.job.effects.ignored_events == 2
    s.wait(100.0)
    assert s.starting == []


def test_a_job_that_finishes_replaces_nobody(scenario: MakeScenario) -> None:
    s = idle_host(scenario)
    slow(s, "b.0.1")
    s.exit("a.0.1", 0)
    assert stopped(s) == ["c.0.1"]
    s.exit("b.0.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 0
