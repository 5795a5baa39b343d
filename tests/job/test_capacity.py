"""Hosts with too few processors, or too little memory by what is known, get fewer workers.

A user's plan changes a running job, once, and holds until it is released.

The job uses the slots that the Brain grants, each grant once, and never more than that.
"""

from __future__ import annotations

from collections import Counter

import pytest

from elastic_driver.job.events import HostsGranted, HostStarved, MemoryExpected, SizeProposed
from elastic_driver.job.workers import OCCUPYING
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario

WHY = "its processors were busy"


def trained(scenario: MakeScenario, **settings: object) -> Scenario:
    """Four workers on two hosts."""
    return scenario(**{"start_np": 4, "auto_scale": True, **settings}).training(a=2, b=2)


def meet(s: Scenario) -> None:
    """The members leave the round, and meet again."""
    s.wait(1.0)
    s.ready(*s.in_state("running"), version=1)
    s.wait(1.0)


def test_a_starved_host_gets_a_worker_less_and_the_job_a_smaller_size(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario)
    s.send(HostStarved("a", 1, WHY))
    (told,) = s.announced("host_starved")
    assert (told.host, told.reason, told.what.facts()) == ("a", WHY, {"slots": 1})
    meet(s)
    assert sorted(member.place.host for member in s.world.members) == ["a", "b", "b"]
    assert s.job.capacity.wanted == 3
    assert s.job.rounds.resets == 0, "it was asked for"


def test_a_starved_host_of_the_brain_gets_a_worker_less(scenario: MakeScenario) -> None:
    """The next grant takes it: the Brain knows where other slots are."""
    s = scenario(start_np=1, max_np=8)
    s.send(HostsGranted(1, (("a", 2), ("b", 2)), WHY))
    s.ready(*s.starting)
    s.wait(1.0)
    s.step(*s.members)
    s.send(HostStarved("a", 1, WHY))
    s.wait(60.0)
    assert s.round == (1, "complete")
    s.send(HostStarved("a", 1, WHY))
    assert len(s.announced("host_starved")) == 1, "it is known"
    s.send(HostsGranted(2, (("a", 1), ("b", 2), ("c", 1)), WHY))
    meet(s)
    s.ready(*s.starting)
    meet(s)
    assert sorted(member.place.host for member in s.world.members) == ["a", "b", "b", "c"]
    assert s.job.rounds.resets == 0, "it was asked for"


def test_the_worker_moves_if_another_host_has_a_free_slot(scenario: MakeScenario) -> None:
    s = trained(scenario)
    s.hosts(a=2, b=2, c=1)
    s.send(HostStarved("a", 1, WHY))
    assert s.job.capacity.wanted == 4
    meet(s)
    s.ready(*s.starting)
    meet(s)
    assert sorted(member.place.host for member in s.world.members) == ["a", "b", "b", "c"]


@pytest.mark.parametrize(
    ("settings", "event"),
    [
        ({"auto_scale": False}, HostStarved("a", 1, WHY)),
        ({"min_np": 4}, HostStarved("a", 1, WHY)),
        ({}, HostStarved("a", 0, WHY)),
        ({}, HostStarved("a", 2, WHY)),
        ({}, HostStarved("z", 1, WHY)),
    ],
)
def test_what_cannot_be_changes_nothing(
    scenario: MakeScenario, settings: dict[str, object], event: HostStarved
) -> None:
    s = trained(scenario, **settings)
    s.send(event)
    assert s.announced("host_starved") == []
    assert s.job.hosts.known["a"].slots == 2
    assert s.job.effects.ignored_events == 1


def test_a_user_s_size_outranks_it_and_its_release_gives_the_slots_back(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario)
    s.send(HostStarved("a", 1, WHY))
    meet(s)
    s.send(ev.ScaleRequested(3))
    s.send(HostStarved("b", 1, WHY))
    assert s.job.hosts.known["b"].slots == 2
    s.send(ev.ScaleRequested(None))
    assert s.job.hosts.known["a"].slots == 2


def test_a_user_s_size_is_reached_on_a_starved_host_if_there_is_no_other(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario)
    s.send(HostStarved("a", 1, WHY))
    meet(s)
    s.send(ev.ScaleRequested(4))
    assert s.job.hosts.known["a"].slots == 2


def test_a_starved_host_is_used_in_full_if_the_job_could_not_train_else(
    scenario: MakeScenario,
) -> None:
    s = trained(scenario, min_np=2)
    s.send(HostStarved("a", 1, WHY))
    meet(s)
    s.hosts(a=2)
    assert s.job.hosts.known["a"].slots == 2
    s.hosts(a=2, b=2)
    assert s.job.hosts.known["a"].slots == 1


# ---- the memory that similar jobs took -----------------------------------------------------


