"""Connections of this host's workers that nobody answers, as the kernel lists them.

A process that connects to a port behind a firewall waits for two minutes and learns nothing. In the
kernel's tables such a connection is in the state SYN_SENT. This works for every library, and sends
nothing. Times are monotonic seconds.
"""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import psutil

LOOK_S = 2.0  # between two looks
PATIENCE_S = 4.0  # more than three attempts of the kernel
AGAIN_S = 10.0  # between two reports of one connection
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_SYN_SENT = "02"
_WORD = struct.Struct("=I")  # addresses stand there as words of this machine, in hexadecimal


class Waiting(NamedTuple):
    """A worker that waits for an answer of this address, and for how long."""

    worker: str
    address: str
    port: int
    seconds: float


class Unanswered:
    """Remembers connections that wait, from one look to the next."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # inode of a socket → the first look that has found it
        self._told: dict[int, float] = {}

    def look(self, workers: Mapping[str, int]) -> list[Waiting]:
        """Return what waits too long now; `workers`: their names and pids."""
        now, open_now = time.monotonic(), dict(_connecting())
        self._since = {inode: self._since.get(inode, now) for inode in open_now}
        self._told = {inode: at for inode, at in self._told.items() if inode in open_now}
        late = {
            inode
            for inode, since in self._since.items()
            if now - since >= PATIENCE_S and now - self._told.get(inode, -AGAIN_S) >= AGAIN_S
        }
        found = []
        for worker, pid in workers.items() if late else ():
            for inode in late & _sockets_below(pid):
                self._told[inode] = now
                found.append(Waiting(worker, *open_now[inode], now - self._since[inode]))
        return found


def _connecting() -> Iterator[tuple[int, tuple[str, int]]]:
    """Yield (inode, remote end) of every connection of this network that is not answered yet."""
    for table in _TABLES:
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            next(lines, None)
            for line in lines:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _SYN_SENT:
                    yield int(fields[9]), _end(fields[2])


def _end(text: str) -> tuple[str, int]:
    """Return the address and the port that the kernel writes as `0100007F:1F90`."""
    address, _, port = text.partition(":")
    words = (int(address[at : at + 8], 16) for at in range(0, len(address), 8))
    packed = b"".join(map(_WORD.pack, words))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed).removeprefix("::ffff:"), int(port, 16)


def _sockets_below(pid: int) -> set[int]:
    """Return the inodes of the sockets of a process and its descendants."""
    found: set[int] = set()
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            folder = f"/proc/{process.pid}/fd"
            with contextlib.suppress(OSError):  # it has ended
                for name in os.listdir(folder):
                    with contextlib.suppress(OSError):  # closed meanwhile
                        target = os.readlink(f"{folder}/{name}")
                        if target.startswith("socket:["):
                            found.add(int(target[8:-1]))
    return found
