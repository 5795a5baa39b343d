"""The TCP connections of one process group, kept open by us so that they end in good order.

Two things gloo cannot do. It cannot give up a collective: while a peer is stopped or cut off, the
call waits for the group's timeout, whatever `abort()` says. And it survives a reset badly: a send
that fails while gloo answers the peer's request for it is forgotten, and who waits for that send
waits for ever. So we hold a second descriptor of each connection. `stop_hearing` makes our own
collectives end (gloo reads an end of file), `hang_up` those of our peers (they read one), and
since the connection itself stays open until `close`, nobody's last data meets a reset.

Which connections belong to a group follows from the descriptors that appeared while it was built.
Used by `groups`; on Linux only, elsewhere nothing is found.
"""

from __future__ import annotations

import contextlib
import os
import socket

_DESCRIPTORS = "/proc/self/fd"


class Connections:
    """Connections that this process made between `start()` and `finish()`.

    `not_to`: port of a server whose connections are never counted (the rendezvous).
    """

    def __init__(self, not_to: int | None = None) -> None:
        self._not_to = not_to
        self._before: frozenset[int] = frozenset()
        self._held: list[socket.socket] = []

    def __len__(self) -> int:
        return len(self._held)

    def start(self) -> None:
        """Remember what is open already."""
        self._before = frozenset(inode for inode, _ in _socket_descriptors())

    def finish(self) -> None:
        """Hold what has been connected since `start()`."""
        self.close()
        for inode, descriptor in _socket_descriptors():
            if inode not in self._before:
                self._hold(descriptor, inode)

    def stop_hearing(self) -> None:
        """Let every collective of this process that waits for a peer fail now; any thread."""
        self._shut(socket.SHUT_RD)

    def hang_up(self) -> None:
        """Let every collective of a peer that waits for us fail, once it has what we have sent."""
        self._shut(socket.SHUT_WR)

    def held(self) -> tuple[socket.socket, ...]:
        """The connections, for looking at only; one may be closed at any moment."""
        return tuple(self._held)

    def close(self) -> None:
        """Give the connections up; when no peer is in the group any more."""
        held, self._held = self._held, []
        for connection in held:
            connection.close()

    def close_in_child(self) -> None:
        """In a forked child: let go of all copies, or peers would not see the parent's end."""
        mine = {os.fstat(connection.fileno()).st_ino for connection in self._held}
        null = os.open(os.devnull, os.O_RDWR)
        try:
            for inode, descriptor in _socket_descriptors():
                if inode in mine:  # replaced, not closed: gloo's copy of the number stays valid
                    os.dup2(null, descriptor, inheritable=False)
        finally:
            os.close(null)

    def _shut(self, how: int) -> None:
        for connection in list(self._held):
            with contextlib.suppress(OSError):  # the peer was faster
                connection.shutdown(how)

    def _hold(self, descriptor: int, inode: int) -> None:
        try:
            copy = os.dup(descriptor)
        except OSError:  # closed meanwhile
            return
        if os.fstat(copy).st_ino != inode:  # the number belongs to something else by now
            os.close(copy)
            return
        connection = socket.socket(fileno=copy)
        if self._is_peer(connection):
            self._held.append(connection)
        else:
            connection.close()

    def _is_peer(self, connection: socket.socket) -> bool:
        if connection.type != socket.SOCK_STREAM:
            return False
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            return bool(connection.getpeername()[1] != self._not_to)
        except OSError:
            return False  # a listener


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
