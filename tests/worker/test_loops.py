"""At a commit the position is that of the batches which the loop has, however it gets them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, Subset

from elastic_driver.errors import UsageError
from elastic_driver.worker.sampler import ElasticSampler


def loader_of(sampler: ElasticSampler, **options: Any) -> DataLoader[Any]:
    if "batch_sampler" not in options:
        options = {"batch_size": 4, "sampler": sampler, **options}
    return DataLoader(range(sampler.samples), **options)  # type: ignore[arg-type]


def after_a_change(sampler: ElasticSampler) -> ElasticSampler:
    """The sampler of a newcomer, which comes after the last commit."""
    newcomer = ElasticSampler(range(sampler.samples), batch_size=sampler.batch_size)
    newcomer.load_state_dict(sampler.state_dict())
    return newcomer


def commit(*samplers: ElasticSampler) -> None:
    for sampler in samplers:
        sampler.advance()


PARAMETER = torch.nn.Parameter(torch.zeros(1))


def step() -> None:
    """Some optimizer steps."""
    PARAMETER.grad = torch.zeros(1)
    torch.optim.SGD([PARAMETER], lr=0.1).step()


AHEAD = [
    {},
    {"num_workers": 2},
    {"num_workers": 1, "prefetch_factor": 4},
    {"num_workers": 2, "persistent_workers": True},
]


@pytest.mark.parametrize("options", AHEAD, ids=str)
def test_batches_before_a_break_count_and_the_next_loop_goes_on_behind_them(
    options: dict[str, Any],
) -> None:
    sampler = ElasticSampler(range(40))
    loader = loader_of(sampler, **options)
    seen: list[int] = []
    for expected in (12, 24, 36, 40):
        for batch in islice(loader, 3):
            seen += batch.tolist()
        commit(sampler)
        commit(sampler)  # nothing between
        assert sampler.position == expected
    assert sorted(seen) == list(range(40))
    assert sampler.epoch == 0


@pytest.mark.parametrize("options", AHEAD, ids=str)
def test_a_commit_in_the_last_batch_is_in_the_loop_and_one_behind_it_is_not(
    options: dict[str, Any],
) -> None:
    sampler = ElasticSampler(range(10))
    for _ in loader_of(sampler, **options):
        commit(sampler)
    inside = after_a_change(sampler)
    assert list(inside) == [], "the script comes back into its last batch"
    assert len(list(inside)) == 10
    assert inside.epoch == 1
    commit(sampler)
    assert sampler.state_dict()["ended"] == 1
    behind = after_a_change(sampler)
    assert len(list(behind)) == 10
    assert behind.epoch == 1


def test_after_an_epoch_without_a_commit_the_next_one_begins() -> None:
    sampler = ElasticSampler(range(10))
    loader = loader_of(sampler)
    orders = [[i for batch in loader for i in batch.tolist()] for _ in range(2)]
    assert orders[0] != orders[1]
    commit(sampler)
    assert (sampler.epoch, sampler.position) == (1, 10)


def test_a_look_at_the_first_batch_takes_it_from_nobody() -> None:
    sampler = ElasticSampler(range(10))
    loader = loader_of(sampler)
    first = next(iter(loader)).tolist()
    for number, batch in enumerate(loader):
        assert number or batch.tolist() == first
        step()
        commit(sampler)
    assert sampler.position == 10


def test_a_look_at_the_next_epoch_before_a_commit_takes_nothing_from_it() -> None:
    sampler = ElasticSampler(range(12))
    loader = loader_of(sampler)
    seen: list[int] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            seen += batch.tolist()
            step()
            commit(sampler)
        next(iter(loader))  # to show it
        commit(sampler)
        back = after_a_change(sampler)
        back.set_epoch(epoch)
        assert list(back) == []
    assert sorted(seen) == sorted([*range(12)] * 2)


def test_a_few_batches_whose_step_comes_behind_their_loop_are_trained() -> None:
    sampler = ElasticSampler(range(24))
    loader = loader_of(sampler)
    seen: list[int] = []
    for _ in range(3):
        for batch in islice(loader, 2):
            seen += batch.tolist()
        step()
        commit(sampler)
    assert sorted(seen) == list(range(24))
    assert after_a_change(sampler).position == 24


def test_newcomers_and_ranks_that_rolled_back_agree_whether_optimizers_step() -> None:
    sampler = ElasticSampler(range(12))
    step()
    commit(sampler)
    survivor, newcomer = after_a_change(sampler), after_a_change(sampler)
    step()  # is rolled back, on one of them
    survivor.load_state_dict(sampler.state_dict())
    for each in (survivor, newcomer):
        commit(each)
    assert survivor.state_dict() == newcomer.state_dict() == sampler.state_dict()


def test_a_loop_over_nothing_needs_no_size_of_a_batch() -> None:
    empty, unused = ElasticSampler([]), ElasticSampler(range(4))
    assert list(empty) == []
    iter(unused)
    commit(empty, unused)
    assert (empty.epoch, unused.position) == (0, 0)


def test_asking_for_a_length_changes_nothing() -> None:
    sampler = ElasticSampler(range(12))
    for _ in islice(loader_of(sampler), 2):
        step()
    kept = sampler.state_dict()
    assert [len(sampler), len(sampler)] == [4, 4]
    assert sampler.state_dict() == kept
    commit(sampler)
    assert sampler.position == 8


def test_a_copy_of_a_sampler_goes_on_from_its_last_commit() -> None:
    sampler = ElasticSampler(range(12))
    iterator = iter(loader_of(sampler))
    next(iterator)
    commit(sampler)
    next(iterator)
    sent = pickle.dumps(sampler)
    for other in (deepcopy(sampler), pickle.loads(sent)):  # noqa: S301 - its own
        assert other.state_dict() == sampler.state_dict()
        assert len(list(other)) == 8


def test_what_was_trained_before_a_break_is_not_trained_again_without_a_commit_either() -> None:
    sampler = ElasticSampler(range(12))
    loader = loader_of(sampler)
    seen: list[int] = []
    for _ in range(3):
        for batch in loader:
            seen += batch.tolist()
            step()
            break
    assert sorted(seen) == list(range(12))


def test_an_evaluation_leaves_no_trace_wherever_it_is_made() -> None:
    sampler, checked = ElasticSampler(range(12)), ElasticSampler(range(8))
    before = checked.state_dict()
    for number, _ in enumerate(loader_of(sampler)):
        with torch.no_grad():
            whole = [i for batch in loader_of(checked) for i in batch.tolist()]
            part = [batch.tolist() for batch in islice(loader_of(checked), number)]
        assert sorted(whole) == list(range(8))
        assert part == [whole[i : i + 4] for i in range(0, len(part) * 4, 4)]
        step()
        commit(sampler, checked)
    assert checked.state_dict() == {**before, "optimized": 1}
    assert sampler.position == 12


def test_an_evaluation_on_the_training_data_does_not_end_the_epoch() -> None:
    sampler = ElasticSampler(range(12))
    loader = loader_of(sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for _ in loader:
            commit(sampler)
        with torch.no_grad():
            assert len(list(loader)) == 3
        commit(sampler)
        assert (sampler.epoch, sampler.position) == (epoch, 12)
        back = after_a_change(sampler)
        back.set_epoch(epoch)
        assert list(back) == []


def test_an_evaluation_with_a_commit_in_it_goes_on_after_a_change() -> None:
    sampler = ElasticSampler(range(12))
    with torch.no_grad():
        for _ in islice(loader_of(sampler), 2):
            commit(sampler)
        later = after_a_change(sampler)
        for expected in (1, 3, 3):
            assert len(list(loader_of(later))) == expected
            commit(later)


def test_an_endless_loop_that_names_its_epochs_by_the_sampler_goes_on_where_it_was() -> None:
    def batches(sampler: ElasticSampler) -> Iterator[torch.Tensor]:
        while True:
            sampler.set_epoch(sampler.epoch)
            yield from loader_of(sampler)
            sampler.set_epoch(sampler.epoch + 1)

    sampler = ElasticSampler(range(12))
    expected = [b.tolist() for b in islice(batches(ElasticSampler(range(12))), 8)]
    for stop in range(1, 8):
        sampler = ElasticSampler(range(12))
        seen = []
        for batch in islice(batches(sampler), stop):
            seen.append(batch.tolist())
            commit(sampler)
        sampler = after_a_change(sampler)
        seen += [b.tolist() for b in islice(batches(sampler), 8 - stop)]
        assert seen == expected


def test_a_cycle_over_a_loader_counts_its_first_round_only() -> None:
    """`itertools.cycle` keeps the batches: the sampler gives none for the rounds after."""
    sampler = ElasticSampler(range(8))
    for _ in islice(cycle(loader_of(sampler)), 6):
        commit(sampler)
    assert (sampler.epoch, sampler.position) == (0, 8)


@pytest.mark.parametrize("options", AHEAD, ids=str)
def test_an_iterator_in_a_variable_counts_what_it_was_asked_for(options: dict[str, Any]) -> None:
    sampler = ElasticSampler(range(10))
    loader = loader_of(sampler, **options)
    iterator = iter(loader)
    for expected in (4, 8, 10):
        next(iterator)
        commit(sampler)
        assert sampler.position == expected
        assert sampler.state_dict()["ended"] == 0
    with pytest.raises(StopIteration):
        next(iterator)
    commit(sampler)
    assert sampler.state_dict()["ended"] == 1


def test_a_validation_by_an_iterator_that_lasts_begins_anew() -> None:
    """Neither the loader nor the variable lets the iterator go, and no commit was made in it."""
    sampler = ElasticSampler(range(10))
    loader = loader_of(sampler, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    assert len(list(iterator)) == 3
    commit(sampler)
    assert len(list(after_a_change(sampler))) == 10


def test_single_samples_of_a_loader_without_batches_count_one_by_one() -> None:
    sampler = ElasticSampler(range(6))
    for number, _ in enumerate(loader_of(sampler, batch_size=None)):
        commit(sampler)
        assert sampler.position == number + 1
    assert sampler.state_dict()["ended"] == 0
    commit(sampler)
    assert sampler.state_dict()["ended"] == 1


def test_a_subset_and_a_batch_sampler_in_the_loader_count_as_without() -> None:
    data = Subset(range(100), range(0, 20, 2))  # type: ignore[arg-type]
    sampler = ElasticSampler(data)
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False))
    positions = []
    for _ in loader:
        commit(sampler)
        positions.append(sampler.position)
    assert positions == [4, 8, 10]


class Same(Sampler[list[int]]):
    """Hands on the batches of another one."""

    def __init__(self, batches: BatchSampler, skip: int = 0, group: int = 1) -> None:
        self.batches, self.skip, self.group = batches, skip, group

    def __iter__(self) -> Iterator[list[int]]:
        iterator = iter(self.batches)
        while pool := list(islice(iterator, self.group)):
            yield from pool


class Skips(Same):
    def __iter__(self) -> Iterator[list[int]]:
        yield from islice(self.batches, self.skip, None)


class ByLength(Sampler[list[int]]):
    """Draws a pool of samples, and makes batches of like ones."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        pool = sorted(self.sampler)
        for start in range(0, len(pool), 4):
            yield pool[start : start + 4]


