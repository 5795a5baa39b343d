"""Work moves away from slow ranks when that is worth it, and never because of noise."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.features.stragglers.balance import Cost, fastest_shares, step_time
from tests.features.stragglers.test_balance import WINDOW, Ranks


@pytest.mark.parametrize("shares", [(2, 2, 2, 2), (16, 16, 16, 16)])
def test_an_hour_of_jittered_steps_moves_nothing(shares: tuple[int, ...]) -> None:
    """A sample stands for at least 0.1 s: an hour has 36,000 of each rank."""
    random = Random(7)

    def jittered(_rank: int, _step: int) -> float:
        pause = 5.0 if random.random() < 0.01 else 1.0
        return 0.1 * pause * random.lognormvariate(0.0, 0.2)

    assert Ranks(shares).train(36_000, jittered) == []


def test_a_slow_rank_is_found_in_jitter_and_kept_as_it_is() -> None:
    for seed in range(10):
        random = Random(seed)

        def jittered(rank: int, _step: int, dice: Random = random) -> float:
            return 0.1 * (2.5 if rank == 3 else 1.0) * dice.lognormvariate(0.0, 0.15)

        ranks = Ranks((4, 4, 4, 4))
        assert len(ranks.train(4 * WINDOW, jittered)) == 1
        assert ranks.shares[3] < 3
        assert len(ranks.train(1_000, jittered)) <= 1


COSTS = st.builds(Cost, st.integers(1, 6), st.integers(0, 4))


@given(st.lists(COSTS, min_size=1, max_size=4), st.integers(0, 6))
def test_no_other_sharing_is_sooner_over(costs: list[Cost], more: int) -> None:
    total = len(costs) + more
    shares = fastest_shares(total, costs)
    assert sum(shares) == total
    assert min(shares) >= 1
    others = _sharings(total, len(costs))
    assert step_time(shares, costs) == min(step_time(other, costs) for other in others)


def _sharings(total: int, parts: int) -> list[list[int]]:
    if parts == 1:
        return [[total]]
    return [
        [first, *rest]
        for first in range(1, total - parts + 2)
        for rest in _sharings(total - first, parts - 1)
    ]
