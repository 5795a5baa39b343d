from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launcher.network import is_this_machine, meeting_address


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.3.2.1", "::1"])
def test_loopback_is_this_machine(host: str) -> None:
    assert is_this_machine(host)


def test_its_own_name_is_this_machine() -> None:
    assert is_this_machine(socket.gethostname())


@pytest.mark.parametrize("host", ["node17", "192.0.2.1", "2001:db8::1", "localhost.example"])
def test_others_are_not(host: str) -> None:
    assert not is_this_machine(host)


def test_the_hosts_file_counts_where_it_leads_to_an_own_address(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# a comment\n127.0.1.1 me me.example # me\n192.0.2.1 other\n\n")
    assert is_this_machine("Me.Example", hosts)
    assert not is_this_machine("other", hosts)
    assert not is_this_machine("comment", hosts)
    assert not is_this_machine("me", tmp_path / "missing")


def test_local_hosts_meet_on_loopback() -> None:
    assert meeting_address("127.0.0.2") == "127.0.0.2"
    assert meeting_address("localhost") == meeting_address(socket.gethostname()) == "127.0.0.1"