@pytest.mark.parametrize("options", AHEAD[:2], ids=str)
def test_a_wrapper_that_hands_batches_on_one_by_one_counts_as_without(
    options: dict[str, Any],
) -> None:
    sampler = ElasticSampler(range(22))
    loader = loader_of(sampler, batch_sampler=Same(BatchSampler(sampler, 4, False)), **options)
    positions = []
    for _ in loader:
        commit(sampler)
        positions.append(sampler.position)
    assert positions == [4, 8, 12, 16, 20, 22]
    commit(sampler)
    assert sampler.state_dict()["ended"] == 1


Wrapper = Callable[[ElasticSampler], Any]


@pytest.mark.parametrize("options", AHEAD[:2], ids=str)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda sampler: Same(BatchSampler(sampler, 4, False), group=3),
        lambda sampler: Skips(BatchSampler(sampler, 4, False), skip=2),
        ByLength,
    ],
    ids=["pool", "skips", "by length"],
)
def test_a_wrapper_that_draws_ahead_is_refused_where_it_would_lose_samples(
    wrap: Wrapper, options: dict[str, Any]
) -> None:
    sampler = ElasticSampler(range(40))
    iterator = iter(loader_of(sampler, batch_sampler=wrap(sampler), **options))
    next(iterator)
    with pytest.raises(UsageError, match="cannot tell which samples were trained by this commit"):
        commit(sampler)


