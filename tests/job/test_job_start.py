"""From the first host to the first world."""

from __future__ import annotations

from elastic_driver.job.decisions import EndJob, PublishWorld, StartAgent, StopAgent
from elastic_driver.job.events import DiscoveryFailed, StopRequested, Tick
from elastic_driver.words import orders as msg
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario


def test_agents_are_started_in_stable_order_until_their_slots_reach_max_np(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=4, max_np=4, agents=False)
    s.hosts(b=2, a=2, c=2)
    assert [(d.host, d.slots) for d in s.all(StartAgent)] == [("b", 2), ("a", 2)]


def test_without_max_np_every_host_gets_an_agent(scenario: MakeScenario) -> None:
    s = scenario(agents=False)
    s.hosts(a=1, b=2, c=3)
    assert [d.host for d in s.all(StartAgent)] == ["a", "b", "c"]


def test_workers_start_when_every_wanted_agent_is_up(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=3, agents=False)
    s.hosts(a=2, b=2)
    s.agent_up("a")
    assert s.orders(msg.StartWorkerOrder) == []
    s.agent_up("b")
    assert [o.worker for o in s.orders(msg.StartWorkerOrder)] == ["a.0.1", "a.1.1", "b.0.1"]


def test_an_agent_that_is_slow_is_not_waited_for_beyond_the_last_call(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=4, last_call=0.5, agents=False)
    s.hosts(a=2, b=2)
    s.agent_up("a")
    s.wait(0.49)
    assert s.starting == []
    s.wait(0.01)
    assert s.starting == ["a.0.1", "a.1.1"]


def test_fewer_slots_than_start_np_start_nobody_until_a_host_is_added(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=4, max_np=4)
    s.hosts(a=2)
    s.wait(100.0)
    assert s.starting == []
    s.hosts(a=2, b=2)
    assert len(s.starting) == 4


def test_after_the_start_timeout_the_job_settles_for_start_min_np(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, start_min_np=2, start_timeout=30.0)
    s.hosts(a=2)
    s.wait(29.9)
    assert s.starting == []
    s.wait(0.1)
    assert s.starting == ["a.0.1", "a.1.1"]
    s.ready("a.0.1", "a.1.1")
    assert s.world.size == 2


def test_after_the_start_timeout_too_few_slots_end_the_job_with_75(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, start_timeout=30.0)
    s.hosts(a=2)
    s.wait(30.0)
    assert s.end is not None
    assert s.end.exit_code == 75
    assert s.end.reason.startswith("need 4 slots, found 2 after 30 s")
    assert s.job.deadline() is None


def test_workers_that_still_boot_when_the_job_is_given_up_are_named(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, start_timeout=30.0)
    s.hosts(a=2, b=1)
    s.ready("a.0.1", "a.1.1")
    s.wait(30.0)
    assert s.end is not None
    assert s.end.exit_code == 75
    assert s.end.reason.startswith(
        "need 3 slots, found 2 after 30 s (1 worker is still booting, on b); lower -np"
    )


def test_no_host_at_all_ends_the_job_with_75_too(scenario: MakeScenario) -> None:
    s = scenario(start_timeout=30.0)
    s.send(DiscoveryFailed("script exited 1"))
    assert s.announced("discovery_failed")[0].reason == "script exited 1; the 0 known hosts stay"
    s.wait(30.0)
    assert s.end is not None
    assert s.end.exit_code == 75


def test_the_first_world_needs_every_worker_that_was_started(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=3)
    s.hosts(a=3)
    s.ready("a.0.1", "a.2.1")
    assert s.all(PublishWorld) == []
    s.ready("a.1.1")
    assert s.members == ["a.0.1", "a.1.1", "a.2.1"]
    assert s.round == (1, "complete")


def test_a_worker_that_boots_for_ever_delays_the_first_world_by_the_start_timeout_only(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=3, start_timeout=60.0)
    s.hosts(a=3)
    s.ready("a.0.1", "a.1.1")
    s.wait(59.9)
    assert s.all(PublishWorld) == []
    s.wait(0.1)
    assert s.members == ["a.0.1", "a.1.1"]


def test_a_process_that_is_never_reported_ends_the_job_with_75(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, start_timeout=60.0, processes=False)
    s.hosts(a=2)
    s.started("a.0.1")
    s.wait(60.0)
    assert s.end is not None
    assert s.end.exit_code == 75
    assert "found 1 after 60 s (1 process has not been started yet, on a); lower" in s.end.reason


