"""What a worker makes of signals that announce its end; the signals are real ones."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from elastic_driver.words.wire_events import WorkerLeaving
from elastic_driver.worker.heartbeat.watches import ANNOUNCING, STOP_MARK, PreemptionWatch
from rendezvous.errors import RendezvousError, UnreachableError
from tests.support.job import eventually

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def dispositions() -> Iterator[None]:
    """Whatever a test leaves behind, the next one finds things as they were."""
    before = {number: signal.getsignal(number) for number in (*ANNOUNCING, STOP_MARK)}
    yield
    assert signal.set_wakeup_fd(-1) == -1
    left = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == before


@pytest.fixture
def signals() -> Iterator[PreemptionWatch]:
    made = PreemptionWatch("a.0.1", 60.0)
    yield made
    made.close()


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def test_signals_are_counted_once_whoever_writes_them_down(signals: PreemptionWatch) -> None:
    signals.listen()
    send(TERM, USR1)
    eventually(lambda: signals.count() == {TERM: 1, USR1: 1}, within=5, what="both")
    time.sleep(0)  # Python's own handler has run by now at the latest, and has written as well
    assert signals.count() == {TERM: 1, USR1: 1}
    send(TERM)
    eventually(lambda: signals.count()[TERM] == 2, within=5, what="the second one")


def test_a_script_may_have_more_than_1024_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    others = [os.dup(2) for _ in range(1024)]
    try:
        signals = PreemptionWatch("a.0.1", 60.0)
        assert signals.fileno() > 1024
        signals.wait(0.01)
        signals.wake()
        signals.wait(60.0)
        signals.close()
    finally:
        for descriptor in others:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_signals_are_given_back(signals: PreemptionWatch) -> None:
    signals.listen()
    assert signal.getsignal(TERM) is not signal.SIG_DFL
    signals.close()
    assert [signal.getsignal(n) for n in (*ANNOUNCING, STOP_MARK)] == [signal.SIG_DFL] * 4


def test_a_script_s_own_handler_stays_whenever_it_was_set(signals: PreemptionWatch) -> None:
    got: list[int] = []
    signal.signal(USR1, lambda number, _: got.append(number))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signals.listen()
    signal.signal(TERM, lambda number, _: got.append(number))
    send(USR1, TERM, signal.SIGUSR2)
    eventually(lambda: len(got) == 2, within=5, what="the script hears both")
    assert not signals.count()
    for number in ANNOUNCING:
        signal.signal(number, signal.SIG_DFL)


def test_an_event_loop_s_descriptor_stays_and_signals_are_heard_all_the_same(
    signals: PreemptionWatch,
) -> None:
    theirs, writes = socket.socketpair()
    with theirs, writes:
        writes.setblocking(False)
        signal.set_wakeup_fd(writes.fileno())
        signals.listen()
        send(TERM)
        eventually(lambda: signals.count()[TERM], within=5, what="the signal")
        assert theirs.recv(16) == bytes([TERM])
        signals.close()
        assert signal.set_wakeup_fd(-1) == writes.fileno()


def test_a_forked_child_dies_of_a_signal_as_ever_and_its_parent_hears_nothing(
    signals: PreemptionWatch,
) -> None:
    signals.listen()
    child = os.fork()
    if child == 0:
        signals.close()
        os.kill(os.getpid(), TERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == TERM
    assert not signals.count()


# ---- what follows ------------------------------------------------------------------------


class Ended(Exception):
    """In place of the end of the process."""


class Worker:
    """A watch whose driver answers `trouble`, and which ends nothing."""

    def __init__(self, notice: float) -> None:
        self.told: list[WorkerLeaving] = []
        self.trouble = ""
        self.preemption = PreemptionWatch("a.0.1", notice)
        self.preemption.end = self._end
        self.preemption.listen()

    def _end(self, number: signal.Signals) -> None:
        raise Ended(number)

    def tell(self, event: WorkerLeaving) -> None:
        self.told.append(event)
        if self.trouble:
            raise RendezvousError(self.trouble)

    def heed(self) -> float | None:
        return self.preemption.check(self.tell)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(notice=60.0)
    yield made
    made.preemption.close()


def test_the_driver_is_told_once_and_the_deadline_is_watched(worker: Worker) -> None:
    assert worker.heed() is None
    send(USR1)
    left = worker.heed()
    assert left is not None
    assert 50 < left <= 60
    send(USR1, signal.SIGUSR2)
    assert worker.heed() is not None
    assert worker.told == [WorkerLeaving("a.0.1", 60.0, "it got SIGUSR1")]


def test_who_is_still_there_when_time_is_up_ends_by_the_signal() -> None:
    worker = Worker(notice=0.01)
    try:
        send(USR1)
        assert worker.heed() is not None
        with pytest.raises(Ended, match=str(int(USR1))):
            eventually(lambda: worker.heed() is None, within=5, what="the end")
    finally:
        worker.preemption.close()


def test_who_cannot_tell_the_driver_ends_at_once(worker: Worker) -> None:
    worker.trouble = "the job is over"
    send(TERM)
    with pytest.raises(Ended):
        worker.heed()


def test_the_agent_s_own_sigterm_is_no_notice(worker: Worker) -> None:
    send(STOP_MARK, TERM)
    with pytest.raises(Ended):
        worker.heed()
    assert worker.told == []


def test_the_mark_may_come_late(worker: Worker) -> None:
    send(TERM)
    assert worker.heed() is not None
    send(STOP_MARK)
    with pytest.raises(Ended):
        worker.heed()


def test_the_mark_alone_means_nothing(worker: Worker) -> None:
    send(STOP_MARK)
    assert worker.heed() is None


@pytest.mark.parametrize("first", [TERM, USR1])
def test_a_repeated_notice_is_about_the_same_end(worker: Worker, first: signal.Signals) -> None:
    assert not worker.preemption.has_come
    send(first)
    assert worker.heed() is not None
    for number in (TERM, USR1, TERM):
        send(number)
        assert worker.heed() is not None
    assert len(worker.told) == 1
    assert worker.preemption.has_come


def test_without_a_grace_period_signals_are_left_alone() -> None:
    worker = Worker(notice=0.0)
    assert signal.getsignal(TERM) is signal.SIG_DFL
    worker.preemption.close()


STUCK = """
import ctypes, threading
from elastic_driver.worker.heartbeat.watches import PreemptionWatch
from rendezvous.errors import RendezvousError, UnreachableError
preemption = PreemptionWatch("a.0.1", 60.0)
preemption.listen()

