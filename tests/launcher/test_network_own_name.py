"""The name of a machine, and what tells machines of the same name apart."""

from __future__ import annotations

import pytest

from launcher import network
from launcher.network import machine_id, own_name


@pytest.mark.parametrize(
    ("hostname", "name"),
    [("n1.lan", "n1.lan"), ("a b/c", "a-b-c"), ("_x", "x"), ("", "node")],
)
def test_a_machines_name_becomes_one_that_is_fit_for_a_host(
    monkeypatch: pytest.MonkeyPatch, hostname: str, name: str
) -> None:
    monkeypatch.setattr(network.socket, "gethostname", lambda: hostname)
    assert own_name() == name


def test_a_machine_has_an_identity() -> None:
    assert 0 < len(machine_id()) <= 64
    assert machine_id() == machine_id()
