"""Login files that print, ask, leave and replace the shell; real shells, and a stand-in for ssh."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_driver.runtime.backend import BackendJob
from elastic_driver.words.wire_events import AgentReady
from launcher.agent import remote as marks
from launcher.backends import remote_shell
from launcher.backends import remote_shell as client
from launcher.backends.remote_agents import RemoteBackend
from launcher.backends.remote_shell import Login, describe_login, in_its_words, precheck
from launcher.backends.shells import SshShell
from tests.launcher.agent.harness import HOST, ROOT, WAIT, Driver, eventually

# A login shell reads its login file before the command; only what it reads then differs by shell.
FILES = {"bash": "bashrc", "zsh": ".zshenv", "tcsh": ".tcshrc", "fish": "fish/config.fish"}
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
home={homes}/$2
HOME=$home ZDOTDIR=$home XDG_CONFIG_HOME=$home BASH_ENV=$home/bashrc TMPDIR=$home
export HOME ZDOTDIR XDG_CONFIG_HOME BASH_ENV TMPDIR
env "$(cat $home/shell)" -c "$3"
status=$?
test ! -e $home/held || exec sleep 60
exit $status
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login file that waits for input gets it after a moment."""
    monkeypatch.setattr(client, "EMPTY_AFTER_S", 0.3)
    monkeypatch.setattr(remote_shell, "END_STDIN_S", 2.5)


@pytest.fixture
def homes(tmp_path: Path) -> Path:
    """The folder of the homes on all hosts."""
    return tmp_path / "homes"


@pytest.fixture
def shell(homes: Path) -> SshShell:
    """An ssh whose hosts are this machine, each with the login that `login` has written."""
    program = homes.parent / "ssh"
    program.write_text(SSH.format(homes=homes))
    program.chmod(0o755)
    return SshShell(program=str(program), home=ROOT)


def login(homes: Path, host: str, shell: str, text: str) -> Path:
    """Give a host this login shell with this login file; return the home there."""
    home = homes / host
    (home / "fish").mkdir(parents=True)
    (home / "shell").write_text(shell)
    (home / FILES[shell]).write_text(text.format(home=home) + "\n")
    return home


def logins(homes: Path, cases: list[tuple[str, ...]]) -> list[str]:
    """Give each case, of a shell that is installed, a host; return the hosts."""
    made = {f"host{n}": case for n, case in enumerate(cases) if shutil.which(case[0])}
    for host, case in made.items():
        login(homes, host, *case[:2])
    return list(made)


RUNS: list[tuple[str, ...]] = [
    ("bash", r"printf '\033]0;title\007'"),
    ("bash", "head -c 300000 /dev/zero | tr '\\0' x"),
    ("bash", "printf elastic-login-over; printf elastic-login-ove"),
    ("bash", 'echo "$BASH_EXECUTION_STRING"; set -x'),
    ("bash", "read x; read y"),
    ("bash", "cd /var; unset PATH; umask 077; trap 'echo bye' EXIT"),
    ("bash", "exec > >(tee -a $HOME/log)"),
    ("bash", "module load cuda/12; conda activate base; stty -ixon; export LD_LIBRARY_PATH=/opt"),
    ("bash", "(for i in 1 2 3 4 5 6; do sleep 0.2; printf noise; done) &"),
    ("zsh", r"print -n '\e]0;title\a'; read x"),
    ("zsh", "cd() {{ builtin cd $1; ls }}; alias exec='builtin exec'"),
    ("tcsh", 'printf title; set x = "$<"'),
    ("fish", "printf title; read x"),
]
LINES: list[tuple[str, ...]] = [
    ("bash", "cat > /dev/null", "read stdin to its end"),
    ("bash", "while read x; do :; done", "read stdin to its end"),
    ("bash", "exit", "ended with exit status 0 before our command; if its login files"),
    ("bash", "echo 'until 5 pm'; exit 3", 'exit status 3 before our command and said "until 5 pm"'),
    ("bash", "exec ls /nosuch", "No such file or directory"),
    ("bash", "exec nosuchshell", "exec: nosuchshell: not found"),
    ("bash", "exec sh", "was replaced by a program that read stdin, and ended with exit status 0"),
    ("bash", "exec > $HOME/log 2>&1", "send stdout elsewhere"),
    ("bash", "export PYTHONHOME=/opt/other", "is PYTHONHOME set in its login files"),
    ("zsh", "exit 2", "ended with exit status 2 before our command"),
    ("zsh", "exec sh", "was replaced by a program that read stdin"),
    ("tcsh", "exec sh", "was replaced by a program that read stdin"),
    ("fish", "exec sh", "was replaced by a program that read stdin"),
]


def test_a_login_file_may_print_and_ask(shell: SshShell, homes: Path) -> None:
    assert precheck(logins(homes, RUNS), shell, "/") == {}


