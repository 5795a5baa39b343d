"""Situations that Horovod's elastic driver has to master, told as conversations with our core.

The situations are Horovod's (its elastic driver and discovery unit tests); the expectations
are ours where we promise more: healthy siblings of a failed worker live on, unless hosts are left
at a failure (`--failed-hosts leave`), as in Horovod.
"""

from __future__ import annotations

from elastic_driver.job.events import DiscoveryFailed
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario


def test_ranks_are_stable_over_rounds(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=4).training(a=2)
    s.hosts(a=2, b=2)
    s.ready("b.0.1", "b.1.1")
    s.wait(1.0)
    s.ready("a.0.1", "a.1.1", version=2)
    assert s.members == ["a.0.1", "a.1.1", "b.0.1", "b.1.1"]


def test_rank_0_goes_to_a_survivor_when_its_host_is_removed(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, min_np=2, max_np=4).training(a=2, b=2)
    s.hosts(b=2, c=2)
    s.ready("c.0.1", "c.1.1")
    s.wait(1.0)
    s.ready("a.0.1", "a.1.1", "b.0.1", "b.1.1", version=2)
    assert s.members == ["b.0.1", "b.1.1", "c.0.1", "c.1.1"]
    assert s.world.members[0].version == 2


def test_hosts_found_in_another_order_do_not_shuffle_the_ranks(scenario: MakeScenario) -> None:
    s = scenario(start_np=3).training(c=1, a=1, b=1)
    assert s.members == ["c.0.1", "a.0.1", "b.0.1"]
    s.hosts(a=1, b=1, c=1)
    s.wait(10.0)
    assert s.round == (1, "complete")
    s.exit("a.0.1", -9)
    s.ready("b.0.1", "c.0.1", version=1)
    assert s.members == ["c.0.1", "b.0.1"]


def test_the_job_waits_until_there_are_enough_slots(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, max_np=4)
    s.hosts(a=1)
    s.hosts(a=1, b=1)
    assert s.starting == []
    s.hosts(a=1, b=1, c=2)
    assert len(s.starting) == 4


def test_the_first_world_waits_for_the_agents_of_all_hosts_but_not_for_long(
    scenario: MakeScenario,
) -> None:
    for late in (False, True):
        s = scenario(agents=False, start_np=2, max_np=4, start_together=5.0)
        s.hosts(a=2, b=2)
        s.agent_up("a")
        s.wait(4.9)
        assert s.starting == []
        if late:
            s.wait(0.2)
        s.agent_up("b")
        s.ready(*s.starting)
        assert s.world.size == (2 if late else 4)


def test_the_workers_of_a_new_host_join_together_if_one_boots_a_little_longer(
    scenario: MakeScenario,
) -> None:
    for late in (False, True):
        s = scenario(start_np=2, max_np=4, start_together=5.0).training(a=2)
        s.hosts(a=2, b=2)
        s.ready("b.0.1")
        s.wait(1.1 if late else 0.9)
        assert s.round == (1, "closing" if late else "complete")
        s.ready("b.1.1")
        s.wait(0.1)
        s.ready("a.0.1", "a.1.1", version=2)
        assert s.world.size == 4


def test_too_few_hosts_run_out_of_time(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, start_timeout=10.0)
    s.hosts(a=1)
    s.wait(10.0)
    assert s.end is not None
    assert "need 2 slots, found 1" in s.end.reason


def test_slots_beyond_max_np_stay_unused(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2).training(a=8)
    assert s.world.size == 2
    assert s.starting == []


def test_a_host_that_fails_for_good_leaves_the_rest_training(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, min_np=2, max_np=4, host_failures=1).training(a=2, b=2)
    s.exit("b.0.1", 1)
    s.exit("b.1.1", 1)
    s.ready("a.0.1", "a.1.1", version=2)
    assert s.members == ["a.0.1", "a.1.1"]
    assert s.end is None


def test_one_failure_does_not_take_its_healthy_siblings_down(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2, host_failures=1).training(a=2)
    s.exit("a.0.1", 1)
    s.ready("a.1.1", version=2)
    assert s.members == ["a.1.1"]  # in Horovod the whole host would be gone


def test_a_blacklisted_host_is_not_used_and_another_takes_its_place(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, max_np=2, host_failures=1).training(a=1, b=1)
    s.exit("b.0.1", 1)
    s.hosts(a=1, b=1, c=1)
    assert s.starting == ["c.0.1"]


