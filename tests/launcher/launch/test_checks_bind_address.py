"""Where a rendezvous listens, by the routing table of the machine the tests run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_driver.errors import ClusterError
from elastic_driver.runtime.backend import BackendJob
from launcher import network
from launcher.backends.shells import SshShell
from launcher.launch.checks import bind_again, choose_bind_host
from launcher.network import endpoint_for
from rendezvous.client_connections import is_loopback

SSH = SshShell()


def choose(
    bind: str, hosts: list[str], shell: SshShell = SSH, interfaces: tuple[str, ...] = ()
) -> str:
    return choose_bind_host(bind, tuple((h, 1) for h in hosts), interfaces, shell.look_up)


def test_without_remote_hosts_the_rendezvous_stays_where_it_was_asked_for() -> None:
    assert choose("127.0.0.1", []) == "127.0.0.1"
    assert choose("127.0.0.1", ["localhost"]) == "127.0.0.1"
    assert choose("0.0.0.0", ["node1"]) == "0.0.0.0"  # noqa: S104


def test_loopback_gives_way_to_the_address_that_the_hosts_reach(tmp_path: Path) -> None:
    ssh = fake_ssh(tmp_path, {"a": "127.0.0.5", "b": "127.0.0.6"})
    bound = choose("127.0.0.1", ["a", "b"], ssh)
    assert bound == "127.0.0.1", "the address that both reach"
    assert endpoint_for("localhost", "http://127.0.0.1:7", bound, ssh.look_up) == (
        "http://127.0.0.1:7"
    )


def test_a_host_that_there_is_no_way_to_does_not_keep_the_others_from_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SOMEWHERE", "no-default-route.invalid")
    ssh = fake_ssh(tmp_path, {"a": "::1", "gone": "gone.invalid"})
    assert choose("127.0.0.1", ["gone", "a"], ssh) == "::1"


def test_a_rendezvous_on_loopback_for_other_hosts_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SOMEWHERE", "no-default-route.invalid")
    ssh = fake_ssh(tmp_path, {"gone": "gone.invalid", "far": "far.invalid"})
    with pytest.raises(ClusterError, match=r"no way to gone, far: .*--rdzv-endpoint"):
        choose("127.0.0.1", ["gone", "far"], ssh)


def test_interfaces_are_those_of_the_hosts_and_need_not_be_here(tmp_path: Path) -> None:
    ssh = fake_ssh(tmp_path, {"a": "127.0.0.5"})
    assert choose("127.0.0.1", ["a"], ssh, interfaces=("nosuch0",)) == "127.0.0.1"
    assert choose("127.0.0.1", ["a"], ssh, interfaces=("nosuch0", "lo")) == "127.0.0.1"


def test_a_remote_host_cannot_use_a_rendezvous_on_loopback() -> None:
    with pytest.raises(ClusterError, match="--rdzv-endpoint"):
        endpoint_for("node.invalid", "http://127.0.0.1:7", "127.0.0.1", SSH.look_up)


def test_before_the_rendezvous_has_an_address_its_url_is_left_as_it_is() -> None:
    url = BackendJob().endpoint
    assert endpoint_for("node.invalid", url, None, SSH.look_up) == url


def test_a_wildcard_is_told_to_each_host_as_the_address_it_reaches(tmp_path: Path) -> None:
    ssh = fake_ssh(tmp_path, {"four": "127.0.0.9", "six": "::1"})
    assert endpoint_for("four", "http://[::1]:7", "::", ssh.look_up) == "http://127.0.0.1:7"
    assert endpoint_for("six", "http://[::1]:7", "::", ssh.look_up) == "http://[::1]:7"


def fake_ssh(folder: Path, names: dict[str, str]) -> SshShell:
    """An ssh whose configuration has these host names."""
    cases = "".join(f"{host}) echo hostname {address} ;;\n" for host, address in names.items())
    program = folder / "ssh"
    program.write_text(f"#!/bin/sh\nfor host; do :; done\ncase $host in\n{cases}esac\n")
    program.chmod(0o755)
    return SshShell(program=str(program))


@pytest.mark.parametrize(
    ("chosen", "url", "bound"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "http://127.0.0.1:7", "127.0.0.1"),
        ("127.0.0.1", "http://127.0.0.9:7", "127.0.0.1"),
        ("0.0.0.0", "http://127.0.0.1:7", "0.0.0.0"),  # noqa: S104
        ("10.0.0.1", "http://127.0.0.1:7", "0.0.0.0"),  # noqa: S104 - it was a wildcard
        ("fd99::1", "http://[::1]:7", "::"),
        ("10.0.0.1", "http://192.0.2.1:7", "10.0.0.1"),  # it was another machine
    ],
)
def test_the_next_driver_listens_where_agents_look_for_it(
    chosen: str, url: str, bound: str
) -> None:
    assert bind_again(chosen, url) == bound


def test_the_next_driver_keeps_the_address_for_hosts_that_it_no_longer_has() -> None:
    own = network.default_address()
    if own is None or is_loopback(own):
        pytest.skip("this machine has no address but loopback")
    assert bind_again("127.0.0.1", f"http://{network.bracketed(own)}:7") == own
