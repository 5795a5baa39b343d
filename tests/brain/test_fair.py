"""The built-in algorithm: views in, plans out."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_driver.brain.algorithm import (
    LIMIT_S,
    HostView,
    JobView,
    Plan,
    SpeedAt,
    View,
    faults,
)
from elastic_driver.brain.fair import FITTED, fair

HOSTS = {"n1": 2, "n2": 2, "n3": 2, "n4": 1, "n5": 1}
FALLING = {1: 1.0, 2: 1.8, 3: 2.4, 4: 2.2}


def job(name: str, speeds: dict[int, float] | None = None, **more: Any) -> JobView:
    """A job with a fixed batch, and its speeds on one host."""
    more = {"arrived": float(ord(name[0])), "least": 1, "micro_batches": 840, **more}
    known = tuple(SpeedAt(size=n, hosts=1, step_time=1 / x) for n, x in (speeds or {}).items())
    return JobView(name=name, speeds=known, **more)


def view(*jobs: JobView, event: str = "job arrived", hosts: dict[str, int] | None = None) -> View:
    slots = HOSTS if hosts is None else hosts
    found = tuple(HostView(name=name, slots=count) for name, count in slots.items())
    return View(now=1000.0, triggers=(event,), jobs=jobs, hosts=found)


def sizes(asked: View) -> dict[str, int]:
    plan = fair(asked)
    assert faults(asked, plan) == []
    return {each.name: sum(plan.workers.get(each.name, {}).values()) for each in asked.jobs}


def test_jobs_of_which_nothing_is_measured_get_equal_shares() -> None:
    assert sizes(view(job("A"), job("B"), job("C"), job("D"))) == dict.fromkeys("ABCD", 2)
    assert sizes(view(job("A", weight=3.0), job("B"))) == {"A": 6, "B": 2}


def test_three_jobs_with_known_speeds_get_what_makes_them_fast_together() -> None:
    jobs = (
        job("A", {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}),
        job("B", {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}),
        job("C", FALLING),
    )
    assert sizes(view(*jobs)) == {"A": 3, "B": 2, "C": 3}
    assert sizes(view(*jobs[:2])) == {"A": 6, "B": 2}


def test_reasons_have_the_figures_by_which_they_can_be_checked() -> None:
    """A counts weight · X(8/3) / X(n) = 2.67 / n; B is as fast with 2 as with 8/3 or 3 workers."""
    a = job("A", {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    b = job("B", {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0})
    reasons = fair(view(a, b, job("C", FALLING))).reasons
    part = "its part of 8 slots (weight 1 of 3) is 2.67"
    least = "the sum over all jobs is the smallest that fits"
    assert (
        reasons["A"]
        == f"{part}; with 3 workers it counts 0.889, with 2 1.33, with 4 0.667; {least}"
    )
    assert reasons["B"] == f"{part}; with 2 workers it counts 1, with 1 2, with 3 1; {least}"
    tried = fair(view(job("A", FALLING, size=2, at={"n1": 2}, measured=True))).reasons["A"]
    assert tried.endswith("3 workers are the fewest that are within 5% of its fastest size")
    new = fair(view(job("A", size=1, at={"n1": 1}), event="size measured")).reasons["A"]
    assert new == "its speed with 1 worker is measured, for 60 s at most"
    grows = job("A", {1: 1.0, 2: 2.0}, size=2, at={"n1": 2}, measured=True)
    assert "with 4 workers it counts" in fair(view(grows, event="size measured")).reasons["A"]


def test_a_size_between_measured_ones_is_tried_if_it_may_be_a_peak() -> None:
    jobs = (
        job("A", {1: 1.0, 2: 2.0, 4: 4.0}),
        job("B", {1: 1.0, 2: 2.0, 3: 2.0}),
        job("C", {1: 1.0, 2: 1.8, 4: 2.2}),
    )
    assert sizes(view(*jobs)) == {"A": 3, "B": 2, "C": 3}


def test_a_job_grows_to_twice_the_largest_size_it_has_tried() -> None:
    assert sizes(view(job("A", {1: 1.0}))) == {"A": 2}
    assert sizes(view(job("A", {1: 1.0, 2: 2.0}))) == {"A": 4}


def test_a_job_alone_has_the_smallest_size_that_is_within_5_percent_of_the_fastest() -> None:
    speeds = {1: 1.0, 2: 1.95, 4: 2.0, 8: 1.7}
    assert sizes(view(job("A", speeds, size=8, at=dict(HOSTS)))) == {"A": 2}


def test_a_size_that_a_user_asked_for_is_given_without_ending_a_job_that_trains() -> None:
    asked = job("A", held=5)
    assert sizes(view(asked, job("B"))) == {"A": 5, "B": 3}
    training = job("B", least=4, size=4, at={"n1": 2, "n2": 2})
    assert sizes(view(asked, training)) == {"A": 4, "B": 4}
    assert sizes(view(job("A", held=99))) == {"A": 8}
    assert sizes(view(job("A", held=99, most=6))) == {"A": 6}


def test_a_job_that_can_never_fit_waits_and_keeps_nobody_waiting() -> None:
    assert sizes(view(job("A", least=9), job("B"))) == {"A": 0, "B": 8}
    assert fair(view(job("A", least=9))).reasons == {"A": "it waits for 9 free slots"}


def test_workers_stay_where_they_are_if_nothing_better_is_known() -> None:
    at = {"A": {"n5": 1, "n2": 2}, "B": {"n1": 2}, "C": {"n3": 2, "n4": 1}}
    speeds = {"A": {1: 1.0, 2: 2.0, 3: 3.0}, "B": {1: 1.0, 2: 2.0, 3: 2.0}, "C": FALLING}
    jobs = [
        job(name, speeds[name], size=sum(at[name].values()), at=at[name], measured=True)
        for name in at
    ]
    assert fair(view(*jobs, event="time passed")).workers == at


def test_a_small_gain_moves_nobody() -> None:
    speeds = {1: 1.0, 2: 2.0, 4: 4.0, 5: 4.05, 6: 4.1, 8: 4.15}
    asked = view(job("A", speeds, size=4, at={"n1": 2, "n2": 2}, measured=True))
    assert sizes(asked) == {"A": 4}


def test_a_job_whose_size_is_being_measured_is_left_alone_unless_another_needs_slots() -> None:
    new = job("A", {1: 1.0}, size=2, at={"n1": 2}, unchanged_for=5.0)
    assert sizes(view(new, event="size measured")) == {"A": 2}
    assert sizes(view(replace(new, unchanged_for=61.0), event="size measured")) == {"A": 2}
    grown = replace(job("A", {1: 1.0, 2: 2.0}), size=2, at={"n1": 2}, measured=True)
    assert sizes(view(grown, event="size measured")) == {"A": 4}
    large = job("A", {4: 4.0}, size=8, at=dict(HOSTS), unchanged_for=5.0)
    assert sizes(view(large, job("B", {2: 2.0, 3: 3.0}))) == {"A": 3, "B": 5}


def test_hosts_that_others_keep_busy_are_avoided_while_there_are_enough() -> None:
    asked = view(job("A", most=4), hosts={"n1": 4, "n2": 4})
    busy = HostView(name="n1", slots=4, cpu=0.95)
    asked = replace(asked, hosts=(busy, asked.hosts[1]))
    assert fair(asked).workers == {"A": {"n2": 4}}
    needs_both = replace(asked, jobs=(job("A", least=5),))
    assert sum(fair(needs_both).workers["A"].values()) == 8
    ours = replace(asked, jobs=(job("A", most=4, size=4, at={"n1": 4}),))
    assert fair(ours).workers == {"A": {"n1": 4}}, "it is our workers that keep it busy"


def with_memory(asked: View, **gib: int) -> View:
    """The view with the idle memory of hosts."""
    found = (
        replace(host, memory_free=gib[host.name] * 2**30) if host.name in gib else host
        for host in asked.hosts
    )
    return replace(asked, hosts=tuple(found))


def test_a_job_that_ran_out_of_memory_goes_where_its_workers_have_it() -> None:
    """Its present host has room for one of two; the slot there is for another job."""
    ran_out = job("A", least=2, most=2, size=2, at={"n1": 2}, memory=3 * 2**30, room={"n1": 1})
    other = job("B", size=4, at={"n2": 2, "n3": 2})
    asked = view(ran_out, other, event="out of memory")
    plan = fair(with_memory(asked, n2=1, n3=1, n4=2, n5=3))
    assert plan.workers["A"] == {"n1": 1, "n5": 1}
    assert sum(plan.workers["B"].values()) == 6, "it can use what A cannot"


def test_a_job_that_no_host_has_the_memory_for_waits_and_keeps_nobody_waiting() -> None:
    ran_out = job("A", least=2, size=2, at={"n1": 2}, memory=3 * 2**30, room={"n1": 0})
    asked = with_memory(view(ran_out, job("B")), n2=1, n3=1, n4=2, n5=2)
    plan = fair(asked)
    assert {name: sum(at.values()) for name, at in plan.workers.items()} == {"B": 8}
    expected = "it waits for 2 free slots on hosts with the memory for its workers"
    assert plan.reasons["A"] == expected


def test_a_new_job_begins_where_there_is_the_memory_that_similar_jobs_took() -> None:
    large = job("A", memory=3 * 2**30)
    asked = with_memory(view(large), n1=1, n2=2, n3=4, n4=4, n5=1)
    assert fair(asked).workers == {"A": {"n3": 1, "n4": 1}}
    needs_more = replace(asked, jobs=(replace(large, least=5),))
    assert sizes(needs_more) == {"A": 5}, "it may be wrong"


def test_a_starved_host_gets_fewer_workers_and_another_one_more() -> None:
    speeds = {1: 1.0, 2: 2.0, 4: 4.0}
    starved = job(
        "A", speeds, most=4, size=4, at={"n1": 2, "n2": 2}, measured=True, starved={"n1": 1}
    )
    plan = fair(view(starved, event="CPU starved"))
    assert plan.workers["A"]["n1"] == 1
    assert plan.workers["A"]["n2"] == 2
    assert sum(plan.workers["A"].values()) == 4
    alone = fair(view(starved, event="CPU starved", hosts={"n1": 2, "n2": 2}))
    assert alone.workers["A"] == {"n1": 1, "n2": 2}
    with_another = fair(view(starved, job("B"), hosts={"n1": 2, "n2": 2}))
    assert with_another.workers["A"].get("n1", 0) <= 1
    assert sum(map(len, with_another.workers.values())) >= 2
    assert sum(sum(at.values()) for at in with_another.workers.values()) == 4


def test_a_starved_host_is_used_in_full_by_a_job_that_needs_it_or_a_user() -> None:
    asked = job("A", least=4, size=4, at={"n1": 2, "n2": 2}, starved={"n1": 1})
    there = {"n1": 2, "n2": 2}
    assert fair(view(asked, hosts=there)).workers == {"A": there}
    held = replace(asked, least=1, held=4)
    assert fair(view(held, hosts=there)).workers == {"A": there}


def test_a_job_grows_no_further_than_it_has_space() -> None:
    """Its search tries sizes for which the hosts have the memory."""
    speeds = {1: 1.0, 2: 2.0}
    growing = job("A", speeds, size=2, at={"n1": 2}, measured=True, room={"n2": 1, "n3": 0})
    asked = view(growing, event="size measured", hosts={"n1": 2, "n2": 2, "n3": 2})
    assert fair(asked).workers == {"A": {"n1": 2, "n2": 1}}


def test_a_lost_host_moves_its_workers_and_nobody_else() -> None:
    jobs = (
        job("A", size=2, at={"n1": 2}, most=2),
        job("B", size=2, at={"lost": 2}, most=2),
    )
    plan = fair(view(*jobs, event="host lost"))
    assert plan.workers["A"] == {"n1": 2}
    assert len(plan.workers["B"]) == 1


def test_the_noise_of_gradients_makes_many_workers_of_a_growing_batch_worth_less() -> None:
    speeds = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}  # steps per second: the batch grows
    growing = job("A", speeds, micro_batches=None)
    assert sizes(view(growing)) == {"A": 8}
    assert sizes(view(replace(growing, noise=1.0))) == {"A": 7}, "hoped to be as good as 8"
    assert sizes(view(replace(growing, noise=0.01))) == {"A": 1}


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_random_views_have_plans_within_their_bounds(first: int) -> None:
    for seed in range(first, first + 20):
        random = Random(seed)
        asked = random_view(random, jobs=random.randint(1, 8), hosts=random.randint(1, 6))
        plan = fair(asked)
        assert faults(asked, plan) == [], seed
        assert fair(asked) == plan, "the same view gives the same plan"
        for each in asked.jobs:
            if each.size and not plan.workers.get(each.name):
                training = sum(other.least for other in asked.jobs if other.size)
                assert training > sum(host.slots for host in asked.hosts), f"{seed}: {each.name}"


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_views_with_limits_have_plans_within_them(first: int) -> None:
    for seed in range(first, first + 20):
        random = Random(seed)
        asked = limited(
            random_view(random, jobs=random.randint(1, 8), hosts=random.randint(1, 6)), random
        )
        plan = fair(asked)
        assert faults(asked, plan) == [], seed
        assert fair(asked) == plan, "the same view gives the same plan"
        free = {host.name: host.memory_free for host in asked.hosts}
        for each in (each for each in asked.jobs if each.room):
            for host, count in plan.workers.get(each.name, {}).items():
                most = each.room.get(host)
                if most is None and each.memory and (idle := free[host]) is not None:
                    most = each.at.get(host, 0) + idle // each.memory
                assert most is None or count <= most, f"{seed}: {each.name} on {host}"


@pytest.mark.parametrize("limits", [False, True])
@pytest.mark.parametrize(("jobs", "hosts"), [(FITTED, 4), (FITTED, 40), (100, 200)])
def test_a_plan_for_many_jobs_on_many_hosts_is_made_in_time(
    jobs: int, hosts: int, limits: bool
) -> None:
    asked = random_view(Random(1), jobs=jobs, hosts=hosts)
    known = tuple(replace(each, measured=True, held=None) for each in asked.jobs)
    asked = replace(asked, jobs=known)
    asked = limited(asked, Random(2)) if limits else asked
    began = time.monotonic()
    plan: Plan = fair(asked)
    assert time.monotonic() - began < LIMIT_S
    assert faults(asked, plan) == []


def random_view(random: Random, jobs: int, hosts: int) -> View:
    """Jobs anywhere, with any limits and speeds; what they have now fits into the hosts."""
    slots = {f"n{n}": random.randint(1, 8) for n in range(hosts)}
    free, found = dict(slots), []
    for number in range(jobs):
        least = random.randint(1, 4)
        at: dict[str, int] = {}
        for host in random.sample(sorted(free), len(free)):
            if random.random() < 0.3 and free[host]:
                at[host] = random.randint(1, free[host])
                free[host] -= at[host]
        size = sum(at.values())
        least = min(least, size) if size else least
        speeds = {n: n ** random.uniform(0.2, 1.1) for n in random.sample(range(1, 17), 4)}
        found.append(
            job(
                f"{chr(65 + number % 26)}{number}",
                speeds if random.random() < 0.8 else {},
                arrived=float(number),
                least=least,
                most=random.choice([None, max(size, least + 3)]),
                held=random.choice([None, None, None, random.randint(1, 9)]),
                weight=random.choice([1.0, 2.0]),
                size=size,
                at=at,
                age=random.uniform(0, 1000) if size else 0.0,
                changes=random.randint(0, 5),
                change_cost=random.choice([0.0, 0.2, 10.0]),
                measured=random.random() < 0.5,
                unchanged_for=random.uniform(0, 100),
            )
        )
    event = random.choice(["job arrived", "size measured", "time passed", "slots freed, slowdown"])
    return view(*found, event=event, hosts=slots)


def limited(asked: View, random: Random) -> View:
    """The view with jobs that ran out of memory, starved hosts, and idle memory."""
    names = [host.name for host in asked.hosts]

    def some(most: int) -> dict[str, int]:
        return {host: random.randint(0, most) for host in names if random.random() < 0.4}

    jobs = tuple(
        replace(
            each,
            memory=random.choice([None, 2**30, 4 * 2**30]),
            room=random.choice([{}, {}, some(3)]),
            starved=random.choice([{}, {}, some(2)]),
        )
        for each in asked.jobs
    )
    hosts = tuple(
        replace(host, memory_free=random.choice([None, random.randint(0, 16) * 2**30]))
        for host in asked.hosts
    )
    return replace(asked, jobs=jobs, hosts=hosts)
