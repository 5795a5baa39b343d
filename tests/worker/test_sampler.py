"""An epoch trains every sample once, however often the world changes under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from elastic_driver.errors import UsageError
from elastic_driver.worker import sampler as room
from elastic_driver.worker.sampler import ElasticSampler


class Place:
    """The rank and size that the sampler under test sees."""

    rank, size = 0, 1


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "rank_and_size", lambda: (Place.rank, Place.size))
    Place.rank, Place.size = 0, 1


def enter(samplers: list[ElasticSampler], loaders: list[Any] | None = None) -> list[Iterator[Any]]:
    """Each rank's iterator, over its loader if it has one."""
    iterators = []
    for rank, sampler in enumerate(samplers):
        Place.rank, Place.size = rank, len(samplers)
        iterators.append(iter(loaders[rank] if loaders else sampler))
    return iterators


def take(iterator: Iterator[int], count: int) -> list[int]:
    return list(islice(iterator, count))


class Job:
    """Workers that train in lockstep, and the samples they trained."""

    def __init__(self, samples: int, **options: Any) -> None:
        self.samples = samples
        self.options = options
        self.trained: Counter[int] = Counter()
        self.state = self.new().state_dict()

    def new(self, batch_size: int | None = None) -> ElasticSampler:
        return ElasticSampler(range(self.samples), batch_size=batch_size, **self.options)

    def train(self, size: int, batch_size: int, steps: int) -> None:
        """One world, at most `steps` steps of what is left of the epoch."""
        samplers = [self.new(batch_size) for _ in range(size)]
        for sampler in samplers:
            sampler.load_state_dict(self.state)
        iterators = enter(samplers)
        for _ in range(steps):
            batches = [take(iterator, batch_size) for iterator in iterators]
            assert len({len(batch) for batch in batches}) == 1, "a rank has less to train"
            if not batches[0]:
                break
            for sampler, batch in zip(samplers, batches, strict=True):
                self.trained.update(batch)
                sampler.advance()
        states = [sampler.state_dict() for sampler in samplers]
        assert all(state == states[0] for state in states), "ranks disagree about the progress"
        self.state = states[0]


@settings(max_examples=100, deadline=None)
@given(
    samples=st.integers(1, 120),
    shuffle=st.booleans(),
    worlds=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(0, 6)), min_size=3, max_size=6
    ),
)
def test_an_epoch_with_any_resizes_trains_each_sample_once_but_for_the_counted_padding(
    samples: int, shuffle: bool, worlds: list[tuple[int, int, int]]
) -> None:
    job = Job(samples, shuffle=shuffle, seed=4)
    for size, batch_size, steps in worlds:
        job.train(size, batch_size, steps)
    job.train(2, 3, steps=samples)
    assert set(job.trained) == set(range(samples))
    assert sum(job.trained.values()) == samples + job.state["replayed"]
    assert job.state["position"] == samples


def test_three_resizes_in_an_epoch_leave_every_count_at_one() -> None:
    job = Job(4 * 2 * 5 + 3 * 2 * 4 + 5 * 2 * 3 + 2 * 2 * 6)
    for size, steps in ((4, 5), (3, 4), (5, 3), (2, 6)):
        job.train(size, 2, steps)
    assert set(job.trained.values()) == {1}
    assert len(job.trained) == job.samples
    assert job.state["replayed"] == 0


def test_padding_larger_than_what_is_left_repeats_only_what_is_left() -> None:
    job = Job(17, shuffle=False)
    job.train(5, 3, 1)  # two samples left, for seven workers
    job.train(7, 4, 9)
    assert {index: n for index, n in job.trained.items() if n > 1} == {15: 4, 16: 3}
    assert job.state["replayed"] == 5


def test_an_epoch_has_the_same_order_for_every_number_of_workers() -> None:
    alone, three = Job(60, seed=2), Job(60, seed=2)
    alone.train(1, 12, 2)
    three.train(3, 4, 2)
    assert alone.trained == three.trained


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = ElasticSampler(range(50), seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(*which)) for which in ((0, 0), (0, 1), (1, 0), (1, 1))}) == 4


def test_without_shuffle_the_order_is_that_of_the_data() -> None:
    assert list(ElasticSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]


def loader_of(sampler: ElasticSampler, samples: int, **options: Any) -> DataLoader[Any]:
    options.setdefault("batch_size", 4)
    return DataLoader(range(samples), sampler=sampler, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}]
)
def test_prefetched_batches_do_not_count_before_the_optimizer_steps(
    options: dict[str, Any],
) -> None:
    sampler = ElasticSampler(range(50))
    loader = loader_of(sampler, 50, **options)
    for epoch in range(2):
        seen: list[int] = []
        for batch in loader:
            before = sampler.position
            assert before == len(seen)
            seen += batch.tolist()
            assert sampler.position == before, "counted before it was trained"
            sampler.advance()
            sampler.advance()  # a second optimizer in the same step
        assert sorted(seen) == list(range(50))
        assert (sampler.epoch, sampler.position) == (epoch, 50)
    del loader


def test_gradient_accumulation_counts_all_batches_of_a_step() -> None:
    sampler = ElasticSampler(range(48))
    positions = []
    for number, _ in enumerate(loader_of(sampler, 48)):
        if number % 3 == 2:
            sampler.advance()
            positions.append(sampler.position)
    assert positions == [12, 24, 36, 48]


def test_the_step_of_a_leftover_after_the_loop_counts_too() -> None:
    sampler = ElasticSampler(range(20))
    for number, _ in enumerate(loader_of(sampler, 20)):
        if number % 3 == 2:
            sampler.advance()
    sampler.advance()
    assert sampler.position == 20


