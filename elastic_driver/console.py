"""Our own stdout or stderr, to which whole lines are written without blocking.

Driver and agents write to the same terminal at the same time, so lines go out in pieces that a pipe
takes whole. A reader that stops reading holds the workers up for `STALL_S` seconds at most; then
their output is dropped, with a message, until the reader goes on. No error here ends a worker.

`O_NONBLOCK` belongs to the open file that driver and agents share: if one sets it, writes of the
others fail. So a pipe or terminal is opened once more through /proc, each write to a socket has a
flag, and if neither is possible, we poll before each write.
"""

import asyncio
import contextlib
import json
import os
import select
import socket
import stat
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

PIPE_PIECE = select.PIPE_BUF  # a pipe takes that much whole or not at all (POSIX)
FREE_PIECE = 64 * 1024  # bytes that are written to a file at once
STALL_S = 5.0
SAY_S = 0.2  # for a full pipe to be read
HIGH_WATER = 256 * 1024  # waiting bytes at which reading of workers' pipes pauses
LOW_WATER = 64 * 1024  # waiting bytes at which it goes on


class Outlet(NamedTuple):
    """Our own descriptor for a stream that other processes use too.

    `write` takes up to `piece` bytes at a time and returns the number that was written; it raises
    BlockingIOError if there is no room, and OSError if the stream is broken.
    """

    fd: int
    piece: int
    write: Callable[[bytes], int]

    def close(self) -> None:
        """Free the descriptor; the stream itself stays open for its other users."""
        os.close(self.fd)


def open_outlet(fd: int) -> Outlet | None:
    """Return an outlet for the stream behind `fd`; None if `fd` is not open."""
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


def say(text: str) -> None:
    """Write lines to our stderr; what a full pipe does not take within `SAY_S` is dropped."""
    try:
        outlet = open_outlet(sys.stderr.fileno())
    except (OSError, ValueError):  # it is no file
        sys.stderr.write(text + "\n")
        return
    if outlet is None:
        return
    rest = f"{text}\n".encode("utf-8", "backslashreplace")
    room = select.poll()
    room.register(outlet.fd, select.POLLOUT)
    with contextlib.suppress(OSError):  # the reader has gone
        while rest and room.poll(SAY_S * 1000):
            with contextlib.suppress(BlockingIOError):
                rest = rest[outlet.write(rest[: outlet.piece]) :]
    outlet.close()


def say_note(text: str, *, as_json: bool, event: str = "note") -> None:
    """Say a sentence of `elasticrun`, as a line of text or as one of JSON (`--log-format`)."""
    facts = {"t": round(time.time(), 6), "event": event, "text": text}
    say(json.dumps(facts) if as_json else f"elasticrun: {text}")


