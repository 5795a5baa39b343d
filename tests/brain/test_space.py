"""Space for workers against all placements, and the limits of a job one by one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from elastic_driver.brain.algorithm import HostView, JobView, too_small
from elastic_driver.brain.host_choice import Space, space_of

GIB = 2**30


def job(name: str = "A", least: int = 1, **more: Any) -> JobView:
    return JobView(name=name, arrived=0.0, least=least, **more)


def hosts(**slots: int) -> tuple[HostView, ...]:
    return tuple(HostView(name=name, slots=count) for name, count in slots.items())


def measured(**free: tuple[int, int | None]) -> tuple[HostView, ...]:
    """Hosts with their slots and idle memory (GiB)."""
    return tuple(
        HostView(name=name, slots=slots, memory_free=None if gib is None else gib * GIB)
        for name, (slots, gib) in free.items()
    )


# ---- what fits -----------------------------------------------------------------------------


def random_space(chance: random.Random) -> tuple[Space, dict[str, int]]:
    slots = {f"n{n}": chance.randint(1, 3) for n in range(chance.randint(1, 3))}
    jobs = "ABC"[: chance.randint(1, 3)]
    firm = {
        name: {host: chance.randint(0, 2) for host in slots if chance.random() < 0.5}
        for name in jobs
        if chance.random() < 0.8
    }
    return Space(slots, firm), {name: chance.randint(0, 4) for name in jobs}


def fits_somehow(space: Space, sizes: dict[str, int]) -> bool:
    """Whether any placement of all is within the limits."""
    rows = []
    for name, size in sizes.items():
        most = space.of(name).values()
        splits = itertools.product(*(range(each + 1) for each in most))
        rows.append([split for split in splits if sum(split) == size])
    slots = space.slots.values()
    return any(
        all(
            sum(column) <= most
            for column, most in zip(zip(*choice, strict=True), slots, strict=True)
        )
        for choice in itertools.product(*rows)
    )


def test_workers_fit_if_there_is_any_placement_of_them() -> None:
    fitting = 0
    for seed in range(400):
        space, sizes = random_space(random.Random(seed))
        fitting += space.fits(sizes)
        assert space.fits(sizes) == fits_somehow(space, sizes), seed
        if space.fits(sizes):
            found = space.somewhere(sizes)
            assert {name: sum(found.get(name, {}).values()) for name in sizes} == sizes
            for name, at in found.items():
                assert all(0 < count <= space.of(name)[host] for host, count in at.items())
            for host, slots in space.slots.items():
                assert sum(at.get(host, 0) for at in found.values()) <= slots
    assert 100 < fitting < 300


def test_the_jobs_that_lack_space_lack_it_among_themselves() -> None:
    for seed in range(400):
        space, sizes = random_space(random.Random(seed))
        crowd = space.crowd(sizes)
        assert bool(crowd) != space.fits(sizes)
        if crowd:
            assert not fits_somehow(space, {name: sizes[name] for name in crowd}), seed


def test_the_most_workers_of_a_job_beside_others() -> None:
    space = Space({"n1": 4, "n2": 4}, firm={"A": {"n1": 1}, "B": {"n1": 0}})
    assert space.most("A", {"B": 2}, least=1, most=8) == 3
    assert space.most("C", {"B": 4}, least=1, most=8) == 4
    assert space.most("A", {}, least=1, most=2) == 2


def test_wishes_can_be_given_up_and_firm_limits_cannot() -> None:
    space = Space({"n1": 4}, firm={"A": {"n1": 3}}, wishes={"A": {"n1": 1}, "B": {"n1": 9}})
    assert space.of("A") == {"n1": 1}
    assert space.is_limited("A")
    assert not space.is_limited("B", "C")
    for name in "ABC":
        space.give_up_wishes(name)
    assert space.of("A") == {"n1": 3}
    assert space.given_up == {"A"}


# ---- the limits of a job -------------------------------------------------------------------


def test_a_job_that_ran_out_of_memory_finds_as_many_workers_as_have_it() -> None:
    """What its driver knows of a host counts before a figure of it."""
    ran_out = job(memory=3 * GIB, room={"n1": 0, "n2": 2}, at={"n3": 1})
    space = space_of([ran_out], measured(n1=(4, 99), n2=(4, 0), n3=(4, 7), n4=(4, None)))
    assert space.of("A") == {"n1": 0, "n2": 2, "n3": 3, "n4": 4}
    space.give_up_wishes("A")
    assert space.of("A") == {"n1": 0, "n2": 2, "n3": 3, "n4": 4}


def test_the_memory_of_similar_jobs_and_starved_hosts_are_wishes() -> None:
    wishing = job(memory=3 * GIB, starved={"n1": 1, "n2": 3})
    space = space_of([wishing], measured(n1=(4, 99), n2=(4, 6), n3=(4, None)))
    assert space.of("A") == {"n1": 1, "n2": 2, "n3": 4}
    space.give_up_wishes("A")
    assert space.of("A") == {"n1": 4, "n2": 4, "n3": 4}


def test_the_plan_of_a_user_is_a_firm_limit() -> None:
    limited = job(memory=3 * GIB, room={"n1": 2}, planned={"n1": 3, "n2": 1}, starved={"n2": 0})
    space = space_of([limited], hosts(n1=4, n2=4, n3=4))
    assert space.of("A") == {"n1": 2, "n2": 0, "n3": 4}
    space.give_up_wishes("A")
    assert space.of("A") == {"n1": 2, "n2": 1, "n3": 4}


@pytest.mark.parametrize(
    ("room", "others", "largest"),
    [
        ({}, {}, None),  # no worker has run out
        ({"n1": 0}, {}, ("n2", 2 * GIB)),
        ({"n1": 2}, {}, None),
        ({"n1": 0}, {"n2": 1}, None),  # it may have more memory later
        ({"n1": 0}, {"n1": 1}, None),
    ],
)
def test_the_largest_host_is_named_if_none_has_the_memory(
    room: dict[str, int], others: dict[str, int], largest: tuple[str, int] | None
) -> None:
    ran_out = job(least=2, memory=3 * GIB, room=room)
    found = measured(n1=(2, 1), n2=(2, 2))
    assert too_small(ran_out, found, others) == largest


def test_a_host_that_nobody_has_measured_may_be_large_enough() -> None:
    ran_out = job(memory=3 * GIB, room={"n1": 0})
    assert too_small(ran_out, measured(n1=(2, 1), n2=(2, None)), {}) is None
    assert too_small(ran_out, hosts(n1=2), {}) == ("", 0)
