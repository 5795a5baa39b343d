"""Shares from the driver reach all ranks at the same step, whenever rank 0 hears of them."""

from __future__ import annotations

from pathlib import Path

import torch

from elastic_driver.words.orders import Allocation
from elastic_driver.worker.batches import EVERY, BalancedShares
from tests.support.gloo import run_ranks

CPU = torch.device("cpu")
STEPS = 24
HEARD_AT = {3: (6, 1, 1), 9: (1, 1, 6), 10: (2, 2, 4), 21: (9, 9, 9)}


def shares_by_step(rank: int, size: int) -> list[list[int]]:
    """Return the shares in force in each step; only rank 0 hears of new ones, in some steps."""
    heard: list[Allocation] = []
    shares = BalancedShares(lambda: heard[-1] if heard else None)
    found = [shares.enter(rank, size, 8)]
    for step in range(STEPS):
        if rank == 0 and step in HEARD_AT:
            heard.append(Allocation(0, HEARD_AT[step], "a test"))
        shares.begin(step, CPU)
        found.append(shares.finish() or found[-1])
    assert shares.enter(rank, size, 8) == found[-1], "the next epoch goes on with them"
    assert shares.enter(rank, size, 9) == [3, 3, 3], "another batch has nothing to do with them"
    return found


def test_every_rank_takes_new_shares_over_at_the_same_step(tmp_path: Path) -> None:
    ranks = run_ranks(3, shares_by_step, tmp_path)
    assert ranks[0] == ranks[1] == ranks[2]
    changes = [step for step in range(1, STEPS + 1) if ranks[0][step] != ranks[0][step - 1]]
    assert changes == [EVERY + 1, 3 * EVERY + 1], "after the step in which they were passed on"
    assert ranks[0][0] == [3, 3, 2]
    assert ranks[0][-1] == [2, 2, 4], "shares that are not of this batch are not taken over"


def test_alone_a_worker_trains_everything() -> None:
    shares = BalancedShares(lambda: Allocation(0, (8,), "a test"))
    assert shares.enter(0, 1, 8) == [8]
    shares.begin(0, CPU)
    assert shares.finish() is None


def test_what_was_given_to_another_round_is_not_for_this_one() -> None:
    shares = BalancedShares(lambda: Allocation(7, (1, 7), "a test"))
    shares.enter(0, 2, 8)
    assert shares._next_shares() is None