def test_a_dropped_short_batch_is_not_trained_and_ends_the_epoch_all_the_same() -> None:
    sampler = ElasticSampler(range(50))
    loader = loader_of(sampler, 50, drop_last=True)
    for epoch in range(2):
        for _ in loader:
            sampler.advance()
        assert (sampler.epoch, sampler.position) == (epoch, 48)


def test_an_iteration_that_trained_nothing_takes_nothing_away() -> None:
    sampler = ElasticSampler(range(50))
    first = next(iter(loader_of(sampler, 50))).tolist()
    assert next(iter(loader_of(sampler, 50))).tolist() == first


def test_after_a_break_the_next_iteration_goes_on_with_what_is_left() -> None:
    sampler = ElasticSampler(range(12))
    loader = loader_of(sampler, 12)
    seen: list[int] = []
    for batch in loader:
        seen += batch.tolist()
        sampler.advance()
        break
    for batch in loader:
        seen += batch.tolist()
        sampler.advance()
    assert sorted(seen) == list(range(12))


def test_a_rejoin_after_the_last_step_of_an_epoch_does_not_begin_another_one() -> None:
    """The script comes back with the epoch it was in: its loop must find nothing left."""
    sampler = ElasticSampler(range(8))
    loader = loader_of(sampler, 8)
    for _ in loader:
        sampler.advance()
    sampler.load_state_dict(sampler.state_dict())
    sampler.reset()
    assert list(loader) == []
    assert len(list(loader)) == 2
    assert sampler.epoch == 1


def test_a_loop_that_names_its_epochs_may_come_back_into_a_finished_one() -> None:
    sampler = ElasticSampler(range(8))
    loader = loader_of(sampler, 8)
    for epoch in range(3):
        for _ in range(2):  # the second time as after a rejoin
            sampler.set_epoch(epoch)
            for _ in loader:
                sampler.advance()
            assert (sampler.epoch, sampler.position) == (epoch, 8)


def test_naming_the_current_epoch_in_its_middle_loses_no_progress() -> None:
    sampler = ElasticSampler(range(8))
    next(iter(loader := loader_of(sampler, 8)))
    iterator = iter(loader)
    next(iterator)
    sampler.advance()
    sampler.set_epoch(0)
    assert sampler.position == 4
    sampler.set_epoch(1)
    assert sampler.position == 0


def test_lengths_are_those_of_the_pass_under_way_or_the_next() -> None:
    samplers = [ElasticSampler(range(50)) for _ in range(4)]
    loaders = [loader_of(sampler, 50) for sampler in samplers]
    iterators = enter(samplers, loaders)
    assert [len(sampler) for sampler in samplers] == [13] * 4
    assert [len(loader) for loader in loaders] == [4] * 4
    next(iterators[0])
    samplers[0].advance()
    assert len(samplers[0]) == 13  # constant while it lasts
    samplers[0].reset()
    assert len(samplers[0]) == 9  # ⌈34 / 4⌉


def test_progress_stays_small_for_a_data_set_of_a_billion_samples() -> None:
    sampler = ElasticSampler(range(10**9), batch_size=3)
    first = take(iter(sampler), 3)
    assert len(set(first)) == 3
    sampler.advance()
    assert sampler.state_dict() == {
        "samples": 10**9,
        "seed": 0,
        "epoch": 0,
        "position": 3,
        "replayed": 0,
        "ended": 0,
        "optimized": 0,
    }


def test_horovods_record_batch_says_the_same_as_the_loader() -> None:
    sampler = ElasticSampler(range(20))
    for number, batch in enumerate(loader_of(sampler, 20)):
        if number % 2:
            sampler.advance()
        sampler.record_batch(number, len(batch))
        assert sampler.position == 4 * (number + 1)


def test_an_explicit_batch_size_serves_loops_that_fetch_ahead_of_themselves() -> None:
    sampler = ElasticSampler(range(20), batch_size=4)
    iterator = iter(loader_of(sampler, 20))
    next(iterator)
    next(iterator)  # fetched, not trained
    sampler.advance()
    assert sampler.position == 4


def test_a_loader_that_cannot_be_recognised_is_an_error_not_a_guess() -> None:
    sampler = ElasticSampler(range(20))
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(UsageError, match=r"or ElasticSampler\(batch_size=…\)"):
        sampler.advance()


def test_a_step_on_other_data_does_not_move_the_sampler() -> None:
    sampler = ElasticSampler(range(20))
    sampler.advance()
    assert sampler.position == 0


def test_the_loaders_workers_end_with_the_loop() -> None:
    """The sampler must not keep a loader's iterator, and with it processes, alive."""
    sampler = ElasticSampler(range(8))
    iterator = iter(loader_of(sampler, 8, num_workers=1))
    next(iterator)
    (process,) = iterator._workers  # type: ignore[attr-defined]
    del iterator
    process.join(timeout=20)
    assert not process.is_alive()


def test_the_state_of_another_data_set_is_refused_with_both_lengths() -> None:
    state = ElasticSampler(range(20)).state_dict()
    with pytest.raises(UsageError, match=r"of 20 samples, this one has 21"):
        ElasticSampler(range(21)).load_state_dict(state)


def test_a_stream_and_a_senseless_batch_size_are_refused() -> None:
    with pytest.raises(UsageError, match="ShardedDataset"):
        ElasticSampler(iter([1]))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="batch_size is 0"):
        ElasticSampler(range(2), batch_size=0)


def test_an_empty_data_set_yields_nothing() -> None:
    sampler = ElasticSampler([])
    assert list(sampler) == []
    assert len(sampler) == 0


def test_workers_that_share_no_world_with_us_are_asked_of_torch() -> None:
    from elastic_driver.worker.current import rank_and_size

    assert not torch.distributed.is_initialized()
    assert rank_and_size() == (0, 1)
