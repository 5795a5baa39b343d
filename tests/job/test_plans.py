"""A user's plan changes a running job, once, and holds until it is released."""

from __future__ import annotations

import pytest

from elastic_driver.job.events import SizeProposed
from elastic_driver.words import wire_events as ev
from tests.job.scenario import MakeScenario, Scenario


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
