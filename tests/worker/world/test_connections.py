"""Real connections: which are taken for a group's, and how they end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from elastic_driver.worker.world.gloo import GroupConnections


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(listener.getsockname(), timeout=5)
    theirs, _ = listener.accept()
    theirs.settimeout(5)
    return ours, theirs


def test_only_connections_made_meanwhile_and_not_to_the_rendezvous_count(
    listener: socket.socket,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as rendezvous:
        before, before_too = connect(listener)
        made = GroupConnections(exclude_port=rendezvous.getsockname()[1])
        pair = connect(listener)
        kept_open, _kept = connect(rendezvous)
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.finish(9)
        # Both ends of the pair are in this process; of the other one only the server's end is
        # not a connection *to* the rendezvous.
        assert len(made.held) == 3
        made.close()
        for end in (before, before_too, *pair, kept_open, _kept, udp):
            end.close()


@pytest.mark.parametrize("peers", [1, None])
def test_a_connection_of_the_script_s_own_is_left_alone(
    listener: socket.socket, peers: int | None
) -> None:
    """A thread opens one to a database while the group forms; gloo's are of no Python object."""
    made = GroupConnections()
    ours, database = connect(listener)
    gloos = [each.detach() for each in connect(listener)]
    try:
        made.finish(peers)
        assert {os.fstat(each.fileno()).st_ino for each in made.held} == {
            os.fstat(number).st_ino for number in gloos
        }
        made.shut_reads()
        database.send(b"still here")
        assert ours.recv(100) == b"still here"
    finally:
        made.close()
        for each in (ours, database):
            each.close()
        for number in gloos:
            os.close(number)


def held(listener: socket.socket) -> tuple[GroupConnections, socket.socket, socket.socket]:
    """A connection to the listener, held: (held, our end, their end)."""
    made = GroupConnections()
    ours = socket.create_connection(listener.getsockname(), timeout=5)
    made.finish(1)
    theirs, _ = listener.accept()
    theirs.settimeout(5)
    assert len(made.held) == 1
    return made, ours, theirs


def test_who_stops_hearing_reads_the_end_and_the_peer_can_still_send(
    listener: socket.socket,
) -> None:
    made, ours, theirs = held(listener)
    made.shut_reads()
    assert ours.recv(1) == b""
    ours.close()
    for _ in range(3):
        theirs.sendall(b"late")  # no reset, though nobody reads it
    made.close()
    theirs.close()


def test_who_hangs_up_is_heard_after_what_it_has_sent(listener: socket.socket) -> None:
    made, ours, theirs = held(listener)
    ours.sendall(b"last")
    made.shut_writes()
    ours.close()
    assert theirs.recv(10) == b"last"
    assert theirs.recv(10) == b""
    for _ in range(3):
        theirs.sendall(b"late")  # no reset: the connection is open until close()
    made.close()
    theirs.close()


def test_a_forked_child_lets_go_of_the_connections(listener: socket.socket) -> None:
    made = GroupConnections()
    ours = socket.create_connection(listener.getsockname(), timeout=5)
    made.finish(1)
    theirs, _ = listener.accept()
    theirs.settimeout(5)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        made.close_in_child()
        os.close(write)
        os.read(read, 1)  # lives until the test is over
        os._exit(0)
    os.close(read)
    try:
        # Say hello only after the child had its turn: it cannot keep the connection open then.
        made.close()
        ours.close()
        assert theirs.recv(1) == b"", "the parent's end is the end, though the child lives"
    finally:
        os.close(write)
        os.waitpid(child, 0)
        theirs.close()
