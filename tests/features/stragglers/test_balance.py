"""Work moves away from slow ranks when that is worth it, and never because of noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from elastic_driver.features.stragglers.balance import WINDOW, Balancer, Cost, Move, fastest_shares
from elastic_driver.words.progress import Division

LOOK = 5  # steps from one look to the next
Spent = Callable[[int, int], float]  # seconds of a micro-batch by rank and step


class Ranks:
    """Ranks that train by the shares they are given, and report as workers do."""

    def __init__(
        self, shares: Sequence[int], known: Sequence[Cost | None] = (), delay: int = 3
    ) -> None:
        self.balancer = Balancer(["a", "b", "c", "d"][: len(shares)], known)
        self.shares, self.delay = tuple(shares), delay
        self.moves: list[Move] = []
        self.step = 0

    def train(self, steps: int, spent: Spent) -> list[Move]:
        """So many steps; what was moved in them."""
        before = len(self.moves)
        taken_over: tuple[int, tuple[int, ...]] | None = None
        for _ in range(steps):
            self.step += 1
            if taken_over is not None and taken_over[0] == self.step:
                self.shares, taken_over = taken_over[1], None
            for rank, share in enumerate(self.shares):
                self.balancer.divided(rank, Division(sum(self.shares), share))
                self.balancer.measured(rank, self.step, Cost(spent(rank, self.step)))
            move = self.balancer.decide() if self.step % LOOK == 0 else None
            if move is not None:
                self.moves.append(move)
                taken_over = self.step + self.delay, move.shares
        return self.moves[before:]


def only(slow: int, factor: float) -> Spent:
    return lambda rank, _step: 0.1 * (factor if rank == slow else 1.0)


def test_a_slow_rank_gets_less_and_what_it_had_when_it_has_recovered() -> None:
    ranks = Ranks((4, 4, 4))
    assert ranks.train(50, only(1, 1.0)) == []
    (move,) = ranks.train(2 * WINDOW, only(1, 3.0))
    assert move.shares == (5, 2, 5)
    assert move.last == 1
    assert move.reason == (
        "rank 1 on b came last, with 4 micro-batches of 0.3 s where 0.1 s are usual: it trains 2 "
        "of them now, which makes a step of 1.2 s one of 0.6 s"
    )
    assert ranks.train(200, only(1, 3.0)) == []
    (back,) = ranks.train(2 * WINDOW, only(1, 1.0))
    assert back.shares == (4, 4, 4)


def test_it_takes_no_longer_than_the_window_and_a_half_of_slow_steps() -> None:
    ranks = Ranks((4, 4, 4))
    ranks.train(100, only(0, 1.0))
    (_,) = ranks.train(WINDOW * 3 // 2 + LOOK, only(0, 2.0))


@pytest.mark.parametrize("factor", [1.1, 1.15])
def test_a_little_slower_is_not_worth_a_move(factor: float) -> None:
    assert Ranks((4, 4, 4)).train(300, only(2, factor)) == []


def test_a_few_slow_steps_move_nothing() -> None:
    ranks = Ranks((4, 4, 4))
    ranks.train(100, only(0, 1.0))
    assert ranks.train(WINDOW // 2 - 1, only(0, 9.0)) == []
    assert ranks.train(100, only(0, 1.0)) == []


def test_the_survivors_of_a_round_keep_what_is_known_of_them() -> None:
    ranks = Ranks((3, 3, 3, 3), known=(Cost(0.1), Cost(0.3), Cost(0.1), None))
    (move,) = ranks.train(WINDOW, only(1, 3.0))
    assert move.shares == (4, 1, 4, 3), "who was not there counts as usual"
    assert ranks.balancer.costs() == [Cost(0.1), Cost(0.1 * 3.0), Cost(0.1), Cost(0.1)]
    assert (
        Ranks((4, 4, 4), known=(Cost(0.1), Cost(0.1), None)).train(WINDOW - 1, only(1, 3.0)) == []
    )


def test_nothing_is_decided_while_the_ranks_do_not_agree_on_their_shares() -> None:
    ranks = Ranks((4, 4, 4))
    ranks.balancer.divided(0, Division(12, 4))
    assert ranks.balancer.decide() is None
    ranks.train(100, only(0, 1.0))
    for step in range(101, 200):
        ranks.balancer.divided(0, Division(12, 5))
        for rank in range(3):
            ranks.balancer.measured(rank, step, Cost(0.1 if rank else 0.9))
        assert ranks.balancer.decide() is None


def test_nobody_is_left_without_work_and_nothing_is_moved_where_each_has_one() -> None:
    assert Ranks((1, 1, 1)).train(100, only(0, 9.0)) == []
    (move,) = Ranks((4, 4, 4)).train(WINDOW + LOOK, only(0, 90.0))
    assert move.shares == (1, 6, 5)


# ---- the rule ----------------------------------------------------------------------------


def test_without_slow_ranks_work_is_shared_as_always() -> None:
    assert fastest_shares(8, [Cost(1.0)] * 3) == [3, 3, 2]


def test_a_rank_that_is_half_as_fast_gets_half_the_work() -> None:
    assert fastest_shares(10, [Cost(1.0), Cost(1.0), Cost(2.0)]) == [4, 4, 2]


def test_what_a_step_costs_once_counts_too() -> None:
    assert fastest_shares(10, [Cost(1.0), Cost(1.0), Cost(1.0, rest=3.0)]) == [5, 4, 1]
