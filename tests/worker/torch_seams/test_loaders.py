"""What `torch_seams.loaders` expects of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic_driver.worker.torch_seams import loaders

DATA = TensorDataset(torch.arange(8))


def test_an_iterator_without_processes_tells_what_it_draws_and_has_given() -> None:
    loader = DataLoader(DATA, batch_size=2)
    iterator = iter(loader)
    assert loaders.is_ready(iterator)
    assert not loaders.is_ready(loader)
    assert loaders.draws_from(iterator) is loader.batch_sampler
    assert loaders.prefetching(vars(iterator)) is None
    for given in range(3):
        assert loaders.batches_yielded(vars(iterator)) == given
        next(iterator)
    assert list(loaders.draws_of(vars(iterator))) == [[6, 7]]


def test_an_iterator_with_processes_draws_ahead_and_can_begin_anew() -> None:
    loader = DataLoader(
        DATA, batch_size=2, num_workers=1, prefetch_factor=3, persistent_workers=True
    )
    iterator = iter(loader)
    try:
        assert isinstance(iterator, loaders.WithProcesses)
        assert loaders.prefetching(vars(iterator)) == (3, True, True)
        (process,) = loaders.processes_of(iterator)
        assert process.is_alive()
        assert loaders.kept_iterator(loader) is iterator
        loaders.drop_iterator(loader)
        assert loaders.kept_iterator(loader) is None
        assert not loaders.is_shut_down(iterator)
    finally:
        iterator._shutdown_workers()
    assert loaders.is_shut_down(iterator)


def test_torch_calls_the_check_that_takes_its_place() -> None:
    check = loaders.check_of_ends()
    assert check is not None
    called: list[Callable[[], None]] = []
    loaders.replace_check_of_ends(lambda: called.append(check))
    try:
        replaced = loaders.check_of_ends()
        assert replaced is not None
        replaced()
    finally:
        loaders.replace_check_of_ends(check)
    assert called == [check]
    assert loaders.check_of_ends() is check


def test_the_wait_for_data_is_a_function_of_the_iterator() -> None:
    assert loaders.code_of_wait().co_name in vars(loaders.WithProcesses)
