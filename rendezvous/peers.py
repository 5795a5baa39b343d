"""Who is at the other end of a connection, as far as the system can tell before the first byte.

An address, or for connections of this machine the address and the user, as all users of a machine
share its loopback addresses. An IPv6 address counts with its whole network of 64 bits, in which a
host takes as many addresses as it likes. The user is asked of the kernel (sock_diag(7)), which
takes about 20 µs; where it does not tell, the address alone counts.
"""

import contextlib
import ipaddress
import socket
import struct
from functools import lru_cache

_BY_FAMILY, _REQUEST, _PRINTED = 20, 1, 64  # SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, an IPv6 network
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, number, sender
_ASKED = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states
_ID = struct.Struct("!HH16s16s")  # inet_diag_sockid: both ports and addresses, then the rest
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, no cookie
_FOUND = struct.Struct("=4x48x12xII")  # inet_diag_msg, up to the user and the inode
_ALL_STATES = 0xFFFFFFFF


def peer_of(connection: socket.socket, name: tuple[str, int]) -> str:
    """Return who has connected; `name` is what the kernel has told of the address and the port."""
    address, port = name[:2]
    text, is_own = _known(address)
    if not is_own:
        return text
    user = None
    with contextlib.suppress(OSError, struct.error):
        user = _user_of(connection, text, port)
    return text if user is None else f"{text} (user {user})"


@lru_cache(maxsize=4096)
def _known(address: str) -> tuple[str, bool]:
    """Return an address as it counts, and whether it is one of this machine's loopback."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address, False
    mapped = getattr(found, "ipv4_mapped", None)
    found = mapped or found
    if found.version == 6 and not found.is_loopback:
        return str(ipaddress.ip_network((found, _PRINTED), strict=False)), False
    return str(found), found.is_loopback


def _user_of(connection: socket.socket, address: str, port: int) -> int | None:
    """Return the user of the other end of a connection within this machine, or None."""
    own_address, own_port = connection.getsockname()[:2]
    server = _known(own_address)[0]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    ends = (socket.inet_pton(family, each).ljust(16, b"\0") for each in (address, server))
    asked = _ASKED.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES)
    asked += _ID.pack(port, own_port, *ends) + _ANY
    head = _HEADER.pack(_HEADER.size + len(asked), _BY_FAMILY, _REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as kernel:  # NETLINK_SOCK_DIAG
        kernel.setblocking(False)
        kernel.send(head + asked)
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None  # an error
    user: int
    user, inode = _FOUND.unpack_from(answer, _HEADER.size)
    return user if inode else None  # without an inode it is nobody's: it has closed already
