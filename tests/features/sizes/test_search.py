"""The search visits few sizes and ends at one that is nearly as fast as the fastest."""

import random

import pytest

from elastic_driver.features.sizes.search import CLOSE, Layout, Search, fit
from tests.features.sizes.curves import CURVES, Curve

MOST_MOVES = 6  # with eight slots


def searched(curve: Curve, start: int, noise: float = 0.0, seed: int = 0) -> tuple[Search, int]:
    """The search after its end, and the size it ended at."""
    chance, size = random.Random(seed), start
    layout = Layout(curve.hosts(), curve.micro_batches)
    search = Search(layout)
    while True:
        measured = layout.work(size) / curve.speed(size) * (1 + noise * chance.gauss(0, 1))
        search.measured(size, measured)
        proposal = search.next()
        assert proposal.reason
        search.moves += proposal.size != size
        size = proposal.size
        if proposal.last:
            return search, size


@pytest.mark.parametrize("start", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CURVES)
def test_it_ends_within_5_percent_of_the_best_after_at_most_6_moves(name: str, start: int) -> None:
    curve = CURVES[name]
    search, size = searched(curve, start)
    assert curve.speed(size) >= 0.95 * max(curve.speeds), (size, search.rates)
    assert search.moves <= MOST_MOVES


@pytest.mark.parametrize("name", CURVES)
def test_measurements_that_are_1_percent_wrong_change_nothing(name: str) -> None:
    curve = CURVES[name]
    for seed in range(3):
        search, size = searched(curve, 1, 0.01, seed)
        assert curve.speed(size) >= 0.93 * max(curve.speeds), (seed, size, search.rates)
        assert search.moves <= MOST_MOVES


def test_of_sizes_that_are_as_good_the_smallest_wins() -> None:
    assert searched(CURVES["flat"], 8)[1] == 1
    assert searched(CURVES["flat from 2"], 1)[1] == 2


def test_it_never_more_than_doubles_the_largest_size_tried() -> None:
    for curve in CURVES.values():
        search, _ = searched(curve, 1)
        for number, size in enumerate(search.order[1:], start=1):
            assert size <= 2 * max(search.order[:number])


def test_sizes_with_as_many_micro_batches_for_the_busiest_worker_are_not_tried() -> None:
    layout = Layout(dict.fromkeys(range(1, 9), 1), 8)
    assert layout.candidates() == [1, 2, 3, 4, 8]
    assert set(searched(CURVES["8 micro-batches"], 1)[0].rates) <= {1, 2, 3, 4, 8}


def test_a_dip_where_the_second_host_joins_does_not_end_the_search() -> None:
    dip = Curve((1, 2, 3, 4, 3.0, 3.2, 3.4, 3.6, *[9.0] * 8), (4, 12))
    assert dip.speed(searched(dip, 1)[1]) == 9.0
    assert searched(dip, 1)[0].order[:5] == [1, 2, 4, 8, 16]
    alone = dip._replace(slots=(16,))
    assert searched(alone, 1)[0].order[:5] != [1, 2, 4, 8, 16]


def test_the_model_promises_no_more_than_the_neighbours_of_a_size_let_it() -> None:
    """Of the sizes 2, 4 and 8 alone, it cannot tell computing from exchanging."""
    search = Search(Layout({size: 1 if size <= 4 else 2 for size in range(1, 9)}))
    for size, rate in ((4, 128.0), (8, 81.0), (2, 99.0), (5, 114.0)):
        search.measured(size, size / rate)
    assert max(search._promised([1, 3, 6, 7]).values()) < 1.2 * 128


def test_the_model_is_optimistic_about_what_was_not_tried() -> None:
    layout = Layout({1: 1, 2: 1, 4: 1, 8: 2})
    alone = fit(layout, {1: 1.0})
    assert alone.rate(8) > 7.5 * alone.rate(1)
    one_host = fit(layout, {1: 1.0, 2: 1.3, 4: 1.34})
    assert one_host.step_time(8) < 1.5


def test_the_model_tells_hosts_apart() -> None:
    layout = Layout({size: 1 if size <= 4 else 2 for size in range(1, 9)})
    model = fit(layout, {1: 1.0, 2: 1.1, 4: 1.1, 8: 3.0})
    assert model.step_time(3) == pytest.approx(1.1, rel=0.05)
    assert model.step_time(6) > 2.0


def test_the_speed_of_a_candidate_is_close_to_what_was_measured() -> None:
    curve = CURVES["many micro-batches"]
    layout = Layout(curve.hosts(), curve.micro_batches)
    times = {size: curve.step_time(size) for size in (1, 2, 4, 8)}
    model = fit(layout, times)
    for size in (3, 5, 6, 7):
        assert model.step_time(size) == pytest.approx(curve.step_time(size), rel=0.15)
    assert CLOSE == 0.95  # the tests above rely on it
