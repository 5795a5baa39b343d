"""What is typed to reach a host: compared word by word, and run by real shells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_driver.errors import ClusterError
from elastic_driver.runtime.backend import BackendJob
from launcher.backends.remote_agents import RemoteBackend
from launcher.backends.remote_shell import Login
from launcher.backends.shells import SshShell

MARK = "elastic-login-over\n"
PLAIN = SshShell(alive_interval=2, python="/py")


def on_host(**changes: object) -> str:
    """What the login shell there is given."""
    return replace(PLAIN, **changes).argv("n", "look", "/")[-1]  # type: ignore[arg-type]


def test_the_command_line_asks_nothing_and_has_deadlines() -> None:
    assert PLAIN.command("node1", "true") == (
        *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
        *("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3"),
        *("-o", "ClearAllForwardings=yes", "-o", "ControlMaster=no", "--", "node1"),
        "exec /bin/sh -c true",
    )


def test_port_and_key_are_passed_on() -> None:
    argv = SshShell(port=2222, identity_file="/k e y").command("2001:db8::7", "true")
    assert argv[-7:] == ("-p", "2222", "-i", "/k e y", "--", "2001:db8::7", "exec /bin/sh -c true")


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a;b", "", "a\nb", "$(x)"])
def test_a_name_that_is_none_never_reaches_ssh(name: str) -> None:
    with pytest.raises(ClusterError, match="cannot reach"):
        PLAIN.argv(name, "look", "/")


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "csh", "fish"])
def test_words_reach_the_agent_unchanged_whatever_the_login_shell(
    shell: str, tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    echo = tmp_path / "an 'echo'"
    echo.write_text(f"#!/bin/sh\nshift 2\nexec {sys.executable} -c '{_SHOW}' \"$@\"\n")
    echo.chmod(0o755)
    words = ("keep", "a b", "it's", '"$HOME"', "*", "é;#")
    command = replace(PLAIN, python=str(echo), home=tmp_path).argv("n", *words)[-1]
    done = subprocess.run([shell, "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == f"{MARK}{[str(tmp_path), *words]}\n", done.stderr


_SHOW = "import os, sys; print([os.getcwd(), *sys.argv[1:]])"


def test_a_host_without_our_folder_runs_in_the_root_folder_instead(tmp_path: Path) -> None:
    where = tmp_path / "where"
    where.write_text("#!/bin/sh\npwd\n")
    where.chmod(0o755)
    command = on_host(python=str(where), home=tmp_path / "missing")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == f"{MARK}/\n", done.stderr


def test_a_missing_python_is_told_with_its_path() -> None:
    command = on_host(python="/no/python", home=Path("/"))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert "no Python at /no/python" in done.stderr
    shell = replace(PLAIN, python="/no/python")
    said = shell.explain("node1", done.returncode, done.stderr, Login(reached=True))
    assert said == "node1: there is no Python at /no/python; install the same environment there"


CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
Offending ED25519 key in /home/user/.ssh/known_hosts:3
Host key for n has changed and you have requested strict checking.
Host key verification failed.
"""
PAM = """\
Access denied by pam_slurm_adopt: you have no active jobs on this node
Connection closed by 10.0.0.2 port 22
"""


@pytest.mark.parametrize(
    ("said", "words", "meaning"),
    [
        (refused := "ssh: connect to host n port 22: Connection refused", refused, "check sshd"),
        (late := "ssh: connect to host n port 22: Connection timed out", late, "is it up"),
        (no_way := "ssh: connect to host n port 22: No route to host", no_way, "it is down"),
        (none := "ssh: Could not resolve hostname n: unknown", none, "has no address"),
        (denied := "root@n: Permission denied (publickey).", denied, "takes none of your keys"),
        (CHANGED, "known_hosts:3 / Host key for n has changed", "its key is not the known one"),
        (PAM, "pam_slurm_adopt: you have no active jobs on this node", "does not let you in"),
        ("Warning: Permanently added 'n'.\nsomething else", "n: something else;", "ssh n true"),
        ("", "ssh failed and said nothing", "ssh n true"),
    ],
)
def test_ssh_is_heard_in_its_own_words_before_what_we_make_of_them(
    said: str, words: str, meaning: str
) -> None:
    line = PLAIN.explain("n", 255, said, Login())
    assert line.startswith("n: ")
    assert words in line
    assert meaning in line[line.index(words) + len(words) - 1 :]
    assert "\n" not in line
    assert "@@" not in line


def test_a_silent_connection_is_given_up_after_the_heartbeat_timeout() -> None:
    assert [
        SshShell.of(BackendJob(heartbeat_timeout=timeout)).alive_interval
        for timeout in (0.5, 3.0, 30.0)
    ] == [1, 1, 10]


def test_the_plan_of_an_agent_holds_no_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    backend = RemoteBackend(BackendJob(endpoint="http://10.0.0.1:7", token_file=token), PLAIN)
    plan = backend.plan("node1", 3, "cafe")
    assert plan.env == {}
    assert "secret" not in " ".join(plan.argv)
    assert str(token) not in " ".join(plan.argv)
    assert (
        "exec /py -m launcher.agent.remote keep cafe --endpoint http://10.0.0.1:7 "
        "--host node1 --incarnation 3"
    ) in plan.argv[-1]


@pytest.mark.parametrize(
    ("said", "gone"),
    [
        ("ssh: connect to host n port 22: Connection refused", True),
        ("ssh: connect to host n port 22: No route to host", True),
        ("Connection timed out during banner exchange", True),
        ("ssh: Could not resolve hostname n: Name or service not known", True),
        ("kex_exchange_identification: read: Connection reset by peer", True),
        ("root@n: Permission denied (publickey).\nConnection closed by n", False),
        ("Host key verification failed.", False),
        (PAM, False),
        ("", False),
    ],
)
def test_only_a_host_that_ssh_could_not_reach_is_unreachable(said: str, gone: bool) -> None:
    assert PLAIN.unreachable(255, said) is gone
    assert not PLAIN.unreachable(1, said)


def test_a_host_is_probed_where_sshs_configuration_says(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host near\n HostName 10.1.2.3\n Port 2022\n"
        "Host far\n ProxyJump gate\nHost farther\n ProxyCommand nc %h %p\n"
    )
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    ssh.chmod(0o755)
    shell = replace(PLAIN, program=str(ssh))
    assert shell.probe_address("near") == ("10.1.2.3", 2022)
    assert shell.probe_address("2001:db8::7") == ("2001:db8::7", 22)
    assert replace(shell, port=2222).probe_address("plain") == ("plain", 2222)
    assert shell.probe_address("far") is None
    assert shell.probe_address("farther") is None
    assert replace(PLAIN, program="/no/ssh").probe_address("near") is None
