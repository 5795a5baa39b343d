"""The TCP connections of one process group, and how to end a collective that waits on them.

Gloo cannot be told to give up a collective: while a peer is stopped or cut off, the call waits for
the group's timeout, whatever `abort()` says. Shutting down the group's connections makes it raise
within milliseconds. Which connections those are follows from the descriptors that appeared while
the group was built. Used by `groups`; Linux only (elsewhere nothing is found, nothing is cut).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_DESCRIPTORS = "/proc/self/fd"


class ConnectionsMade:
    """Connections opened by this process between `start()` and `finish()`, by inode.

    `not_to`: port of a server whose connections are never counted (the rendezvous).
    """

    def __init__(self, not_to: int | None = None) -> None:
        self._not_to = not_to
        self._before: frozenset[int] = frozenset()
        self._inodes: frozenset[int] = frozenset()

    def start(self) -> None:
        """Remember what is open already."""
        self._before = frozenset(inode for inode, _ in _socket_descriptors())

    def finish(self) -> None:
        """Remember what has been connected since `start()`."""
        self._inodes = frozenset(
            inode
            for inode, descriptor in _socket_descriptors()
            if inode not in self._before and self._is_peer(descriptor, inode)
        )

    def __len__(self) -> int:
        return len(self._inodes)

    def cut(self) -> int:
        """Shut these connections down, both ways; return how many were still open."""
        count = 0
        for inode, descriptor in _socket_descriptors():
            if inode in self._inodes:
                with _borrowed(descriptor, inode) as connection:
                    if connection is not None:
                        with contextlib.suppress(OSError):  # the peer was faster
                            connection.shutdown(socket.SHUT_RDWR)
                            count += 1
        return count

    def close_in_child(self) -> None:
        """In a forked child: let go of the copies, or peers would not see the parent's end."""
        null = os.open(os.devnull, os.O_RDWR)
        try:
            for inode, descriptor in _socket_descriptors():
                if inode in self._inodes:
                    os.dup2(null, descriptor, inheritable=False)
        finally:
            os.close(null)

    def _is_peer(self, descriptor: int, inode: int) -> bool:
        with _borrowed(descriptor, inode) as connection:
            if connection is None or connection.type != socket.SOCK_STREAM:
                return False
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            try:
                port = connection.getpeername()[1]
            except OSError:
                return False  # a listener
            return bool(port != self._not_to)


def _socket_descriptors() -> list[tuple[int, int]]:
    """(inode, descriptor) of every open socket."""
    found = []
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return []
    for name in names:
        try:
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found.append((int(target[8:-1]), int(name)))
    return found


@contextlib.contextmanager
def _borrowed(descriptor: int, inode: int) -> Iterator[socket.socket | None]:
    """The socket behind a descriptor of somebody else; None where it is another one by now."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as connection:
        yield connection
