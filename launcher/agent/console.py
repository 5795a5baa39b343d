"""Our own stdout or stderr as a place for whole lines that never blocks us.

The agent inherits both from the driver, and other agents write to them too, so lines go out in
pieces that a pipe takes whole. A reader that stands still holds the workers up for `STALL_S`
seconds at most; then their output is dropped, with a message, until the reader goes on. Nothing
that happens here ends a worker.

`O_NONBLOCK` belongs to the open file that we share with the driver and the other agents: to set it
would make *their* writes fail. So a pipe or terminal is opened once more through /proc, sockets are
asked per call, and where neither can be done we look before we write.
"""

import asyncio
import contextlib
import os
import select
import socket
import stat
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

PIPE_PIECE = select.PIPE_BUF  # a pipe takes that much whole or not at all (POSIX)
FREE_PIECE = 64 * 1024
STALL_S = 5.0
HIGH_WATER = 256 * 1024  # bytes waiting: workers' pipes are not read any more
LOW_WATER = 64 * 1024


@dataclass(frozen=True)
class Outlet:
    """A descriptor of our own for a stream that others use too.

    `write` takes up to `piece` bytes at a time and returns how many were written; it raises
    BlockingIOError where there is no room, and OSError where the stream is broken.
    """

    fd: int
    piece: int
    write: Callable[[bytes], int]


def open_outlet(fd: int) -> Outlet | None:
    """Return an outlet for what `fd` leads to; None where `fd` is not open."""
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or os.isatty(fd)):
            own = os.dup(fd)  # a file or /dev/null is always ready
            return Outlet(own, FREE_PIECE, lambda data: os.write(own, data))
        if not stat.S_ISSOCK(mode):
            with contextlib.suppress(OSError):  # another user's pipe, or there is no /proc
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                again = os.open(f"/proc/self/fd/{fd}", flags)
                return Outlet(again, PIPE_PIECE, lambda data: os.write(again, data))
        shared = os.dup(fd)
        write = _send if stat.S_ISSOCK(mode) else _write_if_ready
        return Outlet(shared, PIPE_PIECE, lambda data: write(shared, data))
    except OSError:
        return None


def _send(fd: int, data: bytes) -> int:
    with socket.socket(fileno=os.dup(fd)) as stream:
        return stream.send(data, socket.MSG_DONTWAIT)


def _write_if_ready(fd: int, data: bytes) -> int:
    """Write to a pipe that cannot be opened again; another writer may still get ahead of us."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(fd, data)


class Console:
    """One of our output streams; made and used on the agent's loop.

    Args:
        fd: the descriptor, left as it is.
        name: its name for people ("stdout").
        on_trouble: called with a sentence, once, when output begins to be dropped.
        stall: seconds for which a reader may hold the workers up.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        *,
        on_trouble: Callable[[str], None],
        stall: float = STALL_S,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._name, self._stall = name, stall
        self._on_trouble = on_trouble
        self._writers: set[Callable[[bool], None]] = set()
        self._outlet = open_outlet(fd)
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._paused = False
        self._dropping = False
        self._said = False
        self._blocked = False  # the loop calls us when there is room again
        self._progress_at = 0.0
        self._patience: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()

    def write(self, lines: bytes) -> None:
        """Take whole lines (each with its newline); returns at once."""
        if self._outlet is None or self._dropping or not lines:
            return
        self._waiting.append(lines)
        self._bytes += len(lines)
        self._empty.clear()
        if not self._blocked:
            self._flush()
        if self._bytes > HIGH_WATER and not self._paused and not self._dropping:
            self._pause(True)

    def attach(self, flow: Callable[[bool], None]) -> None:
        """Add a writer; `flow(False)` asks it to pause, `flow(True)` to go on."""
        self._writers.add(flow)
        if self._paused:
            flow(False)

    def detach(self, flow: Callable[[bool], None]) -> None:
        """Forget a writer; harmless when it is not known."""
        self._writers.discard(flow)

    async def drain(self, timeout: float) -> None:
        """Wait until everything is written, or `timeout` seconds are over."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout)

    def close(self) -> None:
        """Forget what still waits, and free the descriptor."""
        self._unblock()
        self._waiting.clear()
        self._bytes = 0
        self._empty.set()
        if self._outlet is not None:
            os.close(self._outlet.fd)  # the stream itself stays open for its other users
            self._outlet = None

    # ---- writing -------------------------------------------------------------------------

    def _flush(self) -> None:
        outlet = self._outlet
        if outlet is None:
            return
        try:
            while self._waiting:
                piece, rest = _first_piece(self._waiting[0], outlet.piece)
                written = outlet.write(piece)
                self._progressed(written)
                if left := piece[written:] + rest:
                    self._waiting[0] = left
                else:
                    self._waiting.popleft()
        except (BlockingIOError, InterruptedError):
            self._block(outlet.fd)
        except OSError as error:
            self._give_up(error)
        else:
            self._unblock()
            self._empty.set()

    def _progressed(self, written: int) -> None:
        self._bytes -= written
        self._progress_at = self._loop.time()
        if self._bytes <= LOW_WATER:
            self._dropping = False
            self._pause(False)

    def _pause(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            for flow in tuple(self._writers):
                flow(not paused)

    def _block(self, fd: int) -> None:
        if self._blocked:
            return
        self._blocked = True
        self._progress_at = self._loop.time()
        self._loop.add_writer(fd, self._flush)
        self._patience = self._loop.call_later(self._stall, self._check_patience)

    def _unblock(self) -> None:
        if not self._blocked:
            return
        self._blocked = False
        if self._outlet is not None:
            self._loop.remove_writer(self._outlet.fd)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    # ---- a reader that stands still, or is gone ------------------------------------------

    def _check_patience(self) -> None:
        """Stop waiting for the reader, if it holds workers up and took nothing for `stall`."""
        now = self._loop.time()
        if self._paused and now >= self._progress_at + self._stall:
            self._dropping = True
            self._pause(False)
            self._say_once(
                f"nobody has read our {self._name} for {self._stall:.0f} s; "
                "workers' lines to it are dropped until somebody does"
            )
        due = self._progress_at + self._stall
        self._patience = self._loop.call_at(
            due if due > now else now + self._stall, self._check_patience
        )

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._pause(False)
        self._say_once(
            f"cannot write to our {self._name} ({os.strerror(error.errno or 0)}); "
            "workers' lines to it are dropped, the job goes on"
        )

    def _say_once(self, sentence: str) -> None:
        if not self._said:
            self._said = True
            self._on_trouble(sentence)


def _first_piece(data: bytes, limit: int) -> tuple[bytes, bytes]:
    """Split off as many whole lines as fit into `limit` bytes (at least one line)."""
    if len(data) <= limit:
        return data, b""
    cut = data.rfind(b"\n", 0, limit) + 1 or data.find(b"\n") + 1 or len(data)
    return data[:cut], data[cut:]