@pytest.mark.parametrize("wrap", [ByLength, lambda s: Same(BatchSampler(s, 4, False), group=3)])
def test_a_wrapper_of_any_kind_counts_at_the_end_of_its_loop(wrap: Wrapper) -> None:
    sampler = ElasticSampler(range(40))
    for _ in loader_of(sampler, batch_sampler=wrap(sampler)):
        pass
    commit(sampler)
    assert (sampler.position, sampler.state_dict()["ended"]) == (40, 1)


def test_batches_out_of_order_are_refused_because_what_is_left_is_no_rest() -> None:
    sampler = ElasticSampler(range(40))
    iterator = iter(loader_of(sampler, num_workers=2, in_order=False))
    next(iterator)
    with pytest.raises(UsageError, match="in_order=False"):
        commit(sampler)


def test_batches_that_another_thread_fetches_are_refused() -> None:
    sampler = ElasticSampler(range(40))
    iterator = iter(loader_of(sampler))
    thread = threading.Thread(target=lambda: [next(iterator) for _ in range(3)])
    thread.start()
    thread.join()
    with pytest.raises(UsageError, match="another thread"):
        commit(sampler)


@pytest.mark.parametrize(
    "draw",
    [
        iter,
        lambda sampler: iter(list(sampler)),
        lambda sampler: iter(BatchSampler(sampler, 4, False)),
    ],
    ids=["indices", "a list of all", "batches"],
)
def test_without_a_loader_training_needs_the_batch_size_and_validation_does_not(
    draw: Callable[[ElasticSampler], Iterator[Any]],
) -> None:
    sampler = ElasticSampler(range(8))
    iterator = draw(sampler)
    next(iterator)
    with pytest.raises(UsageError, match=r"no torch DataLoader\(batch_size=…\) iterates it"):
        commit(sampler)
    checked = ElasticSampler(range(8))
    with torch.no_grad():
        for _ in range(2):
            assert len([0 for _ in draw(checked)]) in (8, 2)
            commit(checked)
    assert checked.position == 0


