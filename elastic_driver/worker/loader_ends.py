"""Processes of DataLoaders that SIGTERM has ended.

A batch system that ends a job sends SIGTERM to all of its processes, so also to those of loaders,
which die of it. That says nothing about the script. The error of the loop that waits for their data
is taken for a change of the world: the state goes back to the last commit, and the worker goes on
from there with new processes, or leaves if it has to.

torch notices such a death in its handler of SIGCHLD and raises there, wherever the main thread is
at that moment, be it in an optimizer's step or while a checkpoint is written. `watch` lets it raise
only while the loop waits for data. Otherwise the loader finds out itself, when it needs that
process, within its `MP_STATUS_CHECK_INTERVAL` (5 s).
"""

import gc
import re
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import connection
from types import FrameType, TracebackType
from typing import Any

from torch.utils.data import DataLoader

from elastic_driver.worker.torch_seams import loaders

_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: ([^.]*)\.")
_OF_DATA_SET = re.compile(r"Caught \w+ in DataLoader worker process")
ENDS_S = 1.0  # for a process to end whose connection has broken off
_LOADERS = loaders.WithProcesses.__module__
_WAIT = loaders.code_of_wait()
_TERM = signal.strsignal(signal.SIGTERM)


def watch() -> None:
    """Let torch's handler raise for a process that SIGTERM has ended only where that is safe."""
    check = loaders.check_of_ends()
    if check is not None and check.__name__ != _guarded.__name__:
        loaders.replace_check_of_ends(_guarded(check))


def _guarded(check: Callable[[], None]) -> Callable[[], None]:
    def check_loaders() -> None:
        try:
            check()
        except RuntimeError as error:
            if not _says_so(error) or _waits_for_data(sys._getframe(1)):
                raise

    check_loaders.__name__ = _guarded.__name__
    return check_loaders


def _says_so(error: BaseException) -> bool:
    found = _KILLED.match(str(error))
    return found is not None and found[1] == _TERM


def _waits_for_data(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _WAIT:
            return True
        frame = frame.f_back
    return False


def were_ended(error: BaseException) -> bool:
    """Return whether a loop has failed because SIGTERM has ended processes of its loader.

    The loop may see that only by a connection that breaks off, while the process is about to end.
    An error of the data set, which torch raises again here, is the script's own.
    """
    if _says_so(error):
        return True
    if _OF_DATA_SET.match(str(error)):
        return False
    ended = set[int | None]()
    for iterator in _iterators(error.__traceback__):
        by_sentinel = {process.sentinel: process for process in loaders.processes_of(iterator)}
        for sentinel in connection.wait(by_sentinel, ENDS_S):
            by_sentinel[sentinel].join(ENDS_S)  # the sentinel comes a little before the status
        ended |= {process.exitcode for process in loaders.processes_of(iterator)}
    return ended - {None, 0} == {-signal.SIGTERM}


def forget(error: BaseException) -> None:
    """Let a loader with `persistent_workers` begin anew; else it would fail again."""
    broken = list(_iterators(error.__traceback__))
    for found in gc.get_objects():
        # Not `isinstance`: proxies of other libraries act when their `__class__` is asked for.
        is_loader = issubclass(type(found), DataLoader)
        if is_loader and any(loaders.kept_iterator(found) is each for each in broken):
            loaders.drop_iterator(found)


def _iterators(trace: TracebackType | None) -> Iterator[Any]:
    while trace is not None:
        # Of torch's frames alone: the dictionary that is asked for would keep what a script holds.
        if trace.tb_frame.f_globals.get("__name__") == _LOADERS:
            owner = trace.tb_frame.f_locals.get("self")
            if isinstance(owner, loaders.WithProcesses):
                yield owner
        trace = trace.tb_next
