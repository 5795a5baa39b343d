"""How clients share one server: the room that each has, their turns, and who they are.

`Shares` is bounded room of one kind, such as places for streams: a share for each client, and a
reserve. One client (a token, or a session of a browser) gets a quarter at most. Machines (the
tokens of readers and of all other roles, and all strangers together) leave an eighth to people;
sessions of readers leave half of that to those who steer. The driver's own token has the whole.

`Turns` is for requests that may take long: a little of them in each turn of the loop. Heartbeats
and other quick requests come between two of them, however many there are. There are several queues,
so that work of one kind does not wait for all the work of another. In each queue the clients take
turns, so that one that asks without end makes no other one wait long.

`Peers` tells who is at the other end of a connection, as far as the system can tell before the
first byte: an address, or for connections of this machine the user alone, as each user of a machine
may connect from all its addresses, those of 127.0.0.0/8 among them. An IPv6 address counts with its
whole network of 64 bits, in which a host takes as many addresses as it likes. The user is asked of
the kernel (sock_diag(7)), which takes some microseconds; where it does not tell, the address
counts.

`Turns` and `Peers` run on the server's loop.
"""

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from enum import Enum
from functools import lru_cache
from time import perf_counter
from typing import TypeAlias

from rendezvous.auth import Caller, Role
from rendezvous.limits import Owner

# ---- room --------------------------------------------------------------------------------

_STEERING = (Role.DRIVER, Role.OPERATOR)


def is_person(caller: Caller) -> bool:
    """Return whether a client steers the job, or looks at it in a browser."""
    return caller.role in _STEERING or (caller.role is Role.READER and caller.subject != "")


def owner_of(caller: Caller) -> Owner:
    """Return the owner of what a caller writes; the driver's keys count for nobody."""
    return None if caller.role is Role.DRIVER else caller


