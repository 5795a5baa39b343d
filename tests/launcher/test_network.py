"""Addresses and interfaces, by the routing table of the machine the tests run on."""

from __future__ import annotations

import psutil

from launcher import network
from rendezvous.client_connections import is_loopback


def test_loopback_leads_to_loopback_and_is_no_interface_for_others() -> None:
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") is None
    assert network.meeting_point("http://127.0.0.1:80", ["nosuch0"]) == ("127.0.0.1", None)


def test_a_name_without_an_address_leads_nowhere() -> None:
    assert network.address_towards("nothing.invalid") is None


def test_the_first_interface_that_is_here_counts() -> None:
    assert network.address_of(["nosuch0", "lo"]) == ("127.0.0.1", "lo")
    assert network.address_of(["nosuch0"]) is None


def test_each_address_of_this_machine_is_found_on_its_interface() -> None:
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family.name == "AF_INET" and not is_loopback(entry.address):
                assert network.interface_of(entry.address) == name
