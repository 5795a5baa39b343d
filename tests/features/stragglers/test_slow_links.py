"""Slow links are found by what lies beside them, and never made up out of jitter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import pytest

from elastic_driver.features.stragglers.slowness import CONFIRM, Change, LinkWatch, Slowness
from elastic_driver.words.progress import Links, LinkUse

STEP_S = 0.5
BEAT = 4  # steps
CARRIED = 1_000_000
Spent = Callable[[int, int], float]  # seconds a step that data was under way from one to another


class Net:
    """Hosts of one rank each, whose exchange goes over the pairs of a ring or over all."""

    def __init__(self, size: int, *, ring: bool = True, step_s: float = STEP_S) -> None:
        self.hosts = [f"h{i}" for i in range(size)]
        self.watch = LinkWatch(self.hosts)
        self.step, self.step_s = 0, step_s
        self.totals = {
            (a, b): (0.0, 0)
            for a in range(size)
            for b in range(size)
            if a != b and (not ring or b == (a + 1) % size)
        }

    def train(self, beats: int, spent: Spent) -> list[Change]:
        changes: list[Change] = []
        for _ in range(beats):
            self.step += BEAT
            for (a, b), (seconds, carried) in self.totals.items():
                self.totals[a, b] = seconds + BEAT * spent(a, b), carried + BEAT * CARRIED
            for rank in range(len(self.hosts)):
                self.watch.report(rank, self.step, self.links_of(rank))
            changes += self.watch.look(self.step_s)
        return changes

    def links_of(self, rank: int) -> Links:
        # What an acknowledgement carries is next to nothing, however long it is under way.
        uses = [LinkUse(f"10.0.0.{b}", 0.4 * self.step, 100) for b in range(len(self.hosts))]
        for (a, b), (seconds, carried) in self.totals.items():
            if a == rank:
                uses[b] = LinkUse(f"10.0.0.{b}", seconds, carried)
        return Links(f"10.0.0.{rank}", tuple(uses[:rank] + uses[rank + 1 :]))


def only(slow: Iterable[int], seconds: float = 0.4) -> Spent:
    hosts = set(slow)
    return lambda a, b: seconds if {a, b} & hosts else 0.01


@pytest.mark.parametrize("ring", [True, False])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_the_host_is_named_that_all_its_pairs_speak_against(size: int, ring: bool) -> None:
    net = Net(size, ring=ring)
    assert net.train(20, only(())) == []
    (change,) = net.train(4, only({1}))
    slow = change.slow
    assert (slow.rank, slow.host, slow.kind) == (1, "h1", Slowness.NETWORK)
    assert slow.ratio == pytest.approx(40)
    assert slow.step <= 20 * BEAT + 30, "within 30 steps"
    assert net.watch.slow == (slow,)
    (over,) = net.train(20, only(()))
    assert over.over
    assert net.watch.slow == ()


def test_two_slow_hosts_that_are_no_neighbours_are_both_named() -> None:
    net = Net(8)
    net.train(2, only(()))
    assert sorted(change.slow.rank for change in net.train(5, only({2, 5}))) == [2, 5]


def test_one_slow_pair_names_nobody_for_it_could_be_either() -> None:
    net = Net(4)
    spent: Spent = lambda a, b: 0.4 if (a, b) == (1, 2) else 0.01  # noqa: E731
    assert net.train(50, spent) == []


def test_of_two_hosts_none_can_be_told_from_the_other() -> None:
    net = Net(2)
    net.train(5, only(()))
    assert net.train(50, lambda a, b: 0.4 if a == 0 else 0.01) == []


def test_what_is_a_small_part_of_the_step_harms_nobody() -> None:
    assert Net(4).train(50, only({1}, seconds=0.09)) == []


def test_a_passing_disturbance_is_no_alarm_and_an_alarm_soon_withdrawn_a_false_one() -> None:
    net = Net(4)
    net.train(5, only(()))
    confirm = CONFIRM
    assert net.train(confirm - 1, only({3})) == []
    assert net.train(5, only(())) == []
    assert len(net.train(confirm, only({3}))) == 1
    assert net.watch.false_alarms == 0
    assert len(net.train(confirm, only(()))) == 1
    assert net.watch.false_alarms == 1


@pytest.mark.parametrize("seed", range(10))
def test_a_link_that_loses_packets_stalls_now_and_then_and_is_named(seed: int) -> None:
    """Steps of 0.1 s, looks over three of them at least; a stall hits a look of a pair or not."""
    random = Random(seed)
    net = Net(4, step_s=0.1)
    net.train(10, only(()))
    stalls: Spent = lambda a, b: random.choice((0.01, 0.12)) if 1 in (a, b) else 0.01  # noqa: E731
    changes = net.train(40, stalls)
    assert [(change.slow.rank, change.over) for change in changes][:1] == [(1, False)]
    assert {change.slow.rank for change in changes} == {1}


def test_several_ranks_of_a_host_share_its_link_and_its_first_one_stands_for_it() -> None:
    watch = LinkWatch(["a", "a", "b", "c"])
    addresses = ["1.0.0.1", "1.0.0.1", "1.0.0.2", "1.0.0.3"]
    changes: list[Change] = []
    for step in range(4, 32, 4):
        for rank, own in enumerate(addresses):
            peers = dict.fromkeys(a for a in addresses if a != own)
            slow = {p: 0.4 if "1.0.0.1" in (own, p) else 0.01 for p in peers}
            uses = tuple(LinkUse(p, s * step, CARRIED * step) for p, s in slow.items())
            watch.report(rank, step, Links(own, uses))
        changes += watch.look(STEP_S)
    assert [(change.slow.rank, change.slow.host) for change in changes] == [(0, "a")]


def test_ranks_that_say_nothing_of_links_leave_the_round_unjudged() -> None:
    watch = LinkWatch(["a", "b", "c"])
    watch.report(0, 1, Links("1.0.0.1", ()))
    assert watch.look(STEP_S) == ()
    assert watch.slow == ()