def test_a_blacklisted_host_is_resurrected_and_used_again(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2, host_failures=1, blacklist_cooldown=(10.0, 20.0)).training(
        a=1, b=1
    )
    s.exit("b.0.1", 1)
    s.ready("a.0.1", version=2)
    s.wait(9.9)
    assert s.starting == []
    s.wait(0.1)
    assert s.announced("host_resurrected")[0].host == "b"
    assert s.starting == ["b.0.2"]


def test_all_workers_failing_fails_the_job(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=1, b=1)
    s.exit("a.0.1", 1)
    s.exit("b.0.1", 1)
    assert s.end is not None
    assert s.end.exit_code == 1


def test_a_host_that_is_left_at_a_failure_loses_its_other_workers(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, min_np=2, max_np=4, failed_hosts="leave").training(a=2, b=2)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", "b.0.1", "b.1.1", version=2)
    assert s.members == ["b.0.1", "b.1.1"]
    assert s.in_state("stopping") == ["a.1.1"]
    s.wait(9.9)
    assert s.starting == []


def test_a_host_that_was_left_is_used_again_after_its_cool_down(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, min_np=2, max_np=4, failed_hosts="leave").training(a=2, b=2)
    s.exit("a.0.1", -9)
    s.ready("a.1.1", "b.0.1", "b.1.1", version=2)
    s.obey_stops()
    s.wait(10.0)
    assert s.starting == ["a.0.2", "a.1.2"]


def test_a_host_is_left_as_soon_as_the_script_of_a_worker_has_failed(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=4, min_np=2, max_np=4, failed_hosts="leave").training(a=2, b=2)
    s.send(ev.WorkerEnding("a.0.1", 1, failed=True))
    s.ready("a.1.1", "b.0.1", "b.1.1", version=2)
    assert s.members == ["b.0.1", "b.1.1"]
    s.exit("a.0.1", 1)
    assert len(s.announced("host_blacklisted")) == 1
    assert s.job.outcome.budget.failures == 1
    assert s.round == (2, "complete")


def test_failures_on_all_hosts_that_are_left_end_the_job(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, min_np=2, max_np=4, failed_hosts="leave").training(a=2, b=2)
    s.send(ev.WorkerEnding("a.0.1", 1, failed=True))
    s.send(ev.WorkerEnding("b.0.1", 1, failed=True))
    assert s.end is None  # the job ends with the status of the first one, which is not known yet
    s.exit("b.0.1", 3)
    assert s.end is not None
    assert s.end.exit_code == 3
    assert "workers have failed on every host" in s.end.reason


def test_a_job_that_needs_a_host_that_was_left_waits_for_it(scenario: MakeScenario) -> None:
    s = scenario(
        start_np=4, min_np=4, max_np=4, failed_hosts="leave", elastic_timeout=1.0
    ).training(a=2, b=2)
    s.exit("a.0.1", 1)
    s.ready("a.1.1", "b.0.1", "b.1.1", version=2)
    s.wait(1.0)
    assert s.end is not None
    assert "need 4 slots" in s.end.reason


def test_the_only_host_of_a_job_is_not_left_at_a_failure(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, max_np=2, failed_hosts="leave").training(a=2)
    s.exit("a.0.1", 1)
    s.ready("a.1.1", version=2)
    assert s.members == ["a.1.1"]
    assert s.starting == ["a.0.2"]


def test_hosts_are_left_after_as_many_failures_as_were_asked_for(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, max_np=3, failed_hosts="leave", host_failures=2).training(a=1, b=2)
    s.exit("b.0.1", 1)
    s.ready("a.0.1", "b.1.1", version=2)
    assert s.members == ["a.0.1", "b.1.1"]
    s.ready("b.0.2")
    s.exit("b.1.1", 1)
    s.ready("a.0.1", version=3)
    assert s.members == ["a.0.1"]
    assert s.in_state("stopping") == ["b.0.2"]


def test_success_of_all_stops_the_job(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=1, b=1)
    s.exit("a.0.1", 0)
    s.exit("b.0.1", 0)
    assert s.end is not None
    assert s.end.exit_code == 0


def test_a_failing_discovery_keeps_the_known_hosts(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=1, b=1)
    s.send(DiscoveryFailed("the script hung for 10 s"))
    s.wait(100.0)
    assert s.round == (1, "complete")
    assert "the 2 known hosts stay" in s.announced("discovery_failed")[0].reason


def test_two_changes_within_the_same_second_are_both_seen(scenario: MakeScenario) -> None:
    s = scenario(start_np=1, max_np=3).training(a=1)
    s.hosts(a=1, b=1)
    s.hosts(a=1, b=1, c=1)
    assert s.starting == ["b.0.1", "c.0.1"]