def share_of(caller: Caller | None, room: int) -> int:
    """Return how much of a room one client may have; None: all strangers together."""
    return room if caller is not None and caller.role is Role.DRIVER else max(1, room // 4)


def open_to(caller: Caller | None, room: int) -> int:
    """Return how much of a room may be taken by all, before this client gets no more of it."""
    if caller is not None and caller.role in _STEERING:
        return room
    reserve = room // 16 if caller is not None and is_person(caller) else room // 8
    return max(1, room - reserve)


class Shares:
    """The room that clients have taken."""

    def __init__(self, room: int) -> None:
        self._room = room
        self.taken = 0
        self._taken_by: dict[Caller | None, int] = {}
        # What any client may have, and what is open to all: most requests are within both.
        self._any_share, self._any_open = share_of(None, room), open_to(None, room)

    def take(self, caller: Caller | None, amount: int = 1) -> bool:
        """Take some room for a client; return False if it has its share, or too little is left."""
        if not self.has_room(caller, amount):
            return False
        self.taken += amount
        self._taken_by[caller] = self._taken_by.get(caller, 0) + amount
        return True

    def has_room(self, caller: Caller | None, amount: int = 1) -> bool:
        """Return whether a client may take so much."""
        own, taken = self._taken_by.get(caller, 0) + amount, self.taken + amount
        if own <= self._any_share and taken <= self._any_open:
            return True
        return own <= share_of(caller, self._room) and taken <= open_to(caller, self._room)

    def give_back(self, caller: Caller | None, amount: int = 1) -> None:
        """Give back room that a client has taken."""
        self.taken -= amount
        left = self._taken_by[caller] - amount
        if left:
            self._taken_by[caller] = left
        else:
            del self._taken_by[caller]


# ---- turns -------------------------------------------------------------------------------

SLICE_S = 0.002  # of a turn; the last request of a slice may be longer
_Work: TypeAlias = "Callable[[], object] | asyncio.Future[None]"


class Queue(Enum):
    """The kinds of work; each has a queue, and the queues take turns."""

    NEW = "new"  # first requests of connections
    COSTLY = "costly"  # requests that are large, or of connections whose last ones took long
    ANSWER = "answer"  # large answers to be encoded
    STRANGERS = "strangers"  # requests for aiohttp that have no token: hellos, logins, guesses
    GENERAL = "general"  # of machines
    PEOPLE = "people"  # of operators, and of readers' sessions


class Turns:
    """Queues of work, each first come first served for one client; create it on a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # The clients with work; the one that is next first.
        self._queues: dict[Queue, OrderedDict[Hashable, deque[_Work]]]
        self._queues = {queue: OrderedDict() for queue in Queue}
        self._order = deque(Queue)  # the queue that is next first
        self._left = 0  # in all queues
        self._planned = False

    def add(self, queue: Queue, work: Callable[[], object], client: Hashable = None) -> None:
        """Call `work`, which is for this client, in one of the next turns."""
        self._add(queue, work, client)

    async def wait(self, queue: Queue, client: Hashable = None) -> None:
        """Return in a turn in which no other caller of this method goes on."""
        mine: asyncio.Future[None] = self._loop.create_future()
        self._add(queue, mine, client)
        await mine

    def _add(self, queue: Queue, work: _Work, client: Hashable) -> None:
        self._queues[queue].setdefault(client, deque()).append(work)
        self._left += 1
        self._schedule()

    def _schedule(self) -> None:
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        self._planned, until = False, perf_counter() + SLICE_S
        try:
            while self._left:
                work = self._pop()
                if isinstance(work, asyncio.Future):
                    if not work.done():  # its client may have gone
                        work.set_result(None)
                        break
                else:
                    work()
                if perf_counter() >= until:
                    break
        finally:
            if self._left:
                self._schedule()

    def _pop(self) -> _Work:
        """Take the oldest work of the next client out of the next queue that has any."""
        while True:
            queue = self._queues[self._order[0]]
            self._order.rotate(-1)
            if queue:
                self._left -= 1
                client, own = next(iter(queue.items()))
                work = own.popleft()
                if own:
                    queue.move_to_end(client)
                else:
                    del queue[client]
                return work


# ---- who has connected -------------------------------------------------------------------

THIS_MACHINE = "localhost"
_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1  # of netlink(7): its family, a kind, and a flag
_NETWORK = 64  # bits of an IPv6 network
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, number, sender
_ASKED = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states
_ID = struct.Struct("!HH16s16s")  # inet_diag_sockid: both ports and addresses, then the rest
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, no cookie
_FOUND = struct.Struct("=4x48x12xII")  # inet_diag_msg, up to the user and the inode
_ALL_STATES = 0xFFFFFFFF


class Peers:
    """Tells who has connected to one server; for one thread."""

    def __init__(self) -> None:
        self._number = 0  # of the last question
        self._kernel: socket.socket | None = None
        with contextlib.suppress(OSError):  # where it is forbidden, addresses count
            self._kernel = _ask_of_sockets()

    def close(self) -> None:
        """Ask the kernel nothing more."""
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def of(self, connection: socket.socket, name: tuple[str, int]) -> str:
        """Return who has connected; `name` is what `accept` has told of address and port."""
        address, counts_as = _known(name[0])
        try:
            user = self._user_of(connection, address, name[1])
        except (OSError, struct.error):
            self.close()  # an answer may still come, and would be taken for that of the next
            return counts_as
        return counts_as if user is None else of_user(user)

    def _user_of(self, connection: socket.socket, address: str, port: int) -> int | None:
        """Return the user of the other end of a connection, or None: it is on another machine."""
        own_address, own_port = connection.getsockname()[:2]
        client, server = _packed(address), _packed(_known(own_address)[0])
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        asked = _ASKED.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES)
        asked += _ID.pack(port, own_port, client, server) + _ANY
        if self._kernel is None:
            self._kernel = _ask_of_sockets()
        self._number = (self._number + 1) % 2**32
        head = _HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST, self._number, 0)
        self._kernel.send(head + asked)
        answer = self._kernel.recv(4096)
        _, kind, _, number, _ = _HEADER.unpack_from(answer)
        if number != self._number:
            raise OSError("this is the answer to another question")
        if kind != _BY_FAMILY:
            return None  # an error
        user: int
        user, inode = _FOUND.unpack_from(answer, _HEADER.size)
        return user if inode else None  # without an inode it is nobody's: it has closed already


def of_user(user: int) -> str:
    """Return the peer that a user of this machine is."""
    return f"{THIS_MACHINE} (user {user})"


def _ask_of_sockets() -> socket.socket:
    """Return the way to ask the kernel about sockets."""
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG)
    kernel.setblocking(False)
    return kernel


@lru_cache(maxsize=4096)
def _packed(address: str) -> bytes:
    """Return an address as the kernel takes it."""
    return ipaddress.ip_address(address).packed.ljust(16, b"\0")


@lru_cache(maxsize=4096)
def _known(address: str) -> tuple[str, str]:
    """Return an address as the kernel has it, and as it counts."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address, address
    mapped = getattr(found, "ipv4_mapped", None)
    found = mapped or found
    if found.is_loopback:
        return str(found), THIS_MACHINE
    if found.version == 6:
        return str(found), str(ipaddress.ip_network((found, _NETWORK), strict=False))
    return str(found), str(found)
