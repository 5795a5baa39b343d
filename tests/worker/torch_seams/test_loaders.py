"""What `torch_seams.loaders` expects of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic_driver.worker import torch_seams

DATA = TensorDataset(torch.arange(8))


def test_an_iterator_without_processes_tells_what_it_draws_and_has_given() -> None:
    loader = DataLoader(DATA, batch_size=2)
    iterator = iter(loader)
    assert torch_seams.is_loader_iterator(iterator)
    assert not torch_seams.is_loader_iterator(loader)
    assert torch_seams.sampler_of(iterator) is loader.batch_sampler
    assert torch_seams.prefetching(vars(iterator)) is None
    for given in range(3):
        assert torch_seams.batches_yielded(vars(iterator)) == given
        next(iterator)
    assert list(torch_seams.drawing_of(vars(iterator))) == [[6, 7]]


def test_an_iterator_with_processes_draws_ahead_and_can_begin_anew() -> None:
    loader = DataLoader(
        DATA, batch_size=2, num_workers=1, prefetch_factor=3, persistent_workers=True
    )
    iterator = iter(loader)
    try:
        assert isinstance(iterator, torch_seams.IteratorWithProcesses)
        assert torch_seams.prefetching(vars(iterator)) == (3, True, True)
        (process,) = torch_seams.processes_of(iterator)
        assert process.is_alive()
        assert torch_seams.kept_iterator(loader) is iterator
        torch_seams.drop_iterator(loader)
        assert torch_seams.kept_iterator(loader) is None
        assert not torch_seams.is_shut_down(iterator)
    finally:
        iterator._shutdown_workers()
    assert torch_seams.is_shut_down(iterator)


def test_torch_calls_the_check_that_takes_its_place() -> None:
    check = torch_seams.check_of_ends()
    assert check is not None
    called: list[Callable[[], None]] = []
    torch_seams.replace_check_of_ends(lambda: called.append(check))
    try:
        replaced = torch_seams.check_of_ends()
        assert replaced is not None
        replaced()
    finally:
        torch_seams.replace_check_of_ends(check)
    assert called == [check]
    assert torch_seams.check_of_ends() is check


def test_the_wait_for_data_is_a_function_of_the_iterator() -> None:
    assert torch_seams.code_of_wait().co_name in vars(torch_seams.IteratorWithProcesses)
