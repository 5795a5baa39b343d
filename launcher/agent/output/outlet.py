"""Writing to an inherited stream without ever blocking, and without changing it for others.

`O_NONBLOCK` belongs to the open file that we share with the driver and the other agents: to
set it would make *their* writes fail. So a pipe or terminal is opened once more through
/proc, sockets are asked per call, and where neither can be done we look before we write.
"""

from __future__ import annotations

import os
import select
import socket
import stat

PIPE_PIECE = select.PIPE_BUF  # a pipe takes that much whole or not at all (POSIX)
FREE_PIECE = 64 * 1024


class Outlet:
    """A descriptor of our own for somebody else's stream; `piece` bytes at a time are fine."""

    def __init__(self, fd: int, piece: int) -> None:
        self.fd = fd
        self.piece = piece

    def write(self, data: bytes) -> int:
        """Bytes taken; BlockingIOError where there is no room, OSError where it is broken."""
        return os.write(self.fd, data)

    def close(self) -> None:
        """Free the descriptor; the stream itself stays open for its other users."""
        os.close(self.fd)


class _SocketOutlet(Outlet):
    def __init__(self, fd: int, piece: int) -> None:
        super().__init__(fd, piece)
        self._socket = socket.socket(fileno=fd)

    def write(self, data: bytes) -> int:
        return self._socket.send(data, socket.MSG_DONTWAIT)

    def close(self) -> None:
        self._socket.close()


class _CarefulOutlet(Outlet):
    """For a pipe that cannot be opened again: another writer may still get ahead of us."""

    def write(self, data: bytes) -> int:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        if not poll.poll(0):
            raise BlockingIOError
        return os.write(self.fd, data)


def open_outlet(fd: int) -> Outlet | None:
    """An outlet for what `fd` leads to; None where `fd` is not open."""
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            return _SocketOutlet(os.dup(fd), PIPE_PIECE)
        if not stat.S_ISFIFO(mode) and not os.isatty(fd):
            return Outlet(os.dup(fd), FREE_PIECE)  # a file or /dev/null is always ready
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return Outlet(os.open(f"/proc/self/fd/{fd}", flags), PIPE_PIECE)
        except OSError:  # another user's pipe, no /proc, or a reader that is gone already
            return _CarefulOutlet(os.dup(fd), PIPE_PIECE)
    except OSError:
        return None
