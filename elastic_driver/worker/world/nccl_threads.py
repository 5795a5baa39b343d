"""Wakes NCCL's proxy threads while a communicator is aborted, which else sleep for half a second.

A communicator has a thread that serves requests of its host's ranks over TCP, and one for messages
over a Unix socket. Both sleep in `poll()` for 500 ms at a time. They look whether the communicator
is aborted only when `poll()` returns, and the first one goes back into it once more, so an abort of
NCCL waits for them that long when the device has been free for long (NCCL's `src/proxy.cc`, 2.28 to
2.30). A connection that is closed at once, and an empty datagram, end that sleep. NCCL takes both
for strangers, as it does with a port scan. Of a connection that it accepts while it aborts, it
forgets the descriptor: `wake_until` closes those.

Works on Linux only; elsewhere nothing is found, and an abort takes its time. Times are seconds.
"""

import contextlib
import os
import socket
import threading
from typing import Any

from elastic_driver.worker.world.connections import open_sockets

FIRST_S, EVERY_S = 0.02, 0.02  # an abort tells the threads at once; none of them needs two calls
AT_MOST = 50  # calls; an abort that takes longer does not wait for these threads
Address = tuple[socket.AddressFamily, socket.SocketKind, Any]  # the last is Python's


class ProxyThreads:
    """The sockets on which the threads of one communicator wait: those that appeared with it."""

    def __init__(self) -> None:
        self._before = frozenset(inode for inode, _ in open_sockets())
        self._addresses: dict[int, Address] = {}  # by inode
        self._calls: set[tuple[Any, Any]] = set()  # to which address, and from where

    def finish(self) -> None:
        """Find the sockets that were made since this object."""
        for inode, descriptor in open_sockets():
            if inode not in self._before:
                with contextlib.suppress(OSError):  # closed meanwhile
                    self._note(inode, descriptor)

    def wake_until(self, ended: threading.Event) -> None:
        """Wake the threads again and again, until `ended`."""
        pause = FIRST_S
        for _ in range(AT_MOST):
            if ended.wait(pause):
                break
            pause = EVERY_S
            for inode, _ in open_sockets():
                if inode in self._addresses:  # else its number may be another program's by now
                    self._knock(*self._addresses[inode])
        ended.wait()  # until then NCCL may close them itself
        self._close_forgotten()

    def _note(self, inode: int, descriptor: int) -> None:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            datagrams = found.family == socket.AF_UNIX and found.type == socket.SOCK_DGRAM
            listens = found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            )
            if (datagrams or listens) and (name := found.getsockname()):
                self._addresses[inode] = found.family, found.type, name

    def _knock(self, family: socket.AddressFamily, kind: socket.SocketKind, address: Any) -> None:
        """Make a socket of this process readable."""
        with contextlib.suppress(OSError), socket.socket(family, kind) as caller:
            caller.setblocking(False)
            if kind == socket.SOCK_DGRAM:
                caller.sendto(b"", address)
            else:
                caller.connect_ex(address)
                self._calls.add((address, caller.getsockname()))

    def _close_forgotten(self) -> None:
        """Close the other ends of our calls that are still open."""
        for _, descriptor in open_sockets():
            with contextlib.suppress(OSError):  # closed meanwhile, or no connection
                with socket.socket(fileno=os.dup(descriptor)) as found:
                    ends = found.getsockname(), found.getpeername()
                if ends in self._calls:
                    os.close(descriptor)
        self._calls.clear()