def searching(scenario: MakeScenario, slots: dict[str, int], **settings: object) -> Scenario:
    """A job with `--auto-scale` that has found these hosts; no agent is up."""
    s = scenario(**{"start_np": 2, "auto_scale": True, "agents": False, **settings})
    s.hosts(**slots)
    return s


def up(s: Scenario, host: str, memory: int, number: int = 7) -> None:
    """The agent of a host with so much memory comes up."""
    s.send(ev.AgentReady(host, 1, number, "x", (5000, 5001), memory=memory))


def test_a_host_gets_the_workers_for_which_it_has_the_memory_that_similar_jobs_took(
    scenario: MakeScenario,
) -> None:
    s = searching(scenario, {"a": 4, "b": 4})
    up(s, "a", 2000)
    up(s, "b", 9000, number=8)
    s.send(MemoryExpected(1000, WHY))
    assert {name: host.slots for name, host in s.job.hosts.known.items()} == {"a": 2, "b": 4}
    (told,) = s.announced("memory_expected")
    assert (told.reason, told.what.facts()) == (WHY, {"need": 1000})
    s.send(MemoryExpected(0, "their speeds differ"))
    assert s.job.hosts.known["a"].slots == 4


def test_a_host_that_comes_later_is_limited_by_it_too(scenario: MakeScenario) -> None:
    s = searching(scenario, {"a": 4})
    s.send(MemoryExpected(1000, WHY))
    up(s, "a", 3999)
    assert s.job.hosts.known["a"].slots == 3


def test_the_memory_of_similar_jobs_keeps_no_job_from_its_start(scenario: MakeScenario) -> None:
    s = searching(scenario, {"a": 2}, min_np=2)
    up(s, "a", 500)
    s.send(MemoryExpected(1000, WHY))
    assert s.job.hosts.known["a"].slots == 2


def test_what_a_worker_of_the_job_needed_outranks_what_those_of_similar_jobs_took(
    scenario: MakeScenario,
) -> None:
    s = searching(scenario, {"a": 1, "b": 2})
    s.agent_up("a")
    up(s, "b", 4000, number=8)
    s.send(MemoryExpected(4000, WHY))
    assert s.job.hosts.known["b"].slots == 1
    s.ready(*s.starting)
    s.wait(1.0)
    s.send(ev.WorkerExited(s.members[0], -9, "", out_of_memory=ev.OutOfMemory(1000, 5000)))
    assert s.job.hosts.known["b"].slots == 2


def plan(number: int = 1, **says: object) -> ev.PlanApplied:
    return ev.PlanApplied(number=number, **says)  # type: ignore[arg-type]


def with_agent(s: Scenario, host: str, number: int, cpus: int, memory: int) -> None:
    s.send(ev.AgentReady(host, 1, number, "x", (5000, 5001), cpus=cpus, memory=memory))


def reach(s: Scenario, version: int) -> None:
    """The job goes to the number of workers that it aims at."""
    s.ready(*s.starting)
    s.wait(1.0)
    s.ready(*s.members, version=version)
    s.obey_stops()
    s.step(*s.members, step=version)


def test_a_number_of_workers_holds_against_auto_scale_until_it_is_released(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, auto_scale=True).training(a=2, b=2)
    s.send(plan(workers=3))
    assert s.job.status(s.now).wanted == 3
    assert len(s.starting) == 1
    s.send(SizeProposed(4, "doubled"))
    assert s.job.status(s.now).wanted == 3
    assert s.announced("size_proposed") == []
    s.send(ev.ScaleRequested(None))
    assert s.job.status(s.now).wanted == 4
    assert s.job.status(s.now).plan == 1, "its number is never used again"


def test_limits_leave_the_number_to_the_job(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, auto_scale=True).training(a=2, b=2)
    s.send(plan(min=2, max=3))
    status = s.job.status(s.now)
    assert (status.wanted, status.min_np, status.max_np) == (2, 2, 3)
    s.send(SizeProposed(4, "doubled"))
    assert s.announced("size_proposed")[-1].reason == "3 workers: doubled"
    s.send(ev.ScaleRequested(4))
    assert s.job.status(s.now).wanted == 4, "what the user has said last"


def test_without_auto_scale_the_job_has_the_most_workers_of_the_plan(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=4).training(a=4)
    s.send(plan(max=3))
    assert s.job.status(s.now).wanted == 3


@pytest.mark.parametrize("number", [1, 2])
def test_a_plan_that_is_stale_changes_nothing(scenario: MakeScenario, number: int) -> None:
    s = scenario(start_np=2).training(a=2)
    s.send(plan(2, workers=1))
    s.send(plan(number, workers=2))
    assert s.job.status(s.now).wanted == 1
    assert s.job.status(s.now).ignored == f"plan {number} is stale: plan 2 was carried out"
    assert len(s.announced("plan_applied")) == 1