def test_a_given_batch_size_counts_each_commit_that_has_had_a_batch() -> None:
    sampler = ElasticSampler(range(10), batch_size=4)
    iterator = iter(list(sampler))
    for expected in (4, 8, 10):
        assert list(islice(iterator, 4))
        commit(sampler)
        assert sampler.position == expected
    inside = after_a_change(sampler)
    assert list(inside) == []
    assert len(list(inside)) == 10
    commit(sampler)
    assert len(list(after_a_change(sampler))) == 10


def test_a_loop_that_fetches_one_batch_ahead_counts_what_it_has_trained() -> None:
    sampler = ElasticSampler(range(12), batch_size=4)
    iterator = iter(loader_of(sampler))
    fetched = next(iterator, None)
    positions = []
    while fetched is not None:
        fetched = next(iterator, None)  # while the one before is trained
        commit(sampler)
        if len(positions) == 1:
            commit(sampler)  # without a batch between
        positions.append(sampler.position)
    assert positions == [4, 8, 12]


def test_a_loop_of_a_world_that_is_over_does_not_go_on() -> None:
    sampler = ElasticSampler(range(12))
    iterator = iter(loader_of(sampler))
    next(iterator)
    commit(sampler)
    sampler.reset()
    with pytest.raises(UsageError, match=r"inside the function decorated with @elastic\.run"):
        next(iterator)


def test_progress_of_an_earlier_version_still_loads() -> None:
    sampler = ElasticSampler(range(10))
    old = {"samples": 10, "seed": 0, "epoch": 3, "position": 10, "replayed": 0}
    sampler.load_state_dict(old)
    assert list(sampler) == []
    assert len(list(sampler)) == 10
    assert sampler.epoch == 4


def test_a_script_that_may_come_back_to_an_epoch_that_is_over_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for named, lines in ((False, 1), (True, 0)):
        sampler = ElasticSampler(range(8))
        for epoch in range(2):
            if named:
                sampler.set_epoch(epoch)
            for _ in loader_of(sampler):
                commit(sampler)
            commit(sampler)
        assert capsys.readouterr().err.count("calls sampler.set_epoch(state.epoch)") == lines
