"""Placements against all that are possible, and their rules one by one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from elastic_driver.brain import host_choice as placement
from elastic_driver.brain.host_choice import Placement, Space


def place(
    sizes: Mapping[str, int], hosts: Mapping[str, int], now: Placement, **limits: Any
) -> Placement:
    return placement.place(sizes, Space(hosts, **limits), now)


def place_quickly(
    sizes: Mapping[str, int], hosts: Mapping[str, int], now: Placement, **limits: Any
) -> Placement:
    return placement.place_quickly(sizes, Space(hosts, **limits), now)


def test_workers_that_train_stay_where_they_are() -> None:
    now = {"A": {"n1": 1, "n2": 1}, "B": {"n1": 1}}
    found = place({"A": 2, "B": 2}, {"n1": 2, "n2": 2}, now)
    assert found == {"A": {"n1": 1, "n2": 1}, "B": {"n1": 1, "n2": 1}}


def test_a_job_takes_the_fewest_hosts() -> None:
    assert place({"A": 4}, {"n1": 2, "n2": 4, "n3": 2}, {}) == {"A": {"n2": 4}}


def test_a_job_that_shrinks_gives_up_whole_hosts() -> None:
    now = {"A": {"n1": 2, "n2": 1, "n3": 1}}
    assert place({"A": 3}, {"n1": 2, "n2": 2, "n3": 2}, now)["A"].get("n1") == 2
    assert place({"A": 2}, {"n1": 2, "n2": 2, "n3": 2}, now) == {"A": {"n1": 2}}


def test_workers_of_a_lost_host_move_and_no_others() -> None:
    now = {"A": {"n1": 2}, "B": {"n2": 1, "gone": 1}, "ended": {"n3": 2}}
    found = place({"A": 2, "B": 2}, {"n1": 2, "n2": 2, "n3": 2}, now)
    assert found == {"A": {"n1": 2}, "B": {"n2": 2}}


def test_jobs_of_several_hosts_are_kept_apart() -> None:
    found = place({"A": 3, "B": 3}, {"n1": 2, "n2": 2, "n3": 2, "n4": 2}, {})
    assert not set(found["A"]) & set(found["B"])


def test_jobs_that_wait_have_no_place() -> None:
    assert place({"A": 0, "B": 1}, {"n1": 1}, {"A": {"n1": 1}}) == {"B": {"n1": 1}}
    assert place({}, {}, {}) == {}


def test_more_workers_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="3 workers do not fit into 2 slots"):
        place({"A": 3}, {"n1": 2}, {})


def test_many_jobs_on_many_hosts_are_placed_again_within_the_limit_of_an_algorithm() -> None:
    chance = random.Random(1)
    hosts = {f"n{n}": 8 for n in range(40)}
    now: dict[str, dict[str, int]] = {}
    for n, host in enumerate(hosts):
        now.setdefault(f"j{n // 2}", {})[host] = chance.randint(4, 8)
    before = {job: sum(there.values()) for job, there in now.items()}
    sizes = {**before, "j0": 1, "new": 8, "j1": before["j1"] + 3}
    found = place(sizes, hosts, now)
    assert aims(found, now)[0] == 0
    assert found["j5"] == now["j5"]


# ---- all possible placements -----------------------------------------------------------------


def every_split(size: int, slots: list[int]) -> Iterator[tuple[int, ...]]:
    for split in itertools.product(*(range(min(size, each) + 1) for each in slots)):
        if sum(split) == size:
            yield split


def every_placement(
    sizes: Mapping[str, int],
    hosts: Mapping[str, int],
    firm: Mapping[str, Mapping[str, int]] | None = None,
) -> Iterator[Placement]:
    slots = list(hosts.values())
    most = {job: {**hosts, **(firm or {}).get(job, {})} for job in sizes}
    every = (every_split(size, list(most[job].values())) for job, size in sizes.items())
    for splits in itertools.product(*every):
        used = [sum(column) for column in zip(*splits, strict=True)]
        if all(each <= most for each, most in zip(used, slots, strict=True)):
            yield {
                job: {host: n for host, n in zip(hosts, split, strict=True) if n}
                for job, split in zip(sizes, splits, strict=True)
            }


def aims(found: Placement, now: Placement) -> tuple[int, int, int]:
    """Workers that moved, hosts of all jobs, and jobs of several hosts that share a host."""
    moved = 0
    for job, there in found.items():
        before = now.get(job, {})
        stay = min(sum(there.values()), sum(before.values()))
        moved += stay - sum(min(n, before.get(host, 0)) for host, n in there.items())
    wide = [there for there in found.values() if len(there) > 1]
    hosts = {host for there in wide for host in there}
    crowds = sum(sum(host in there for there in wide) - 1 for host in hosts)
    return moved, sum(map(len, found.values())), crowds


@pytest.mark.parametrize("part", range(4))
def test_random_placements_are_as_good_as_the_best_of_all(part: int) -> None:
    for case in range(50):
        chance = random.Random(part * 1000 + case)
        hosts = {f"n{n}": chance.randint(1, 3) for n in range(chance.randint(1, 4))}
        free = sum(hosts.values())
        sizes: dict[str, int] = {}
        for job in "ABC"[: chance.randint(1, 3)]:
            if free:
                sizes[job] = chance.randint(1, free)
                free -= sizes[job]
        now = random_placement(chance, hosts)
        found = place(sizes, hosts, now)
        assert {job: sum(there.values()) for job, there in found.items()} == sizes
        best = min(aims(each, now) for each in every_placement(sizes, hosts))
        assert aims(found, now) == best, (sizes, hosts, now)


def test_random_placements_under_limits_are_as_good_as_the_best_of_all() -> None:
    placed = 0
    for case in range(200):
        chance = random.Random(case)
        hosts = {f"n{n}": chance.randint(1, 3) for n in range(chance.randint(2, 4))}
        sizes = {job: chance.randint(1, 3) for job in "ABC"[: chance.randint(1, 3)]}
        firm = {
            job: {host: chance.randint(0, most) for host, most in hosts.items()}
            for job in sizes
            if chance.random() < 0.6
        }
        now = random_placement(chance, hosts)
        every = list(every_placement(sizes, hosts, firm))
        if not every:
            with pytest.raises(ValueError, match="do not fit"):
                place(sizes, hosts, now, firm=firm)
            continue
        placed += 1
        found = place(sizes, hosts, now, firm=firm)
        assert found in every
        assert aims(found, now) == min(aims(each, now) for each in every), (sizes, hosts, now)
        assert place_quickly(sizes, hosts, now, firm=firm) in every
    assert placed > 80


def random_placement(chance: random.Random, hosts: Mapping[str, int]) -> Placement:
    """Some workers of jobs that were there before, one of them on a host that is lost."""
    slots = [host for host, n in hosts.items() for _ in range(n)]
    now: dict[str, dict[str, int]] = {}
    for host in chance.sample(slots, chance.randint(0, len(slots))):
        there = now.setdefault(chance.choice("ABCD"), {})
        there[host] = there.get(host, 0) + 1
    if chance.random() < 0.2:
        now.setdefault("A", {})["lost"] = 1
    return now


def test_jobs_placed_quickly_fit_and_move_as_few_workers_as_possible() -> None:
    for seed in range(300):
        random_ = random.Random(seed)
        hosts = {f"n{n}": random_.randint(1, 6) for n in range(random_.randint(1, 12))}
        jobs = [f"j{n}" for n in range(random_.randint(1, 12))]
        before = {job: random_.randint(0, 4) for job in jobs}
        while sum(before.values()) > sum(hosts.values()):
            before[max(before, key=lambda job: before[job])] -= 1
        now = place_quickly(before, hosts, {})
        sizes = {job: random_.randint(0, 4) for job in jobs}
        while sum(sizes.values()) > sum(hosts.values()):
            sizes[max(sizes, key=lambda job: sizes[job])] -= 1
        found = place_quickly(sizes, hosts, now)
        assert {job: sum(at.values()) for job, at in found.items()} == {
            job: size for job, size in sizes.items() if size
        }
        for host, slots in hosts.items():
            assert sum(at.get(host, 0) for at in found.values()) <= slots
        for job, at in found.items():
            there = now.get(job, {})
            kept = sum(min(count, there.get(host, 0)) for host, count in at.items())
            assert kept == min(sizes[job], before[job]), f"seed {seed}: {job} moves needlessly"


def test_a_job_placed_quickly_stays_together() -> None:
    hosts = {"n1": 8, "n2": 4, "n3": 2}
    assert place_quickly({"A": 4, "B": 2}, hosts, {}) == {"A": {"n2": 4}, "B": {"n3": 2}}
    assert place_quickly({"A": 10}, hosts, {}) == {"A": {"n1": 8, "n3": 2}}
    assert place_quickly({"A": 5}, hosts, {"A": {"n2": 3}}) == {"A": {"n2": 4, "n3": 1}}
    assert place_quickly({"A": 2}, hosts, {"A": {"n1": 1, "n2": 2}}) == {"A": {"n2": 2}}
    with pytest.raises(ValueError, match="15 workers do not fit"):
        place_quickly({"A": 15}, hosts, {})
