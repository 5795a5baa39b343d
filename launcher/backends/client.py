"""A running ssh, srun or mpirun: it is given its input once, its output comes as whole lines.

Belongs to the asyncio loop it is made on; used by `launcher.backends.remote` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence

from launcher.agent.lines import LineSplitter

OnLines = Callable[[int, list[bytes]], None]
"""Called with the stream (1 stdout, 2 stderr) and lines without their newline."""

DRAIN_S = 1.0  # for output to end after the program: a helper of its own may hold the pipe
_PIECE = 64 * 1024


class Client:
    """A started ssh, srun or mpirun; raises OSError if it cannot be. End it with `ended()`."""

    def __init__(
        self,
        argv: Sequence[str],
        given: bytes,
        on_lines: OnLines,
        environ: Mapping[str, str] | None = None,  # None: ours
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lines = on_lines
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environ,
            start_new_session=True,  # Ctrl-C in our terminal is for us alone
        )
        self._splitters: dict[int, tuple[int, LineSplitter]] = {}
        self._drained = asyncio.Event()
        self._paused = False
        for number, pipe in ((1, self._process.stdout), (2, self._process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._splitters[pipe.fileno()] = (number, LineSplitter())
                self._loop.add_reader(pipe.fileno(), self._read, pipe.fileno())
        self._give(given)

    def flow(self, going: bool) -> None:
        """Pause reading (False), which slows the host down in turn, or resume it (True)."""
        self._paused = not going
        for fd in self._splitters:
            if going:
                self._loop.add_reader(fd, self._read, fd)
            else:
                self._loop.remove_reader(fd)

    def kill(self) -> None:
        """Kill the program; what runs on the host goes on."""
        if self._process.returncode is None:
            self._process.kill()

    async def ended(self) -> int:
        """Wait for its end and its last lines; return the exit status as subprocess does."""
        pidfd = os.pidfd_open(self._process.pid)
        over = asyncio.Event()
        self._loop.add_reader(pidfd, over.set)
        try:
            await over.wait()
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            if not over.is_set():  # we were cancelled
                self._process.kill()
            code = self._process.wait()
            if self._paused:
                self.flow(True)
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._drained.wait(), DRAIN_S)
            finally:  # cancelled once more
                self._close()
        return code

    def _close(self) -> None:
        for fd in tuple(self._splitters):
            self._finish(fd)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _give(self, given: bytes) -> None:
        """Write a few bytes: the pipe takes them at once."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(given)
            self._process.stdin.close()

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, _PIECE)
        except BlockingIOError:
            return
        number, splitter = self._splitters[fd]
        if not data:
            self._finish(fd)
        elif lines := splitter.feed(data):
            self._on_lines(number, lines)

    def _finish(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        number, splitter = self._splitters.pop(fd)
        if lines := splitter.finish():
            self._on_lines(number, lines)
        if not self._splitters:
            self._drained.set()
