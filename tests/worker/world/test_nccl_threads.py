"""Threads that sleep in `poll()` are woken, as far as their sockets are the communicator's."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from elastic_driver.worker.world import nccl
from elastic_driver.worker.world.nccl import ProxyThreads


def sleepers() -> list[socket.socket]:
    """The sockets of a communicator's two threads, as NCCL makes them."""
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(f"\0nccl-socket-{os.getpid()}-{os.urandom(4).hex()}")
    return [socket.create_server(("127.0.0.1", 0)), datagrams]


@pytest.fixture
def sockets() -> Iterator[tuple[ProxyThreads, list[socket.socket], list[socket.socket]]]:
    """What was found; the communicator's sockets; those that others made before and after."""
    with ExitStack() as kept:
        others = [kept.enter_context(one) for one in sleepers()]
        threads = ProxyThreads()
        own = [kept.enter_context(one) for one in sleepers()]
        own += [kept.enter_context(one) for one in socket.socketpair(type=socket.SOCK_DGRAM)]
        threads.finish()
        others += [kept.enter_context(one) for one in sleepers()]
        yield threads, own, others


Sockets = tuple[ProxyThreads, list[socket.socket], list[socket.socket]]


def test_both_threads_of_a_communicator_wake_and_nobody_else(sockets: Sockets) -> None:
    threads, own, others = sockets
    ended = threading.Event()
    woken: list[bool] = []

    def sleep(one: socket.socket) -> None:
        for _ in range(2):  # the first look does not help the thread that serves TCP
            woken.append(bool(select.select([one], [], [], 10)[0]))
            accepted = one.accept()[0] if one.type == socket.SOCK_STREAM else None
            if accepted is not None:
                accepted.close()
            else:
                assert one.recv(1) == b""

    asleep = [threading.Thread(target=sleep, args=(one,)) for one in own[:2]]
    for thread in asleep:
        thread.start()
    waking = threading.Thread(target=threads.wake_until, args=(ended,))
    waking.start()
    for thread in asleep:
        thread.join(10)
    ended.set()
    waking.join(10)
    assert woken == [True] * 4
    assert select.select(others, [], [], 0)[0] == []


def test_no_descriptor_stays_that_nccl_has_forgotten(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, own, _ = sockets
    monkeypatch.setattr(nccl, "AT_MOST", 2)
    ended = threading.Event()
    waking = threading.Thread(target=threads.wake_until, args=(ended,))
    waking.start()
    forgotten = [own[0].accept()[0].detach() for _ in range(2)]
    with socket.create_connection(own[0].getsockname()) as other, own[0].accept()[0] as kept:
        ended.set()
        waking.join(10)
        for descriptor in forgotten:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(descriptor)
        other.sendall(b"x")
        assert kept.recv(1) == b"x", "a connection that is none of our calls stays"


def test_a_socket_that_was_closed_is_not_called(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, own, _ = sockets
    address = own[0].getsockname()
    own[0].close()
    monkeypatch.setattr(nccl, "AT_MOST", 2)
    with socket.create_server(address) as another:  # which has got its number
        ended = threading.Event()
        threading.Timer(0.2, ended.set).start()
        threads.wake_until(ended)
        assert select.select([another], [], [], 0)[0] == []
