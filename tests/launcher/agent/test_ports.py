from __future__ import annotations

import socket
from pathlib import Path

from launcher.agent.ports import free_ports


def test_ports_lie_outside_the_ephemeral_range_and_can_be_bound(tmp_path: Path) -> None:
    file = tmp_path / "range"
    file.write_text("20000\t60000\n")
    ports = free_ports(8, file)
    assert len(set(ports)) == 8
    assert all(not 20000 <= port <= 60000 for port in ports)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_taken_port_is_not_offered(tmp_path: Path) -> None:
    file = tmp_path / "range"
    file.write_text("1024 65525")  # leaves ten
    free = free_ports(10, file)
    assert len(free) > 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free[0]))
        left = free_ports(10, file)
        assert free[0] not in left
        assert free[1] in left


def test_a_range_that_covers_everything_still_gives_ports(tmp_path: Path) -> None:
    file = tmp_path / "range"
    file.write_text("1024 65535")
    assert len(free_ports(4, file)) == 4
    assert len(free_ports(4, tmp_path / "missing")) == 4
