"""Workers whose scripts know their rank before the round: those of Horovod's API."""

from __future__ import annotations

from itertools import permutations

import pytest

from elastic_driver.job.membership import TOLD_RANK_S
from elastic_driver.job.ranks import assign
from tests.job.scenario import MakeScenario, Scenario
from tests.job.test_ranks import seats


def told(s: Scenario, *workers: str) -> dict[str, int]:
    """The ranks that these workers were started with; no two are equal."""
    found = {worker: s.told(worker) for worker in workers}
    assert len(set(found.values())) == len(found), found
    return found


def lose(s: Scenario, *workers: str) -> list[str]:
    """Workers of the round are killed one after the other; return those started in their place."""
    before = set(s.starting)
    for worker in workers:
        s.exit(worker, -9)
    return [worker for worker in s.starting if worker not in before]


def arrive(s: Scenario, *workers: str) -> None:
    """These newcomers come, a while apart; whoever trains leaves its round when it is told to."""
    for worker in workers:
        s.ready(worker, told=True)
        for _ in range(3):
            s.wait(2.0)
            if s.round[1] == "closing":
                s.ready(*s.in_state("running"), version=3)
            elif s.round[1] == "complete":
                s.step(*(w for w in s.in_state("running") if w != worker), step=4)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_several_that_were_lost_together_keep_what_their_newcomers_were_told(
    scenario: MakeScenario, order: tuple[int, ...]
) -> None:
    s = scenario(start_np=4, min_np=1).training(a=4)
    newcomers = lose(s, "a.1.1", "a.3.1", "a.2.1")
    s.ready("a.0.1", version=2)
    ranks = told(s, *newcomers)
    first: dict[str, int] = {}
    for n in order:
        arrive(s, newcomers[n])
        first = {**{m.worker: m.place.rank for m in s.world.members}, **first}
    assert s.members[0] == "a.0.1"
    assert {name: first[name] for name in newcomers} == ranks
    assert s.world.size == 4


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_all_that_were_lost_together_keep_what_their_newcomers_were_told(
    scenario: MakeScenario, order: tuple[int, ...]
) -> None:
    s = scenario(start_np=4, min_np=1).training(a=2, b=2)
    newcomers = lose(s, "a.1.1", "b.0.1", "a.0.1", "b.1.1")
    ranks = told(s, *newcomers)
    arrive(s, *(newcomers[n] for n in order))
    assert {m.worker: m.place.rank for m in s.world.members} == ranks


def test_where_all_were_lost_ranks_are_those_of_the_variables(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, min_np=1).training(a=3)
    newcomers = lose(s, "a.1.1", "a.0.1", "a.2.1")
    ranks = told(s, *newcomers)
    assert ranks != dict(zip(newcomers, range(3), strict=True))
    s.ready(*newcomers)
    assert {m.worker: m.place.rank for m in s.world.members} == ranks


def test_newcomers_are_told_anew_when_the_survivors_of_another_host_come_first(
    scenario: MakeScenario,
) -> None:
    s = scenario(start_np=4, min_np=1).training(a=2, b=2)
    newcomers = lose(s, "a.1.1", "a.0.1")
    ranks = told(s, *newcomers)
    assert ranks == {"a.1.2": 2, "a.0.2": 3}
    s.ready("b.0.1", "b.1.1", version=2)
    assert s.members == ["b.0.1", "b.1.1"]
    arrive(s, *newcomers)
    assert s.members == ["b.0.1", "b.1.1", "a.1.2", "a.0.2"]


def test_a_loss_while_newcomers_boot(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, min_np=1).training(a=3)
    (first,) = lose(s, "a.2.1")
    s.ready("a.0.1", "a.1.1", version=2)
    assert s.members == ["a.0.1", "a.1.1"]
    (second,) = lose(s, "a.1.1")
    s.ready("a.0.1", version=3)
    ranks = told(s, first, second)
    s.ready(first, told=True)
    s.wait(5.0)
    assert s.round[1] == "complete"  # the newcomer of rank 2 waits for that of rank 1
    s.ready(second, told=True)
    s.wait(0.1)
    s.ready("a.0.1", version=4)
    assert {m.worker: m.place.rank for m in s.world.members} == {"a.0.1": 0, **ranks}


def test_nobody_waits_for_ever_for_the_ranks_before_its_own(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, min_np=1).training(a=3)
    newcomers = lose(s, "a.1.1", "a.2.1")
    s.ready("a.0.1", version=2)
    last = max(newcomers, key=s.told)
    s.ready(last, told=True)
    s.wait(TOLD_RANK_S - 0.1)
    assert s.round[1] == "complete"
    s.wait(0.2)
    assert s.round[1] == "closing"
    s.ready("a.0.1", version=9)
    assert s.members == ["a.0.1", last]


def test_nobody_waits_where_no_other_newcomer_can_come(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, min_np=1).training(a=3)
    newcomers = lose(s, "a.1.1", "a.2.1")
    s.ready("a.0.1", version=2)
    s.ready(max(newcomers, key=s.told), told=True)
    s.hosts(a=2)  # the slot of the other one is gone
    s.obey_stops()
    s.wait(1.5)
    assert s.round[1] == "closing"


def test_workers_that_were_told_nothing_do_not_wait(scenario: MakeScenario) -> None:
    s = scenario(start_np=3, min_np=1).training(a=3)
    newcomers = lose(s, "a.1.1", "a.2.1")
    s.ready("a.0.1", version=2)
    s.ready(newcomers[0])
    s.wait(0.1)
    assert s.round[1] == "closing"


def test_a_spare_keeps_its_rank_and_the_survivors_make_room(scenario: MakeScenario) -> None:
    before = seats(("a", 0), ("a", 1), ("a", 2))
    spare = before[2]._replace(worker="spare", age=(True, 9), told=1)
    assert [worker for worker, _ in assign([*before[:2], spare])] == ["a.0", "spare", "a.1"]


def test_hosts_stay_together_whatever_their_newcomers_were_told() -> None:
    old, *new = seats(("a", 0), ("a", 1), ("b", 0), ("b", 1))
    a1, b0, b1 = (seat._replace(age=(True, seat.age[1])) for seat in new)
    for ranks in permutations(range(4), 3):
        told = [seat._replace(told=rank) for seat, rank in zip((a1, b0, b1), ranks, strict=True)]
        found = assign([old, *told])
        assert [place.rank for _, place in found] == [0, 1, 2, 3]
        assert [place.node_rank for _, place in found] == [0, 0, 1, 1]
    told = [a1._replace(told=1), b0._replace(told=3), b1._replace(told=2)]
    assert [worker for worker, _ in assign([old, *told])] == ["a.0", "a.1", "b.1", "b.0"]


def test_a_host_of_newcomers_does_not_take_the_ranks_that_another_was_told() -> None:
    a0, a1, b0, c0 = seats(("a", 0), ("a", 1), ("b", 0), ("c", 0))
    new = [seat._replace(age=(True, seat.age[1])) for seat in (a0, a1, b0, c0)]
    new[3] = new[3]._replace(told=0)
    new[0] = new[0]._replace(told=2)
    assert [worker for worker, _ in assign(new)] == ["c.0", "a.1", "a.0", "b.0"]
