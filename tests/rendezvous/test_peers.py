"""Who is at the other end: an address, and on this machine a user."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import pytest

from rendezvous.peers import Peers


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
            assert peer_of(accepted, name) == f"{host} (user {os.getuid()})"
            client.close()
            assert peer_of(accepted, name) == host, "it has closed, and is nobody's any more"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may be somebody else")
def test_another_user_is_another_client_also_behind_a_mapped_address() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        listener.settimeout(30)
        port = str(listener.getsockname()[1])
        argv = [sys.executable, "-c", _CONNECT, "127.0.0.1", port, "65534"]
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as other:
            accepted, name = listener.accept()
            with accepted:
                assert peer_of(accepted, name) == "127.0.0.1 (user 65534)"
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
