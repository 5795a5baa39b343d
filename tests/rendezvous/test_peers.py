"""Who is at the other end: an address, and on this machine a user."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from rendezvous.fairness import Peers


def peer_of(connection: socket.socket, name: tuple[str, int]) -> str:
    with contextlib.closing(Peers()) as peers:
        found = peers.of(connection, name)
        assert peers.of(connection, name) == found, "asked again, it says the same"
        return found


_CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
with socket.socket() as client:
    client.connect((sys.argv[1], int(sys.argv[2])))
    sys.stdin.read()
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_client_of_this_machine_counts_with_its_user(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        client = socket.create_connection(listener.getsockname()[:2])
        accepted, name = listener.accept()
        with accepted:
            assert peer_of(accepted, name) == f"localhost (user {os.getuid()})"
            client.close()
            assert peer_of(accepted, name) == "localhost", "it has closed, and is nobody's now"


def own_address() -> str:
    """Return an address of this machine that is not loopback's, or that of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        try:
            unsent.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(unsent.getsockname()[0])


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.2", "127.255.3.4", own_address()])
def test_a_user_of_this_machine_is_one_client_from_whichever_address(source: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:  # noqa: S104 - as a driver with hosts
        port = listener.getsockname()[1]
        to = "127.0.0.1" if source.startswith("127.") else source
        with socket.create_connection((to, port), source_address=(source, 0)):
            accepted, name = listener.accept()
            with accepted:
                assert name[0] == source
                assert peer_of(accepted, name) == f"localhost (user {os.getuid()})"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may be somebody else")
def test_another_user_is_another_client_also_behind_a_mapped_address() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        listener.settimeout(30)
        port = str(listener.getsockname()[1])
        argv = [sys.executable, "-c", _CONNECT, "127.0.0.1", port, "65534"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as other:
            accepted, name = listener.accept()
            with accepted:
                assert peer_of(accepted, name) == "localhost (user 65534)"
            other.communicate()


@pytest.mark.parametrize(
    ("address", "peer"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_clients_of_other_machines_count_with_their_address(address: str, peer: str) -> None:
    with socket.socket() as connection:
        assert peer_of(connection, (address, 1)) == peer
