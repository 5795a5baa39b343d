"""A running ssh, srun or mpirun: it gets its input once, its output arrives as whole lines.

A login shell on the host runs the user's login files first, with the same streams. So nothing is
given before our command runs there, and what was printed before is kept apart (`Login`). A login
file that reads stdin gets an empty line after some seconds, and the end of stdin after more of
them. Our command says when it is done: a process that a login file has left may hold the
connection open.

`launcher.backends.remote` starts clients on its asyncio loop. Times are seconds.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from launcher.agent.lines import LineSplitter
from launcher.agent.marks import after_login, done_in
from launcher.agent.processes import kill_child

# Called with the stream (1 stdout, 2 stderr) and lines without their newline.
OnLines = Callable[[int, list[bytes]], None]

DRAIN_S = 1.0  # for output to end after the program: a helper of its own may hold the pipe
EMPTY_AFTER_S = 3.0  # without our command, until an empty line is sent; then one each second
EMPTY_LINES = 5
END_STDIN_S = 10.0  # until stdin ends, where our command needs nothing from it
LINGER_S = 2.0  # for the program to end after our command on the host
_MAX_LOGIN = 4096


@dataclass
class Login:
    """What the login files on the host did with the streams.

    Attributes:
        reached: our command runs, or has run.
        said: the last of what was on stdout before that.
        empty: so many empty lines were sent before that.
        closed: stdin was ended before that.
    """

    reached: bool = False
    said: bytes = b""
    empty: int = 0
    closed: bool = False


class Client(asyncio.SubprocessProtocol):
    """A program that `start` has started; `ended` waits for its end."""

    _transport: asyncio.SubprocessTransport

    def __init__(self, on_lines: OnLines, name: str, given: bytes | None) -> None:
        self.login = Login()
        self._on_lines, self._name, self._given = on_lines, name, given
        self._splitters = {1: LineSplitter(), 2: LineSplitter()}
        self._exited, self._drained = asyncio.Event(), asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._status: int | None = None  # of our command on the host, as it has said

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        on_lines: OnLines,
        environ: Mapping[str, str] | None,
        *,
        name: str,
        given: bytes | None = None,
        end_stdin: float | None = None,
    ) -> "Client":
        """Start a program that runs our command `name` on a host; raises OSError.

        `given` is written to its stdin once our command runs there. With None, stdin stays open
        until this process ends: so it sees our end. `end_stdin`: seconds after which stdin ends
        without that; None: never. `environ` is its environment; None: ours.
        """
        loop = asyncio.get_running_loop()
        # In a session of its own: Ctrl-C in our terminal is for us alone.
        _, client = await loop.subprocess_exec(
            lambda: cls(on_lines, name, given), *argv, env=environ, start_new_session=True
        )
        until = None if end_stdin is None else loop.time() + end_stdin
        client._timer = loop.call_later(EMPTY_AFTER_S, client._answer, until)
        return client

    def _answer(self, until: float | None) -> None:
        """Answer a login file that may read stdin: an empty line, or the end at `until`."""
        loop, stdin = asyncio.get_running_loop(), self._pipe(0)
        if self.login.reached or self._exited.is_set() or stdin is None or stdin.is_closing():
            return
        if until is not None and loop.time() >= until:
            self.login.closed = True
            stdin.close()
            return
        if self.login.empty < EMPTY_LINES:
            stdin.write(b"\n")
            self.login.empty += 1
        self._timer = loop.call_later(1.0, self._answer, until)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport; output may come before `start` has returned."""
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Pass the lines on that `data` completes."""
        if fd == 1 and not self.login.reached:
            data = self._without_login(data)
        if fd in self._splitters and (lines := self._splitters[fd].feed(data)):
            self._hear(fd, lines)

    def _without_login(self, data: bytes) -> bytes:
        """Return what our command has printed; give it its input when it begins."""
        found = after_login(self.login.said + data)
        if found is None:
            self.login.said = (self.login.said + data)[-_MAX_LOGIN:]
            return b""
        self.login.said, data = found[0], found[1]
        self.login.reached = True
        if self._given is not None and not self.login.closed:
            stdin = self._pipe(0)
            stdin.write(self._given)
            stdin.close()
        return data

    def _hear(self, fd: int, lines: list[bytes]) -> None:
        """Pass lines on, but not the mark of our command's end."""
        if fd == 1 and self._status is None:
            for number, line in enumerate(lines):
                if (done := done_in(line, self._name)) is not None:
                    before, self._status = done
                    lines[number : number + 1] = [before] if before else []
                    loop = asyncio.get_running_loop()
                    self._timer = loop.call_later(LINGER_S, self.kill)
                    break
        if lines:
            self._on_lines(fd, lines)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """Pass on the last line of a stream, which may lack its newline."""
        splitter = self._splitters.pop(fd, None)
        if splitter is not None and (lines := splitter.finish()):
            self._hear(fd, lines)

    def process_exited(self) -> None:
        """Note the end of the program; its output may go on."""
        self._exited.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Note the end of the program and of its output."""
        self._drained.set()

    def flow(self, going: bool) -> None:
        """Pause reading (False), which slows the host down in turn, or resume it (True)."""
        for fd in self._splitters:
            pipe = self._pipe(fd)
            pipe.resume_reading() if going else pipe.pause_reading()

    def kill(self) -> None:
        """Kill the program; what runs on the host goes on."""
        if self._transport.get_returncode() is None:
            kill_child(self._transport.get_pid())  # asyncio may have reaped it just now

    async def ended(self) -> int:
        """Wait for its end and its last lines; return the exit status as subprocess does.

        If our command on the host has said its own, it is that.
        """
        try:
            await self._exited.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self.kill()  # does something only if the caller was cancelled
            self._pipe(0).close()
            self.flow(True)
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._drained.wait(), DRAIN_S)
            finally:  # also when the caller is cancelled once more
                for fd in tuple(self._splitters):
                    self.pipe_connection_lost(fd, None)
                self._transport.close()
        return self._transport.get_returncode() or 0 if self._status is None else self._status

    def _pipe(self, fd: int) -> Any:
        return self._transport.get_pipe_transport(fd)
