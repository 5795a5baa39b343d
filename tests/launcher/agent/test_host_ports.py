from __future__ import annotations

import socket
from pathlib import Path

from elastic_driver.contract import listening_ports, no_port_left, store_ports
from launcher.agent.host import first_free, free_ports


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


def test_a_range_has_ports_for_stores_and_others_for_what_listens_at_once() -> None:
    assert store_ports((29400, 29463)) == tuple(range(29400, 29416))
    assert listening_ports((29400, 29463)) == tuple(range(29463, 29415, -1))
    for count in range(2, 200):
        ports = (1000, 999 + count)
        every = {*store_ports(ports), *listening_ports(ports)}
        assert every == set(range(ports[0], ports[1] + 1))
        assert not set(store_ports(ports)) & set(listening_ports(ports))
    assert store_ports((5000, 5000)) == listening_ports((5000, 5000)) == (5000,)


def test_a_sentence_names_the_range_the_host_and_the_purpose() -> None:
    said = no_port_left((29400, 29402), "gloo", "node1")
    assert said.startswith("no port of --ports 29400-29402 is free on node1 for gloo;")


def test_free_ports_of_a_range_are_those_that_nobody_has() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = first_free(range(port - 2, port + 3), 5)
        assert port not in found
        assert len(found) <= 4
