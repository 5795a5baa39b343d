from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.agent import processes
from tests.launcher.agent.warm.harness import eventually
from tests.support.terminal import Terminal

LEND = """
import os
from launcher.agent import processes
with processes.stdin_for_workers() as fd:
    print(fd is not None and os.path.samestat(os.fstat(fd), os.fstat(0)), flush=True)
"""


def lent(command: tuple[str, ...] = (), **streams: int) -> str:
    """Return whether a process lends its stdin to workers."""
    argv = (*command, sys.executable, "-c", LEND)
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, **streams).stdout


def test_any_stdin_is_lent_and_a_closed_one_is_not() -> None:
    assert lent(stdin=subprocess.DEVNULL) == "True\n"
    assert lent(stdin=subprocess.PIPE) == "True\n"
    assert lent(("sh", "-c", 'exec "$@" <&-', "sh")) == "False\n"


def test_a_terminal_is_lent_in_the_foreground_and_where_it_is_not_ours(tmp_path: Path) -> None:
    with Terminal() as terminal:
        assert lent(stdin=terminal.slave) == "True\n"  # of another session, if of any
        for job, expected in (('"$@"', "True\n"), ('"$@" & wait $!', "False\n")):
            said = tmp_path / "said"
            shell = (*terminal.inside, "bash", "-mc", f"{{ {job}; }} >{said}", "bash")
            subprocess.run([*shell, sys.executable, "-c", LEND], check=True)
            assert said.read_text() == expected


def test_an_agent_takes_the_descriptor_out_of_its_variables() -> None:
    read, write = os.pipe()
    os.set_inheritable(read, True)
    environ = {processes.STDIN_VARIABLE: str(read), "A": "b"}
    assert processes.inherit_stdin(environ) == read
    assert environ == {"A": "b"}
    assert not os.get_inheritable(read)
    assert processes.inherit_stdin(environ) is None
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ("script", "waits"),
    [("input()", True), ("import time; time.sleep(60)", False), ("while True: pass", False)],
)
def test_a_process_that_waits_for_its_stdin_is_known(script: str, waits: bool) -> None:
    argv = (sys.executable, "-c", script)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            if waits:
                eventually(lambda: processes.waits_for_line(process.pid))
            else:
                for _ in range(50):
                    assert not processes.waits_for_line(process.pid)
        finally:
            process.kill()
    assert processes.waits_for_line(process.pid), "nobody can tell: it has ended"


def test_nothing_is_no_terminal() -> None:
    assert not processes.is_terminal(None)
