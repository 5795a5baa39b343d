"""A shell into which the commands of a page are typed, and a terminal that shows a screen."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import time
from pathlib import Path

from tests.support.job import eventually

DEADLINE_S = 120.0  # of one command


class Shell:
    """A bash that keeps its folder and variables from one command to the next."""

    def __init__(self, folder: Path, environ: dict[str, str], name: str) -> None:
        self._statuses = folder.parent / f"statuses-{name}"
        self._statuses.mkdir()
        self._output = folder.parent / f"output-{name}"
        self._number = 0
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "--noprofile", "--norc", "-s"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environ,
                start_new_session=True,  # no signal from a command to its group comes here
            )

    @property
    def output(self) -> str:
        """What all commands so far have printed."""
        return self._output.read_text(errors="replace")

    @property
    def status(self) -> int | None:
        """The exit status of the newest command; None while it runs."""
        if self._process.poll() is not None:
            return self._process.returncode
        path = self._statuses / str(self._number)
        return int(path.read_text()) if path.exists() else None

    def type(self, command: str) -> None:
        """Begin a command; the one before it has to be over."""
        self._number += 1
        path = self._statuses / str(self._number)
        note = f"echo $? > '{path}.new'; mv '{path}.new' '{path}'"
        assert self._process.stdin is not None
        self._process.stdin.write(f"{{ {command}\n}} </dev/null\n{note}\n".encode())
        self._process.stdin.flush()

    def wait(self, what: str) -> int:
        """Return the exit status of the newest command."""

        def look() -> tuple[int] | None:
            return None if self.status is None else (self.status,)

        return eventually(
            look, within=DEADLINE_S, what=f"{what} ends", context=lambda: self.output
        )[0]

    def close(self) -> None:
        """End the shell; what it has started is the caller's."""
        self._process.kill()
        self._process.communicate()


def show_on_terminal(command: str, keys: str, folder: Path, environ: dict[str, str]) -> int:
    """Run a command on a terminal and type the keys whenever it draws, until it has ended.

    Returns its exit status.
    """
    person, terminal = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=folder,
        env={**environ, "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(terminal)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{command}: not over within {DEADLINE_S:.0f} s"
            if select.select([person], [], [], 0.5)[0]:
                with contextlib.suppress(OSError):  # EIO: it has ended
                    os.read(person, 65536)
                    os.write(person, keys.encode())
        return process.returncode
    finally:
        process.kill()
        process.wait()
        os.close(person)