def unreachable(event):
    raise RendezvousError("nobody is there")

def heart():
    while True:
        preemption.wait(60.0)
        preemption.check(unreachable)

threading.Thread(target=heart, daemon=True).start()
print("up", flush=True)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)  # for ever, in C: no handler of Python's ever runs
"""


@pytest.mark.parametrize("number", ANNOUNCING)
def test_it_ends_by_the_signal_though_its_main_thread_hears_nothing(
    number: signal.Signals,
) -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            process.send_signal(number)
            assert process.wait(20) == -number
        finally:
            process.kill()


# ---- no driver answers -------------------------------------------------------------------


def unreachable(_event: WorkerLeaving) -> None:
    raise UnreachableError("http://a:1", 1.0, "refused")


def test_who_may_leave_without_a_driver_tells_it_until_it_is_time_to_leave() -> None:
    asked: list[tuple[str, float]] = []

    def leave_alone(reason: str, left: float) -> bool:
        asked.append((reason, left))
        return len(asked) == 3

    signals = PreemptionWatch("a.0.1", 60.0, leave_alone)
    signals.listen()
    send(USR1)
    eventually(lambda: signals.count()[USR1], within=5, what="the signal")
    waits = [signals.check(unreachable) for _ in range(5)]
    assert [wait for wait in waits if wait is not None and wait < 1.0] == waits[:2]
    assert [reason for reason, _ in asked] == ["got SIGUSR1 while no driver answers"] * 3
    assert all(0 < left <= 60 for _, left in asked)
    signals.close()


def test_a_driver_that_answers_again_is_told() -> None:
    told: list[WorkerLeaving] = []
    signals = PreemptionWatch("a.0.1", 60.0, lambda _reason, _left: False)
    signals.listen()
    send(USR1)
    eventually(lambda: signals.count()[USR1], within=5, what="the signal")
    signals.check(unreachable)
    for _ in range(2):
        signals.check(told.append)
    (event,) = told
    assert 0 < event.deadline <= 60
    signals.close()