def test_a_plan_replaces_the_one_before(scenario: MakeScenario) -> None:
    s = scenario(start_np=2).training(a=2, b=2)
    s.send(plan(1, workers=1, slots_per_host=1))
    s.send(plan(2, max=4))
    status = s.job.status(s.now)
    assert status.wanted == 4
    assert [host.slots for host in status.hosts] == [2, 2]
    assert s.announced("plan_applied")[-1].reason == "plan 2: max 4"


def test_each_host_gets_no_more_workers_than_the_plan_says(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, reset_limit=0).training(a=3, b=1)
    s.send(plan(slots_per_host=2))
    assert [host.slots for host in s.job.status(s.now).hosts] == [2, 1]
    leaving = [m.worker for m in s.job.status(s.now).members if m.leaving]
    assert leaving == ["a.2.1"]
    s.hosts(a=3, b=3)
    assert [host.slots for host in s.job.status(s.now).hosts] == [2, 2]
    s.send(ev.ScaleRequested(None))
    assert [host.slots for host in s.job.status(s.now).hosts] == [3, 3]


def test_processors_and_memory_of_a_host_limit_its_workers(scenario: MakeScenario) -> None:
    s = scenario(start_np=2, agents=False)
    s.hosts(a=4, b=4, c=4)
    for number, (host, cpus, memory) in enumerate([("a", 8, 100), ("b", 3, 100), ("c", 8, 10)]):
        with_agent(s, host, number + 1, cpus, memory)
    s.send(plan(1, cpu_per_worker=1.5, memory_per_worker=30))
    assert [(h.host, h.slots) for h in s.job.status(s.now).hosts if h.slots] == [("a", 3), ("b", 2)]
    assert s.announced("host_removed")[-1].reason == "no worker of plan 1 fits there"


def test_a_host_that_comes_later_is_limited_as_soon_as_its_agent_has_said_what_it_has(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, agents=False)
    s.hosts(a=4)
    s.send(plan(memory_per_worker=30))
    assert s.job.status(s.now).hosts[0].slots == 4
    with_agent(s, "a", 1, 0, 70)
    assert s.job.status(s.now).hosts[0].slots == 2


def test_a_plan_that_leaves_too_few_slots_changes_nothing(scenario: MakeScenario) -> None:
    s = scenario(start_np=4, min_np=3).training(a=2, b=2)
    s.send(plan(slots_per_host=1))
    assert [host.slots for host in s.job.status(s.now).hosts] == [2, 2]
    assert s.job.status(s.now).ignored == ("plan 1 leaves 2 slots, fewer than the 3 needed")
    s.send(plan(min=5))
    assert s.job.status(s.now).min_np == 3


def test_changes_that_a_plan_or_a_user_asked_for_do_not_count_as_resets(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=2, min_np=1, max_np=4, reset_limit=0).training(a=2, b=2)
    for number, request in enumerate((plan(1, workers=3), ev.ScaleRequested(2), plan(2, max=1))):
        s.send(request)
        reach(s, 10 * number + 5)
        status = s.job.status(s.now)
        assert status.size == status.wanted
        assert (status.exit_code, status.counters.resets) == (None, 0), number
    s.exit(status.members[0].worker, 1)
    assert s.job.status(s.now).exit_code is not None, "a loss counts"


def grant(s: Scenario, number: int, **slots: int) -> None:
    s.send(HostsGranted(number, tuple(slots.items()), f"a test grants {number}"))


def granted_and_trained(s: Scenario) -> Scenario:
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
    granted_and_trained(s)
    assert s.world.size == 3
    assert s.job.status(s.now).grant == 3
    assert s.announced("hosts_granted")[-1].reason == "3 slots: a test grants 3"


def test_a_smaller_grant_takes_workers_away_and_counts_as_no_reset(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=1, reset_limit=0)
    grant(s, 1, a=2, b=1)
    granted_and_trained(s)
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
    granted_and_trained(s)
    grant(s, 2, a=1)
    s.exit(s.members[0], -9)
    s.obey_stops()
    s.wait(5.0)
    assert used(s).get("a", 0) <= 1


def test_an_older_or_repeated_grant_changes_nothing(scenario: MakeScenario) -> None:
    s = scenario(start_np=1)
    grant(s, 5, a=2)
    granted_and_trained(s)
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
    granted_and_trained(s)
    s.resume()
    s.returns("a")
    s.returns("b")
    grant(s, 7, a=4)
    assert s.job.status(s.now).grant == 7
    assert {name: host.slots for name, host in s.job.hosts.known.items()} == {"a": 1, "b": 1}