def test_a_login_that_does_not_reach_our_command_is_named_in_one_line(
    shell: SshShell, homes: Path
) -> None:
    hosts = logins(homes, LINES)
    problems = precheck(hosts, shell, "/")
    assert list(problems) == hosts
    for host, problem in problems.items():
        assert LINES[int(host.removeprefix("host"))][2] in problem
        assert problem.startswith(f"{host}: ")
        assert "\n" not in problem


def test_what_a_login_file_leaves_behind_holds_nothing_up(shell: SshShell, homes: Path) -> None:
    home = login(homes, "a", "bash", "sleep 100 &")
    (home / "held").touch()  # ssh stays as long as such a process holds its streams
    assert precheck(["a"], shell, "/") == {}


# ---- an agent ----------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    driver.python(WAIT)
    yield driver
    driver.close()


@pytest.fixture
def backend(driver: Driver, shell: SshShell) -> Iterator[RemoteBackend]:
    job = BackendJob(endpoint=driver.server.url, token_file=driver.token_file)
    backend = RemoteBackend(job, shell)
    yield backend
    backend.close(0)


def test_an_agent_starts_behind_a_login_file_that_asks_and_its_end_is_told_at_once(
    driver: Driver, backend: RemoteBackend, homes: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = 'read x; echo "$x" > {home}/answer; printf "welcome "; sleep 100 &'
    home = login(homes, HOST, "bash", text)
    (home / "held").touch()
    reasons: list[str] = []
    backend.start(HOST, 1, reasons.append)
    driver.wait(AgentReady, within=20)
    driver.shutdown()
    eventually(lambda: reasons)
    assert reasons == [f"the agent on {HOST} has ended"]
    assert (home / "answer").read_text() == "\n", "and no token"
    backend.close(0)
    said = capfd.readouterr()
    assert "welcome" not in said.out
    assert f"{HOST}: its login files (such as ~/.bashrc) read stdin" in said.err


@pytest.mark.parametrize(("text", "line"), [
    ("tee {home}/seen > /dev/null", "read stdin to its end"),
    ("exec tee {home}/seen", "was replaced by a program that read stdin"),
])  # fmt: skip
def test_a_login_file_that_reads_everything_never_sees_the_token(
    driver: Driver,
    backend: RemoteBackend,
    homes: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    line: str,
) -> None:
    monkeypatch.setattr("launcher.backends.remote_agents.END_STDIN_BEFORE_S", 57.0)
    home = login(homes, HOST, "bash", text)
    reasons: list[str] = []
    backend.start(HOST, 1, reasons.append)
    eventually(lambda: reasons, within=20)
    assert line in reasons[0]
    assert (home / "seen").read_text().strip("\n") == ""


# ---- pure --------------------------------------------------------------------------------


def test_marks_count_wherever_they_stand() -> None:
    assert marks.after_login(b"\x1b]0;x\x07elastic-login-over\nnext") == (b"\x1b]0;x\x07", b"next")
    assert marks.after_login(b"elastic-login-over") is None, "its newline is to come"
    assert marks.after_login(b"elastic-login-overelastic-login-over\r\n") is not None
    assert marks.up_in(b"noiseelastic-agent-up cafe 2", "cafe") == 2
    assert marks.up_in(b"elastic-agent-up cafe", "cafe") == 0
    assert marks.up_in(b"elastic-agent-up cafeteria 2", "cafe") is None
    assert marks.done_in(b"[0]<stdout>:elastic-done look 1", "cafe") is None
    assert marks.done_in(b"noiseelastic-done cafe 75", "cafe") == (b"noise", 75)


def test_no_mark_stands_in_the_command_that_a_shell_may_show() -> None:
    command = SshShell().argv("a", "look", "/")[-1].encode()
    assert marks.after_login(command + b"\n") is None
    assert marks.LOOKED.encode() not in command


def test_words_of_a_program_are_shown_without_frames_and_asides() -> None:
    said = "Warning: Permanently added 'n'\n-----\nAn error.\n\nIt says why.\n-----\n"
    assert in_its_words(said) == "An error. / It says why."
    assert in_its_words("stty: not a terminal") == "stty: not a terminal", "better than nothing"
    assert in_its_words("\n") == ""
    long = "ssh: Connection refused\nORTE\nwas not\nable to\n"
    assert in_its_words(long, "refused") == "ssh: Connection refused"
    assert in_its_words(long, "was not") == "ORTE / was not / able to"


def test_an_account_that_may_not_log_in_is_no_matter_of_login_files() -> None:
    said = Login(said=b"This account is currently not available.\n")
    assert describe_login("a", 1, "", said) == (
        "a: its login shell ended with exit status 1 before our command and said "
        '"This account is currently not available."; this account has no login shell there '
        "(nologin)"
    )


def test_stdout_of_another_kind_than_ssh_gives_is_not_heard(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "launcher.agent.remote", "look", "/"]
    with (tmp_path / "said").open("wb") as said:
        done = subprocess.run(argv, cwd=ROOT, stdout=said, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == marks.NO_STDOUT
