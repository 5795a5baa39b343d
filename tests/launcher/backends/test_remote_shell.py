"""Hosts are asked before anything starts: a stand-in for ssh runs the commands on this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import version
from launcher.backends import remote_shell
from launcher.backends.remote_shell import Found, judge, precheck
from launcher.backends.shells import SshShell

GOOD = Found(version=version(), python="3.11", folder=True, temporary=True)


@pytest.fixture
def shell(tmp_path: Path) -> SshShell:
    """An ssh whose hosts are this machine, but for some that cannot be reached."""
    program = tmp_path / "ssh"
    program.write_text(_SSH.replace("{tries}", str(tmp_path / "tries")))
    program.chmod(0o755)
    return SshShell(program=str(program))


_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
echo a banner of some kind
case $2 in
busy) echo $$ >> {tries}; test $(wc -l < {tries}) -gt 2 && exec /bin/sh -c "$3"
    echo 'kex_exchange_identification: read: Connection reset by peer' >&2; exit 255 ;;
refused) echo 'ssh: connect to host refused port 22: Connection refused' >&2; exit 255 ;;
strange) echo elastic-login-over; echo 'elastic-look not json' ;;
mute) ;;
*) exec /bin/sh -c "$3" ;;
esac
"""


def test_fit_hosts_pass_and_the_others_are_told_one_line_each(
    shell: SshShell, tmp_path: Path
) -> None:
    hosts = ["good", "refused", "mute", "strange", "better"]
    problems = precheck(hosts, shell, str(tmp_path))
    assert list(problems) == ["refused", "mute", "strange"]
    assert "nothing listens on ssh's port" in problems["refused"]
    assert "ended with exit status 0 before our command" in problems["mute"]
    assert "its answer makes no sense" in problems["strange"]
    assert all(line.startswith(f"{host}: ") for host, line in problems.items())


def test_a_host_without_our_python_or_our_package_is_told(shell: SshShell, tmp_path: Path) -> None:
    missing = precheck(["a"], replace(shell, python="/no/such/python"), "/")
    assert missing == {
        "a": "a: there is no Python at /no/such/python; install the same environment there"
    }
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no site-packages
    bare.chmod(0o755)
    said = precheck(["a"], replace(shell, python=str(bare), home=tmp_path), "/")["a"]
    assert "No module named" in said
    assert "is elastic-driver installed there?" in said


def test_a_host_without_the_jobs_folder_is_told(shell: SshShell, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    assert "does not exist there" in precheck(["a"], shell, gone)["a"]


def test_a_missing_ssh_is_told() -> None:
    said = precheck(["a"], SshShell(program="/no/such/ssh"), "/")["a"]
    assert said == "a: cannot run /no/such/ssh: No such file or directory"


def test_another_version_is_told_with_both() -> None:
    said = judge("a", Found(version="0.9", python="3.11", folder=True, temporary=True), "/", "1.0")
    assert said == "a: elastic-driver 0.9 is installed there, and 1.0 here"
    assert judge("a", GOOD, "/", version()) is None


def test_a_gateway_that_lets_in_few_at_a_time_is_asked_again(
    shell: SshShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_shell, "LOOK_AGAIN_S", (0.1, 0.2))
    assert precheck(["busy"], shell, "/") == {}
    assert len((tmp_path / "tries").read_text().split()) == 3


def test_only_what_somebody_has_to_mend_is_a_refusal(shell: SshShell, tmp_path: Path) -> None:
    problems = precheck(["refused", "mute"], shell, "/")
    problems |= precheck(["good"], shell, str(tmp_path / "gone"))
    assert {host: type(problem).__name__ for host, problem in problems.items()} == {
        "refused": "UnreachableReason",
        "mute": "RefusedReason",
        "good": "RefusedReason",
    }