def test_every_agent_is_told_the_ranks_of_its_own_workers(scenario: MakeScenario) -> None:
    s = scenario(start_np=3).training(a=2, b=1)
    ranks = [order.ranks for order in s.orders(msg.RanksOrder)]
    assert ranks == [{"a.0.1": 0, "a.1.1": 1}, {"b.0.1": 2}]


def test_births_name_the_address_of_rank_0_and_the_port_of_the_round(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, agents=False)
    s.hosts(a=1, b=1)
    s.send(ev.AgentReady("b", 1, 7, "10.0.0.2", (7000, 7001)))
    s.send(ev.AgentReady("a", 1, 8, "10.0.0.1", (6000, 6001)))
    births = s.orders(msg.StartWorkerOrder)
    assert {(o.master_addr, o.master_port, o.round) for o in births} == {("10.0.0.1", 6001, 1)}
    assert [(o.worker, o.place.rank, o.place.size) for o in births] == [
        ("a.0.1", 0, 2),
        ("b.0.1", 1, 2),
    ]


def test_an_agent_without_free_ports_gets_torchs_own_default(scenario: MakeScenario) -> None:
    s = scenario(agents=False)
    s.hosts(a=1)
    s.send(ev.AgentReady("a", 1, 7, "10.0.0.1", ()))
    assert s.orders(msg.StartWorkerOrder)[0].master_port == 29500


def test_a_host_whose_agent_cannot_start_goes_to_cooldown_and_gets_another_try(
    scenario: MakeScenario,
) -> None:
    s = scenario(agents=False, blacklist_cooldown=(10.0, 600.0))
    s.hosts(a=1, b=1)
    s.agent_up("b")
    s.agent_lost("a", "ssh: permission denied")
    assert "no new workers for 10 s" in s.announced("host_blacklisted")[0].reason
    s.wait(9.9)
    assert len(s.all(StartAgent)) == 2
    s.wait(0.1)
    assert s.announced("host_resurrected")[0].host == "a"
    assert s.all(StartAgent)[-1].incarnation == 2


def test_an_agent_that_never_comes_up_is_given_up(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=1, start_timeout=50.0, agents=False)
    s.send(Tick())
    s.wait(20.0)
    s.hosts(a=1)
    s.wait(30.0)
    assert s.end is not None
    assert s.end.exit_code == 75


def test_a_hung_agent_start_frees_the_job_to_use_a_spare_host(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=2, start_timeout=50.0, agents=False)
    s.hosts(a=1)
    s.agent_up("a")
    s.ready(*s.starting)
    s.step("a.0.1")
    s.hosts(a=1, b=1, c=1)
    assert [d.host for d in s.all(StartAgent)] == ["a", "b"]
    s.wait(50.0)
    assert s.all(StopAgent)[0].host == "b"
    assert "agent not up within 50 s" in s.announced("host_blacklisted")[0].reason
    assert s.all(StartAgent)[-1].host == "c"


def test_stop_ends_the_job_with_the_wished_status(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2)
    s.send(StopRequested("SIGINT", 130))
    assert s.all(EndJob) == [EndJob(130, "SIGINT")]
    assert s.hosts(b=4) == []


def test_the_job_says_what_it_waits_for(scenario: MakeScenario) -> None:
    s = scenario(start_np=4)
    s.hosts(a=2)
    status = s.job.status(s.now)
    assert status.reason == "2 of at least 4 slots have an agent"
    assert (status.state, status.kind, status.round, status.size) == ("forming", "undeclared", 1, 0)


def test_the_snapshot_shows_members_hosts_and_counters(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2, host_failures=1).training(a=1, b=2)
    s.exit("b.0.1", -9)
    status = s.job.status(s.now + 4.0)
    assert [(m.worker, m.rank, m.state) for m in status.members][:1] == [("a.0.1", 0, "running")]
    hosts = {h.host: (h.slots, h.state, h.cooldown_left, h.agent) for h in status.hosts}
    assert hosts == {"a": (1, "usable", 0.0, "ready"), "b": (2, "cool-down", 6.0, "ready")}
    assert status.counters.failures == 1
    assert status.reason == "1 worker has not left round 1 yet"
    assert status.state == "changing"
