"""Where a rendezvous listens, by the routing table of the machine the tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import ClusterError, UsageError
from launcher.backends.ssh import SshOptions, SshReach
from launcher.submit import bind_address
from launcher.submit.bind_address import Whereabouts, decide_whereabouts

SSH = SshReach(SshOptions())


def test_without_remote_hosts_the_rendezvous_stays_where_it_was_asked_for() -> None:
    assert decide_whereabouts("127.0.0.1", [], (), SSH).bind_host == "127.0.0.1"
    assert decide_whereabouts("0.0.0.0", ["node1"], (), SSH).bind_host == "0.0.0.0"  # noqa: S104


def test_loopback_gives_way_to_the_address_that_the_hosts_reach(tmp_path: Path) -> None:
    options = fake_ssh(tmp_path, {"a": "127.0.0.5", "b": "127.0.0.6"})
    where = decide_whereabouts("127.0.0.1", ["a", "b"], (), options)
    assert where.bind_host == "127.0.0.1", "the address that both reach"
    assert where.endpoint_for("http://127.0.0.1:7", "localhost") == "http://127.0.0.1:7"


def test_a_host_that_there_is_no_way_to_does_not_keep_the_others_from_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bind_address, "SOMEWHERE", "no-default-route.invalid")
    options = fake_ssh(tmp_path, {"a": "::1", "gone": "gone.invalid"})
    assert decide_whereabouts("127.0.0.1", ["gone", "a"], (), options).bind_host == "::1"
    assert decide_whereabouts("127.0.0.1", ["gone"], (), options).bind_host == "127.0.0.1"


def test_an_interface_that_is_not_here_is_told_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"none of nosuch0 has an address here; there are .*lo"):
        decide_whereabouts("127.0.0.1", ["a"], ("nosuch0",), SSH)


def test_a_remote_host_cannot_use_a_rendezvous_on_loopback() -> None:
    with pytest.raises(ClusterError, match="--rdzv-endpoint"):
        Whereabouts("127.0.0.1", SSH).endpoint_for("http://127.0.0.1:7", "node.invalid")


def test_a_wildcard_is_told_to_each_host_as_the_address_it_reaches(tmp_path: Path) -> None:
    options = fake_ssh(tmp_path, {"four": "127.0.0.9", "six": "::1"})
    where = Whereabouts("::", options)
    assert where.endpoint_for("http://[::1]:7", "four") == "http://127.0.0.1:7"
    assert where.endpoint_for("http://[::1]:7", "six") == "http://[::1]:7"


def fake_ssh(folder: Path, names: dict[str, str]) -> SshReach:
    """An ssh whose configuration has these host names."""
    cases = "".join(f"{host}) echo hostname {address} ;;\n" for host, address in names.items())
    program = folder / "ssh"
    program.write_text(f"#!/bin/sh\ncase $3 in\n{cases}esac\n")
    program.chmod(0o755)
    return SshReach(SshOptions(program=str(program)))
