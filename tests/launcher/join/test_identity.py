"""Names of nodes: one for each that lives, and the same again for one that comes back."""

from __future__ import annotations

import pytest

from launcher.join import identity
from launcher.join.identity import claim_name, claim_port, machine_id, own_name


def test_nodes_of_one_machine_have_different_names_and_free_them() -> None:
    with claim_name("here:1") as first, claim_name("here:1") as second:
        assert (first, second) == (own_name(), f"{own_name()}-2")
        with claim_name("elsewhere:1") as other:
            assert other == own_name()
    with claim_name("here:1") as again:
        assert again == own_name()


@pytest.mark.parametrize(
    ("hostname", "name"),
    [("n1.lan", "n1.lan"), ("a b/c", "a-b-c"), ("_x", "x"), ("", "node")],
)
def test_a_machines_name_becomes_one_that_is_fit_for_a_host(
    monkeypatch: pytest.MonkeyPatch, hostname: str, name: str
) -> None:
    monkeypatch.setattr(identity.socket, "gethostname", lambda: hostname)
    assert own_name() == name


def test_one_process_at_a_time_serves_at_a_port() -> None:
    with claim_port(70001) as first, claim_port(70001) as second, claim_port(70002) as other:
        assert (first, second, other) == (True, False, True)
    with claim_port(70001) as again:
        assert again


def test_a_machine_has_an_identity() -> None:
    assert 0 < len(machine_id()) <= 64
    assert machine_id() == machine_id()
