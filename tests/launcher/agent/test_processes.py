from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.agent.processes import (
    ProcessSpec,
    StartError,
    become_subreaper,
    children,
    kill_child,
    reap_strangers,
    start_fresh,
)


def run(*argv: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[str, int]:
    """Start a process, wait for it as the agent does; its output and exit status."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        spec = ProcessSpec(argv, env or dict(os.environ), str(cwd), write, write)
        pid = start_fresh(spec)
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    with os.fdopen(read) as output:
        text = output.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_it_is_our_child_in_a_session_of_its_own_with_no_stdin(tmp_path: Path) -> None:
    script = (
        "import os, sys; print(os.getppid(), os.getsid(0) == os.getpgid(0) == os.getpid(), "
        "repr(sys.stdin.read()), os.getcwd())"
    )
    text, code = run(sys.executable, "-c", script, cwd=tmp_path)
    assert (text.split(), code) == ([str(os.getpid()), "True", "''", str(tmp_path)], 0)


def test_children_of_strangers_are_reaped_and_our_own_are_left_to_their_owner() -> None:
    daemon = "setsid sh -c 'sleep 300 >/dev/null & echo $!'"  # its parent ends at once
    become_subreaper()
    try:
        with subprocess.Popen(["true"]) as own, subprocess.Popen(["true"], start_new_session=True):
            made = subprocess.run(["sh", "-c", daemon], stdout=subprocess.PIPE, check=True)
            stray = int(made.stdout)
            assert stray in children()
            os.kill(stray, signal.SIGKILL)
            deadline = time.monotonic() + 30.0
            while stray in children() and time.monotonic() < deadline:
                reap_strangers()
            assert stray not in children()
            assert own.wait(30) == 0
            reap_strangers()
            assert own.pid not in children()
    finally:
        become_subreaper(False)


def test_a_child_that_was_reaped_is_not_killed_again() -> None:
    process = subprocess.Popen(["sleep", "300"])
    kill_child(process.pid)
    assert process.wait(30) == -signal.SIGKILL
    kill_child(process.pid)
    kill_child(os.getppid())  # no child of ours


def test_it_inherits_no_other_descriptor(tmp_path: Path) -> None:
    text, _ = run("ls", "/proc/self/fd", cwd=tmp_path)
    assert text.split() == ["0", "1", "2", "3"]  # 3 is the listing itself


def test_the_command_is_looked_up_in_the_workers_path(tmp_path: Path) -> None:
    tool = tmp_path / "my-tool"
    tool.write_text("#!/bin/sh\necho found\n")
    tool.chmod(0o755)
    assert run("my-tool", cwd=tmp_path, env={"PATH": str(tmp_path)}) == ("found\n", 0)


def test_a_script_whose_interpreter_is_missing_is_named_as_such(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/no/such/python\n")
    tool.chmod(0o755)
    with pytest.raises(StartError, match="interpreter") as caught:
        run(str(tool), cwd=tmp_path)
    assert caught.value.exit_code == 127


def test_a_nul_in_an_argument_is_a_start_error_and_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(StartError) as caught:
        run("true", "a\0b", cwd=tmp_path)
    assert caught.value.exit_code == 126
