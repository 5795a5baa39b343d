"""A running ssh, srun or mpirun: it gets its input once, its output arrives as whole lines.

`launcher.backends.remote` starts clients on its asyncio loop.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.agent.lines import LineSplitter
from launcher.agent.processes import kill_child

# Called with the stream (1 stdout, 2 stderr) and lines without their newline.
OnLines = Callable[[int, list[bytes]], None]

DRAIN_S = 1.0  # for output to end after the program: a helper of its own may hold the pipe


class Client(asyncio.SubprocessProtocol):
    """A program that `start` has started; `ended` waits for its end."""

    _transport: asyncio.SubprocessTransport

    def __init__(self, on_lines: OnLines) -> None:
        self._on_lines = on_lines
        self._splitters = {1: LineSplitter(), 2: LineSplitter()}
        self._exited, self._drained = asyncio.Event(), asyncio.Event()

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        given: bytes | None,
        on_lines: OnLines,
        environ: Mapping[str, str] | None,
    ) -> "Client":
        """Start a program with `given` on its stdin; raises OSError.

        With `given` None, its stdin stays open until this process ends: so it sees our end.
        `environ` is its environment; None: ours.
        """
        # In a session of its own: Ctrl-C in our terminal is for us alone.
        transport, client = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(on_lines), *argv, env=environ, start_new_session=True
        )
        client._transport = transport
        if given is not None:
            stdin = client._pipe(0)
            stdin.write(given)
            stdin.close()
        return client

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Pass the lines on that `data` completes."""
        if fd in self._splitters and (lines := self._splitters[fd].feed(data)):
            self._on_lines(fd, lines)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002
        """Pass on the last line of a stream, which may lack its newline."""
        splitter = self._splitters.pop(fd, None)
        if splitter is not None and (lines := splitter.finish()):
            self._on_lines(fd, lines)

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
        """Wait for its end and its last lines; return the exit status as subprocess does."""
        try:
            await self._exited.wait()
        finally:
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
        return self._transport.get_returncode() or 0

    def _pipe(self, fd: int) -> Any:
        return self._transport.get_pipe_transport(fd)
