"""Gloo's collectives: the connections of a group, and waits that can be given up.

**Connections.** Gloo lacks two things. It cannot give up a collective: while a peer is stopped or
cut off, the call waits for the group's timeout, whatever `abort()` does. And it survives a reset
badly: a send that fails while gloo answers the peer's request for it is forgotten, and the peer
waits for it for ever. So we hold a second descriptor of each connection. `shut_reads` makes our own
collectives fail, because gloo reads an end of file; `shut_writes` makes those of our peers fail.
The connection itself stays open until `close`, so the last data of a peer never meets a reset.

The connections of a group are those that appeared while it was built, one to each peer. If there
are more, other threads have opened some meanwhile: those of Python objects are not gloo's. Works on
Linux only; elsewhere nothing is found.

**Waits.** Gloo forgets an operation whose connection breaks while its message is half received, or
while the peer's request for it is answered. The operation then neither ends nor fails before the
group's timeout, half an hour, and no call wakes the thread that waits for it. A peer that dies amid
a large broadcast causes this every time. Gloo carries operations out on threads of its own. So the
training thread waits here, in slices, and can leave; the forgotten operation sleeps on, with its
group.

`CollectiveWaits` replaces `wait` of torch's work objects, once for the process. Other waits stay as
they are: those with a timeout of their own, those for point-to-point operations (gloo breaks the
whole group when they time out), and, in rounds with an accelerator's collectives, all but those of
an exchange that gloo carries (`exchanging`).
DistributedDataParallel waits in C++ for a future: `guarded` returns one that can be given up. Any
other wait in C++ cannot be. Torch's reducer raises the error of such a future as "RuntimeError:
Unable to cast ... to Tensor": `cause_of` finds the error that is quoted there.

A script may catch the error of a lost peer and go on. So the first one of a round is remembered:
`refuse` raises again wherever such a script comes by. Times are seconds.
"""

import contextlib
import gc
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future

from elastic_driver.errors import ExitCode, SwallowedError, WorldBrokenError
from elastic_driver.failure_causes import in_short, looks_like_peer_loss
from elastic_driver.words.progress import MAX_LINKS, Links, LinkUse
from elastic_driver.worker import torch_seams
from elastic_driver.worker.current import say

# ---- connections -----------------------------------------------------------------------

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
            address = connection.getsockname()[0]
            peer = connection.getpeername()[0]
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


# ---- waits -----------------------------------------------------------------------------

SLICE = timedelta(seconds=0.1)  # the longest time until a wait that was given up ends
_SLICE_IS_OVER = "Operation timed out!"  # torch's words
# Gloo's transport also reports that ranks disagree about a tensor's size: the script's mistake.
SIZE_MISMATCH = "op.preamble"
_REFUSALS = 5  # of one round, after which the process ends
_torch_wait: Callable[..., bool] = dist.Work.wait
S = TypeVar("S")
T = TypeVar("T")


