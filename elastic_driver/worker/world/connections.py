"""The TCP connections of one process group, kept open by us so that they end in good order.

Gloo lacks two things. It cannot give up a collective: while a peer is stopped or cut off, the call
waits for the group's timeout, whatever `abort()` does. And it survives a reset badly: a send that
fails while gloo answers the peer's request for it is forgotten, and the peer waits for it for ever.
So we hold a second descriptor of each connection. `shut_reads` makes our own collectives fail,
because gloo reads an end of file; `shut_writes` makes those of our peers fail. The connection
itself stays open until `close`, so the last data of a peer never meets a reset.

The connections of a group are those that appeared while it was built, one to each peer. If there
are more, other threads have opened some meanwhile: those of Python objects are not gloo's. Works on
Linux only; elsewhere nothing is found. Times are seconds.
"""

import contextlib
import gc
import os
import socket
import stat
import struct
from collections.abc import Iterator

from elastic_driver.words.progress import MAX_LINKS, Links, LinkUse

# `tcpi_bytes_acked`, `tcpi_busy_time` and `tcpi_rwnd_limited` of `struct tcp_info` in linux/tcp.h,
# which only ever grows at its end; times are microseconds.
_TCP_INFO = struct.Struct("=120xQ40xQQ")


class GroupConnections:
    """The connections that this process makes from now until `finish()`.

    `exclude_port`: connections to this port of any peer are left out (the rendezvous).
    """

    def __init__(self, exclude_port: int | None = None) -> None:
        self.held: list[socket.socket] = []
        self._exclude_port = exclude_port
        self._before = frozenset(inode for inode, _ in open_sockets())

    def finish(self, peers: int | None = None) -> None:
        """Hold the connections that were made since this object.

        `peers`: gloo has one to each; None: to some of them. Connections of the script's own, such
        as to a database, are left alone.
        """
        new = [(inode, at) for inode, at in self._connected() if inode not in self._before]
        foreign = sockets_of_python() if peers is None or len(new) > peers else frozenset()
        for inode, descriptor in new:
            if inode in foreign:
                continue
            with contextlib.suppress(OSError):  # closed meanwhile, or a listener
                copy = os.dup(descriptor)
                if os.fstat(copy).st_ino != inode:  # the number is another file's by now
                    os.close(copy)
                    continue
                self.held.append(socket.socket(fileno=copy))

    def _connected(self) -> Iterator[tuple[int, int]]:
        """Yield (inode, descriptor) of each TCP connection, but for those to the rendezvous."""
        for inode, descriptor in open_sockets():
            try:
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    internet = found.family in (socket.AF_INET, socket.AF_INET6)
                    tcp = internet and found.type == socket.SOCK_STREAM
                    ours = tcp and found.getpeername()[1] != self._exclude_port
            except OSError:  # closed meanwhile, or a listener
                continue
            if ours:
                yield inode, descriptor

    def shut_reads(self) -> None:
        """Make every collective of this process that waits for a peer fail now; any thread."""
        self._shut(socket.SHUT_RD)

    def shut_writes(self) -> None:
        """Make every collective of a peer that waits for us fail, after the data we have sent."""
        self._shut(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connections; called when no peer is in the group any more."""
        while self.held:
            self.held.pop().close()

    def close_in_child(self) -> None:
        """Drop all copies in a forked child, so that peers see the end of the parent."""
        ours = {os.fstat(connection.fileno()).st_ino for connection in self.held}
        with open(os.devnull, "r+b", buffering=0) as null:
            for inode, descriptor in open_sockets():
                if inode in ours:  # replaced, not closed: gloo's copy of the number stays valid
                    os.dup2(null.fileno(), descriptor, inheritable=False)

    def _shut(self, how: int) -> None:
        for connection in list(self.held):
            with contextlib.suppress(OSError):  # the peer has ended it already
                connection.shutdown(how)


def link_usage(connections: list[socket.socket]) -> Links | None:
    """Return the network's time and bytes so far by peer address; None if nothing is known.

    In an exchange all ranks wait for the slowest link, so its duration does not show which one is
    slow. But Linux counts for each TCP connection how long it had unacknowledged data
    (`tcpi_busy_time`), and how much of that the receiver caused by not reading
    (`tcpi_rwnd_limited`). The rest is the network's own time. Connections within a host, and
    transports other than TCP, are not seen. Costs a few microseconds a connection. Where there are
    more peers than a message holds, those with the most traffic are returned.
    """
    own = ""
    totals: dict[str, tuple[float, int]] = {}
    for connection in connections:
        try:
            address, peer = connection.getsockname()[0], connection.getpeername()[0]
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # closed meanwhile
            continue
        if address == peer or len(info) < _TCP_INFO.size:  # within a host, or an old kernel
            continue
        own = address
        acked, busy, limited = _TCP_INFO.unpack(info)
        seconds, carried = totals.get(peer, (0.0, 0))
        totals[peer] = seconds + max(busy - limited, 0) * 1e-6, carried + acked
    if not totals:
        return None
    uses = [LinkUse(peer, round(seconds, 6), sent) for peer, (seconds, sent) in totals.items()]
    uses.sort(key=lambda use: -use.carried)
    return Links(own, tuple(uses[:MAX_LINKS]))


def sockets_of_python() -> frozenset[int]:
    """Return the inodes of the sockets that Python objects of this process hold."""
    found = set()
    for each in gc.get_objects():
        if issubclass(type(each), socket.socket):
            with contextlib.suppress(OSError):  # closed
                found.add(os.fstat(each.fileno()).st_ino)
    return frozenset(found)


def open_sockets() -> list[tuple[int, int]]:
    """Return (inode, descriptor) of every open socket."""
    found = []
    with contextlib.suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.append((status.st_ino, int(name)))
    return found
