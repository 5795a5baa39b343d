"""SIGTERM to the processes of a DataLoader: real ones, in this process's own loop."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from elastic_driver.worker import run
from tests.support.job import eventually


class Slow(Dataset[torch.Tensor]):
    """Items that take their time from the fourth on."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.0 if index < 4 else 60.0)
        return torch.tensor(index)


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The guard is there in the test, and torch's own function after it."""
    check = signal_handling._error_if_any_worker_fails
    monkeypatch.setattr(signal_handling, "_error_if_any_worker_fails", check)
    before = signal.getsignal(signal.SIGCHLD)
    run.watch_loaders()
    yield
    signal.signal(signal.SIGCHLD, before)
    signal_handling._SIGCHLD_handler_set = False


def loop(**options: Any) -> tuple[DataLoader[torch.Tensor], Any]:
    """A loader and its iterator, which has handed out what comes at once."""
    loader = DataLoader(Slow(), batch_size=1, num_workers=2, prefetch_factor=1, **options)
    iterator = iter(loader)
    assert [int(next(iterator)) for _ in range(4)] == [0, 1, 2, 3]
    return loader, iterator


def end(iterator: Any, number: signal.Signals) -> None:
    """Somebody else does: torch takes its own parent's SIGTERM for an order to exit 0."""
    pids = [str(process.pid) for process in iterator._workers]
    subprocess.run(["kill", f"-{int(number)}", *pids], check=True)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, True), (signal.SIGKILL, False)])
def test_the_loop_that_waits_for_data_fails_and_the_signal_is_known(
    number: signal.Signals, said: bool
) -> None:
    _loader, iterator = loop()
    # While the main thread waits for data: torch raises in its handler.
    signal.signal(signal.SIGALRM, lambda *_: end(iterator, number))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
        next(iterator)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert run.loaders_were_ended(caught.value) is said


def test_elsewhere_nothing_is_raised_and_the_loader_finds_out_itself() -> None:
    _loader, iterator = loop()
    end(iterator, signal.SIGTERM)  # the handler runs as soon as one has ended
    eventually(
        lambda: not any(process.is_alive() for process in iterator._workers),
        within=10,
        what="both have ended",
    )
    with pytest.raises(RuntimeError, match="exited unexpectedly") as caught:
        next(iterator)
    assert run.loaders_were_ended(caught.value)


def test_other_ends_are_raised_wherever_the_script_is() -> None:
    _loader, iterator = loop()

    def wait_elsewhere() -> None:
        end(iterator, signal.SIGKILL)
        eventually(lambda: False, within=10, what="torch's handler raises")

    with pytest.raises(RuntimeError, match="is killed by signal: Killed"):
        wait_elsewhere()


def test_a_loader_that_keeps_its_processes_begins_anew() -> None:
    loader, iterator = loop(persistent_workers=True)
    end(iterator, signal.SIGTERM)
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    assert run.loaders_were_ended(caught.value)
    run.forget_loaders(caught.value)
    again = iter(loader)
    assert again is not iterator
    assert int(next(again)) == 0


class Broken(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise ConnectionResetError("the store of the data has gone")
        return torch.tensor(index)


def test_an_error_of_the_data_set_is_the_script_s_own() -> None:
    with pytest.raises(ConnectionResetError) as caught:
        list(DataLoader(Broken(), num_workers=2))
    began = time.monotonic()
    assert not run.loaders_were_ended(caught.value)
    assert time.monotonic() - began < run.ENDS_S


def test_a_connection_may_break_off_before_the_process_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _loader, iterator = loop()

    def breaks(timeout: float) -> None:
        del timeout
        ends.start()
        raise ConnectionResetError("Connection reset by peer")

    ends = threading.Timer(0.2, end, (iterator, signal.SIGTERM))
    monkeypatch.setattr(run, "ENDS_S", 20.0)  # on a busy machine
    monkeypatch.setattr(iterator._data_queue, "get", breaks)
    with pytest.raises(ConnectionResetError) as caught:
        next(iterator)
    assert run.loaders_were_ended(caught.value)
    ends.join()


def test_errors_of_the_script_are_its_own() -> None:
    for error in (RuntimeError("DataLoader"), ValueError("DataLoader worker (pid 1)"), OSError()):
        assert not run.loaders_were_ended(error)


def test_the_guard_is_there_once() -> None:
    once = signal_handling._error_if_any_worker_fails
    run.watch_loaders()
    assert signal_handling._error_if_any_worker_fails is once
