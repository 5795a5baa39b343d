"""Who is at the other end of a connection, as far as the system can tell before the first byte.

An address, or for connections of this machine the user alone, as each user of a machine may connect
from all its addresses, those of 127.0.0.0/8 among them. An IPv6 address counts with its whole
network of 64 bits, in which a host takes as many addresses as it likes. The user is asked of the
kernel (sock_diag(7)), which takes some microseconds; where it does not tell, the address counts.
"""

import contextlib
import ipaddress
import socket
import struct
from functools import lru_cache

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
