"""Shares of slots against all that are possible, and their rules one by one."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from elastic_driver.brain.host_choice import Space
from elastic_driver.brain.shares import EFFORT, SharedJob, fair_shares, share_costs


def linear(name: str, most: int = 8, least: int = 1, **more: float) -> SharedJob:
    return SharedJob(name, {n: float(n) for n in range(least, most + 1)}, **more)  # type: ignore[arg-type]


FLAT = SharedJob("B", {1: 1.0, **dict.fromkeys(range(2, 9), 2.0)})
FALLING = SharedJob("C", {1: 1.0, 2: 1.8, 3: 2.4, 4: 2.2, 5: 2.0, 6: 1.7, 7: 1.4, 8: 1.2})


def test_three_jobs_share_eight_slots_and_two_get_those_of_the_third() -> None:
    assert fair_shares([linear("A"), FLAT, FALLING], 8) == {"A": 3, "B": 2, "C": 3}
    assert fair_shares([linear("A"), FLAT], 8) == {"A": 6, "B": 2}


def test_no_job_gets_slots_that_make_it_no_faster() -> None:
    assert fair_shares([FLAT, FALLING], 8) == {"B": 2, "C": 3}


def test_jobs_get_their_smallest_size_in_order_of_arrival_and_none_overtakes() -> None:
    jobs = [linear("A", least=2), linear("B", least=7), linear("C", least=1)]
    assert fair_shares(jobs, 8) == {"A": 8, "B": 0, "C": 0}
    assert fair_shares([], 8) == {}
    assert fair_shares([linear("A")], 0) == {"A": 0}


def test_jobs_that_train_keep_their_smallest_size_before_one_that_waits() -> None:
    jobs = [linear("A", least=6), linear("B", least=2, size=4), linear("C", least=3, size=4)]
    assert fair_shares(jobs, 8) == {"A": 0, "B": 4, "C": 4}
    # A host was lost. B does not fit any more; that does not end C.
    jobs = [linear("A", least=2, size=4), linear("B", least=3, size=4), linear("C", size=2)]
    assert fair_shares(jobs, 4) == {"A": 2, "B": 0, "C": 2}


def test_twice_the_weight_is_twice_the_slots() -> None:
    jobs = [linear("A", 12, weight=2.0), linear("B", 12)]
    assert fair_shares(jobs, 12) == {"A": 8, "B": 4}


def test_a_size_that_a_user_holds_is_given() -> None:
    held = SharedJob("A", {5: 1.0})
    assert fair_shares([held, linear("B")], 8) == {"A": 5, "B": 3}


def test_of_equal_jobs_the_first_gets_the_odd_slot() -> None:
    assert fair_shares([linear("A"), linear("B"), linear("C")], 8) == {"A": 3, "B": 3, "C": 2}


def test_a_change_that_costs_more_than_it_brings_is_not_made() -> None:
    def jobs(age: float, changes: int) -> list[SharedJob]:
        speeds = {3: 3.0, 4: 3.1}
        return [SharedJob("A", speeds, size=3, age=age, changes=changes, change_cost=10.0)]

    assert fair_shares(jobs(age=1000.0, changes=0), 4) == {"A": 4}
    assert fair_shares(jobs(age=100.0, changes=0), 4) == {"A": 3}  # 100 / 110
    assert fair_shares(jobs(age=1000.0, changes=10), 4) == {"A": 3}  # 900 / 1010
    # A job has to change, however much it has changed before.
    assert fair_shares([linear("A", size=4, age=1.0, changes=9, change_cost=1.0)], 2) == {"A": 2}


@pytest.mark.parametrize(
    ("speeds", "weight"), [({}, 1.0), ({0: 1.0}, 1.0), ({1: 0.0}, 1.0), ({1: 1.0}, 0.0)]
)
def test_jobs_that_make_no_sense_are_refused(speeds: dict[int, float], weight: float) -> None:
    with pytest.raises(ValueError, match="A: "):
        SharedJob("A", speeds, weight)


def test_two_jobs_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        fair_shares([linear("A"), linear("A")], 8)


# ---- all possible shares ---------------------------------------------------------------------


def random_job(chance: random.Random, name: str) -> SharedJob:
    sizes = sorted(chance.sample(range(1, 9), chance.randint(1, 6)))
    running = chance.random() < 0.7
    return SharedJob(
        name,
        {size: chance.choice([1.0, float(size), chance.uniform(0.5, 9.0)]) for size in sizes},
        weight=chance.choice([1.0, 1.0, 2.0, chance.uniform(0.2, 5.0)]),
        size=chance.choice([*sizes, 5]) if running else 0,
        age=chance.uniform(0.0, 500.0),
        changes=chance.randint(0, 5),
        change_cost=chance.choice([0.0, chance.uniform(0.1, 30.0)]),
    )


def fairness(jobs: list[SharedJob], sizes: tuple[int, ...], slots: int) -> float:
    """The weighted harmonic mean, from its definition."""
    weights = sum(job.weight for job in jobs)
    parts = 0.0
    for job, size in zip(jobs, sizes, strict=True):
        speed = job.speeds[size]
        if job.size not in (0, size) and job.change_cost > 0:
            rest = job.age - job.changes * job.change_cost
            speed *= max(0.01, rest / (job.age + job.change_cost))
        fair = interpolated(job, Fraction(slots) * Fraction(job.weight) / Fraction(weights))
        parts += job.weight / (speed / fair)
    return weights / parts


def interpolated(job: SharedJob, share: Fraction) -> float:
    points = [(0, 0.0), *sorted(job.speeds.items())]
    for (low, slow), (high, fast) in itertools.pairwise(points):
        if low <= share <= high:
            return slow + (fast - slow) * float((share - low) / (high - low))
    return points[-1][1]


def admitted(jobs: list[SharedJob], slots: int) -> list[SharedJob]:
    """The jobs that get workers, by the largest set that the rules allow."""
    taken: list[SharedJob] = []
    for job in [job for job in jobs if job.size]:
        if sum(min(each.speeds) for each in [*taken, job]) <= slots:
            taken.append(job)
    for job in [job for job in jobs if not job.size]:
        if sum(min(each.speeds) for each in [*taken, job]) > slots:
            break
        taken.append(job)
    return [job for job in jobs if job in taken]


@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_random_cases_are_as_fair_as_the_fairest_of_all_shares(hundred: int) -> None:
    for case in range(100):
        chance = random.Random(hundred * 100 + case)
        slots = chance.randint(1, 12)
        jobs = [random_job(chance, name) for name in "ABCD"[: chance.randint(1, 4)]]
        found = fair_shares(jobs, slots)
        chosen = admitted(jobs, slots)
        assert {name for name, size in found.items() if size} == {job.name for job in chosen}
        if not chosen:
            continue
        sizes = tuple(found[job.name] for job in chosen)
        assert sum(sizes) <= slots
        every = itertools.product(*(job.speeds for job in chosen))
        best = max(fairness(chosen, each, slots) for each in every if sum(each) <= slots)
        assert fairness(chosen, sizes, slots) == pytest.approx(best, rel=1e-9), (slots, jobs)


def test_a_hundred_jobs_on_a_thousand_slots_are_shared_within_the_limit_of_an_algorithm() -> None:
    chance = random.Random(1)
    jobs = [
        SharedJob(str(n), {s: s ** chance.uniform(0.3, 1.0) for s in range(1, 1001)})
        for n in range(100)
    ]
    assert sum(fair_shares(jobs, 1000).values()) == 1000


# ---- limits that differ from job to job --------------------------------------------------------


def test_a_job_gets_no_slots_where_it_has_no_space_and_others_get_them() -> None:
    space = Space({"n1": 4, "n2": 4}, firm={"A": {"n1": 0}})
    jobs = [linear("A"), linear("B")]
    assert fair_shares(jobs, 8, space) == {"A": 4, "B": 4}
    assert fair_shares([linear("A", weight=3.0), linear("B")], 8, space) == {"A": 4, "B": 4}


def test_a_job_without_space_keeps_no_other_waiting() -> None:
    space = Space({"n1": 2, "n2": 2}, firm={"A": {"n1": 0, "n2": 1}})
    jobs = [linear("A", least=2, size=2), linear("B")]
    assert fair_shares(jobs, 4, space) == {"A": 0, "B": 4}


def test_a_wish_is_given_up_for_the_smallest_size_and_for_no_more() -> None:
    wishes = {"A": {"n1": 1}}
    jobs = [linear("A", least=3), linear("B")]
    assert fair_shares(jobs, 6, Space({"n1": 4, "n2": 2}, wishes=wishes)) == {"A": 3, "B": 3}
    assert fair_shares(jobs, 5, Space({"n1": 4, "n2": 1}, wishes=wishes)) == {"A": 3, "B": 2}
    assert fair_shares(jobs[:1], 5, Space({"n1": 4, "n2": 1}, wishes=wishes)) == {"A": 3}


def limited(chance: random.Random, jobs: list[SharedJob]) -> Space:
    slots = {f"n{n}": chance.randint(1, 3) for n in range(chance.randint(2, 4))}
    firm = {
        job.name: {host: chance.randint(0, 2) for host in slots if chance.random() < 0.4}
        for job in jobs
        if chance.random() < 0.7
    }
    return Space(slots, firm)


def test_random_shares_under_limits_are_the_best_of_all_that_fit() -> None:
    in_the_way = 0
    for seed in range(400):
        chance = random.Random(seed)
        jobs = [random_job(chance, name) for name in "ABCD"[: chance.randint(2, 4)]]
        space = limited(chance, jobs)
        slots = sum(space.slots.values())
        found = fair_shares(jobs, slots, space)
        assert space.fits(found), seed
        admitted = [job for job in jobs if found[job.name]]
        costs = share_costs(admitted, slots)
        total = sum(cost[found[job.name]] for job, cost in zip(admitted, costs, strict=True))
        best = min(
            (
                sum(cost[size] for cost, size in zip(costs, sizes, strict=True))
                for sizes in itertools.product(*(job.speeds for job in admitted))
                if space.fits({job.name: n for job, n in zip(admitted, sizes, strict=True)})
            ),
            default=0.0,
        )
        assert total <= best * (1 + 1e-9), seed
        in_the_way += not space.fits(fair_shares(admitted, slots))
    assert in_the_way > 15


def test_many_jobs_in_too_little_space_get_shares_that_fit() -> None:
    """More than `EFFORT` shares would have to be looked at for the best ones."""
    jobs = [linear(f"j{n}", most=16) for n in range(30)]
    slots = {f"n{n}": 8 for n in range(30)}
    small = {job.name: dict.fromkeys(list(slots)[10:], 0) for job in jobs[:20]}
    found = fair_shares(jobs, 240, space := Space(slots, small))
    assert space.fits(found)
    assert sum(found[job.name] for job in jobs[:20]) == 80 > EFFORT / 2
    assert sum(found.values()) == 240