class CollectiveWaits:
    """The waits of one round. `give_up` may be called by any thread."""

    _current: "CollectiveWaits | None" = None  # None: torch's own waits

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below
        self._given_up: str | None = None
        self._futures: dict[Future[Any], Future[Any]] = {}  # that are not done, with their sources
        self._unended: list[Callable[[], bool]] = []  # is done? of each operation that was given up
        self._failure: Exception | None = None  # the first error of a guarded future
        self.lost: Exception | None = None  # the first one that says that a peer is lost
        self._refused = 0
        self.is_exchanging = False  # the training thread waits for gloo alone

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Within it, the training thread's waits are for gloo's operations, and can be given up.

        Matters in rounds with an accelerator's collectives, whose waits must not have a timeout.
        """
        if CollectiveWaits._current is not None:
            yield
            return
        CollectiveWaits._current, self.is_exchanging = self, True
        try:
            yield
        finally:
            CollectiveWaits._current, self.is_exchanging = None, False

    @staticmethod
    def use(waits: "CollectiveWaits | None") -> None:
        """Wait as `waits` says from now on; None: as torch does."""
        CollectiveWaits._current = waits
        dist.Work.wait = _wait

    def give_up(self, reason: str) -> None:
        """End every wait of this round, and every later one, with `WorldBrokenError`."""
        with self._lock:
            self._given_up = reason
            futures, self._futures = self._futures, {}
            self._unended += [source.done for source in futures.values()]
        for future in futures:
            self._fail(future, WorldBrokenError(reason))

    def check(self) -> None:
        """Raise `WorldBrokenError` once the waits were given up."""
        if self._given_up is not None:
            raise WorldBrokenError(self._given_up)

    def leave(self, work: dist.Work) -> None:
        """Raise `WorldBrokenError` once the waits were given up; `work` may go on then."""
        if self._given_up is not None:
            with self._lock:
                self._unended.append(work.is_completed)
            self.check()

    def note(self, error: Exception) -> None:
        """Remember an error of a collective that the script gets to see."""
        if self.lost is None and tells_of_loss(error):
            self.lost = error

    def refuse(self) -> None:
        """Raise if the script goes on though a collective of this round has lost a peer.

        Called on the training thread. First it is `WorldBrokenError`; a script that swallows this
        one, too, gets `SwallowedError`, which no `except Exception` catches; at last the process
        ends, to be replaced.
        """
        if self.lost is None:
            return
        self._refused += 1
        lost = in_short(str(self.lost)) or type(self.lost).__name__
        text = f"a collective has lost a peer, and the script has gone on ({lost})"
        if self._refused >= _REFUSALS:
            say(f"WorldBrokenError: {text}; this worker ends, to be replaced")
            os._exit(ExitCode.UNAVAILABLE)
        raise (WorldBrokenError if self._refused == 1 else SwallowedError)(text) from self.lost

    def ended(self) -> bool:
        """Return whether gloo carries out none of this round's operations any more."""
        with self._lock:
            done = [*self._unended, *(source.done for source in self._futures.values())]
        return all(is_done() for is_done in done)

    def cause_of(self, error: Exception) -> Exception:
        """Return the collective's error that torch quotes in `error`; else `error` itself."""
        failure = self._failure
        quoted = failure is not None and f"Unable to cast {failure} to Tensor" in str(error)
        return failure if failure is not None and quoted else error

    def guarded(
        self, source: Future[S], convert: Callable[[S], T], device: torch.device | None = None
    ) -> Future[T]:
        """Return a future with `convert(value of source)`; it can be given up.

        `device`: of the tensors in the value. Whoever waits has its stream of that device wait for
        gloo's copies.
        """
        own = device is not None and device.type != "cpu"
        future: Future[T] = Future(devices=[device]) if own else Future()
        with self._lock:
            self.check()
            self._futures[future] = source

        def done(source: Future[S]) -> None:
            with self._lock:
                if future not in self._futures:  # it was given up
                    return
                del self._futures[future]
            try:
                value = convert(source.value())
            except Exception as error:  # the thread that waits for the future gets it
                self._fail(future, error.with_traceback(None))
            else:
                future.set_result(value)

        source.add_done_callback(done)
        return future

    def _fail(self, future: Future[Any], error: Exception) -> None:
        self._failure = self._failure or error
        self.note(error)
        future.set_exception(error)


def tells_of_loss(error: BaseException) -> bool:
    """Return whether this error, causes apart, is that of a collective that lost a peer or a link.

    NCCL and the stores raise `DistError`s. Gloo raises plain RuntimeErrors, which are recognised by
    their text, as the agent recognises the victims of a lost peer.
    """
    if isinstance(error, WorldBrokenError | SwallowedError | dist.DistError):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return looks_like_peer_loss(text) and SIZE_MISMATCH not in text


def peer_is_lost() -> bool:
    """Return whether a collective of this round has told the training thread of a lost peer."""
    waits = CollectiveWaits._current
    return waits is not None and waits.lost is not None


def note_loss(error: Exception) -> None:
    """Remember an error that the script gets to see, of a collective that is not torch's."""
    waits = CollectiveWaits._current
    if waits is not None:
        waits.note(error)


def refuse_if_lost() -> None:
    """Raise if a collective of this round has lost a peer; see `CollectiveWaits.refuse`."""
    waits = CollectiveWaits._current
    if waits is not None and waits.lost is not None:
        waits.refuse()


def current_waits() -> CollectiveWaits | None:
    """Return the waits of this round; None if they are torch's own."""
    return CollectiveWaits._current


def _wait(work: dist.Work, timeout: timedelta = timedelta()) -> bool:
    """Wait as torch does, until the round's waits are given up."""
    waits = CollectiveWaits._current
    of_script = threading.current_thread() is threading.main_thread()
    if (
        timeout
        or waits is None
        or torch_seams.is_point_to_point(work)
        or (waits.is_exchanging and not of_script)  # it may be an accelerator's
    ):
        return _torch_wait(work, timeout)
    if waits.lost is not None and of_script:
        waits.refuse()
    try:
        while not work.is_completed():
            waits.leave(work)
            try:
                return _torch_wait(work, SLICE)
            except RuntimeError as error:
                if _SLICE_IS_OVER not in str(error):
                    raise
        return _torch_wait(work)
    except Exception as error:
        if of_script:
            waits.note(error)
        raise
