"""The iterators of a `DataLoader`, its processes, and torch's check whether one has ended."""

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

LoaderIterator = _BaseDataLoaderIter
WithProcesses = _MultiProcessingDataLoaderIter
_CHECK = "_error_if_any_worker_fails"  # torch's handler of SIGCHLD looks it up for each call


class Prefetching(NamedTuple):
    """How an iterator with processes draws ahead of the loop."""

    batches: int
    in_order: bool
    persistent: bool


def is_ready(iterator: Any) -> bool:
    """Return whether an object is a loader's iterator that has its sampler."""
    return isinstance(iterator, LoaderIterator) and hasattr(iterator, "_index_sampler")


def draws_from(iterator: Any) -> Any:
    """Return the sampler, or batch sampler, from which an iterator draws."""
    return iterator._index_sampler


def draws_of(fields: dict[str, Any]) -> Any:
    """Return the iterator over the sampler; `fields`: the `vars()` of a loader's iterator."""
    return fields["_sampler_iter"]


def prefetching(fields: dict[str, Any]) -> Prefetching | None:
    """Return how an iterator with these fields draws ahead; None: it has no processes."""
    if not (workers := fields["_num_workers"]):
        return None
    ahead = workers * fields["_prefetch_factor"]
    return Prefetching(ahead, fields.get("_in_order", True), fields["_persistent_workers"])


def batches_yielded(fields: dict[str, Any]) -> int:
    """Return the batches that an iterator with these fields has handed on."""
    return int(fields.get("_num_yielded", 0))


def is_shut_down(iterator: Any) -> bool:
    """Return whether an iterator with processes has told them to end."""
    return bool(getattr(iterator, "_shutdown", False))


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator that a loader with `persistent_workers` keeps; None: none."""
    return loader._iterator


def drop_iterator(loader: DataLoader[Any]) -> None:
    """Let a loader with `persistent_workers` begin with new processes."""
    loader._iterator = None


def processes_of(iterator: Any) -> Sequence[Any]:
    """Return the processes of an iterator that has some, as `multiprocessing` objects."""
    found: Sequence[Any] = iterator._workers
    return found


def code_of_wait() -> CodeType:
    """Return the code in which an iterator waits for data of its processes."""
    code: CodeType = WithProcesses._try_get_data.__code__
    return code


def check_of_ends() -> Callable[[], None] | None:
    """Return what torch calls upon SIGCHLD; it raises for a process that has failed."""
    check: Callable[[], None] | None = getattr(signal_handling, _CHECK, None)
    return check


def replace_check_of_ends(check: Callable[[], None]) -> None:
    """Have torch call this function upon SIGCHLD."""
    setattr(signal_handling, _CHECK, check)