class Console:
    """One of our output streams; made and used on one asyncio loop.

    Args:
        fd: the descriptor, left as it is.
        name: its name for people ("stdout").
        on_trouble: called with a sentence, once, when output begins to be dropped.
        stall: seconds for which a reader may hold the workers up.

    `elsewhere`, if it is set, takes the lines when the stream is broken, or after `divert`.
    """

    def __init__(
        self, fd: int, name: str, *, on_trouble: Callable[[str], None], stall: float = STALL_S
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._name, self._stall, self._on_trouble = name, stall, on_trouble
        self._writers: set[Callable[[bool], None]] = set()
        self._outlet = open_outlet(fd)
        self._waiting: deque[bytes] = deque()
        self._bytes = 0  # waiting
        self._patience: asyncio.TimerHandle | None = None  # runs while the workers are held up
        self._dropping = False
        self._said = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.elsewhere: Callable[[bytes], None] | None = None
        self._diverted = False

    def write(self, lines: bytes) -> None:
        """Take whole lines (each with its newline); returns at once."""
        if self._diverted and self.elsewhere is not None and lines:
            self.elsewhere(lines)
            return
        if self._outlet is None or self._dropping or not lines:
            return
        self._waiting.append(lines)
        self._bytes += len(lines)
        self._empty.clear()
        self._flush()
        if self._bytes > HIGH_WATER and self._patience is None:
            self._pause(True)

    def attach(self, flow: Callable[[bool], None]) -> None:
        """Add a writer; `flow(False)` asks it to pause, `flow(True)` to go on."""
        self._writers.add(flow)
        if self._patience is not None:
            flow(False)

    def detach(self, flow: Callable[[bool], None]) -> None:
        """Forget a writer; harmless when it is not known."""
        self._writers.discard(flow)

    def divert(self) -> None:
        """Hand what waits and every later line to `elsewhere`."""
        if self._diverted or self.elsewhere is None:
            return
        self._diverted = True
        waiting, self._waiting, self._bytes = tuple(self._waiting), deque(), 0
        if self._outlet is not None:
            self._loop.remove_writer(self._outlet.fd)
        self._empty.set()
        self.hold(False)
        for lines in waiting:
            self.elsewhere(lines)

    def take_back(self) -> None:
        """Write lines to the stream again, unless it is broken."""
        self._diverted = False

    def hold(self, held: bool) -> None:
        """Hold the workers up for `stall` seconds at most, or let them go on."""
        if held is not (self._patience is not None):
            self._pause(held)

    async def drain(self, timeout: float) -> None:
        """Wait until everything is written, or `timeout` seconds are over."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout)

    def close(self) -> None:
        """Drop what still waits, and free the descriptor."""
        self._waiting.clear()
        self._bytes = 0
        self._empty.set()
        if self._outlet is not None:
            self._loop.remove_writer(self._outlet.fd)
            self._outlet.close()
            self._outlet = None
        self._pause(False)

    # ---- writing -------------------------------------------------------------------------

    def _flush(self) -> None:
        """Write waiting lines as far as there is room; the loop calls again when there is more."""
        if self._outlet is None:
            return
        fd, limit, write = self._outlet
        try:
            while self._waiting:
                piece, rest = _first_piece(self._waiting[0], limit)
                written = write(piece)
                self._progressed(written)
                if left := piece[written:] + rest:
                    self._waiting[0] = left
                else:
                    self._waiting.popleft()
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(fd, self._flush)
        except OSError as error:
            self.divert()
            self.close()
            if self._diverted:
                return
            self._drop(f"cannot write to our {self._name} ({os.strerror(error.errno or 0)})")
        else:
            self._loop.remove_writer(fd)
            self._empty.set()

    def _progressed(self, written: int) -> None:
        self._bytes -= written
        if self._bytes <= LOW_WATER:
            self._dropping = False
            self._pause(False)
        elif self._patience is not None:
            self._pause(True)  # the reader gets as much time again

    def _pause(self, paused: bool) -> None:
        """Hold the workers up for `stall` seconds at most, or let them go on."""
        was_paused = self._patience is not None
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if paused:
            trouble = f"nothing has read our {self._name} for {self._stall:.0f} s"
            self._patience = self._loop.call_later(self._stall, self._drop, trouble)
        if paused != was_paused:
            for flow in tuple(self._writers):
                flow(not paused)

    def _drop(self, trouble: str) -> None:
        """Drop output until the reader goes on, and let the workers go on now."""
        if self._diverted:
            self._pause(False)
            return
        self._dropping = True
        self._pause(False)
        if not self._said:
            self._said = True
            self._on_trouble(f"{trouble}; workers' lines to it are dropped, the job goes on")


def _first_piece(data: bytes, limit: int) -> tuple[bytes, bytes]:
    """Split off as many whole lines as fit into `limit` bytes (at least one line)."""
    if len(data) <= limit:
        return data, b""
    cut = data.rfind(b"\n", 0, limit) + 1 or data.find(b"\n") + 1 or len(data)
    return data[:cut], data[cut:]
